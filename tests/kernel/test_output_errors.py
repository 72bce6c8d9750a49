"""The error of a cell that failed on some ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

from monarch_kernel.actor import Extent
from monarch_kernel.errors import Fault, capture
from monarch_kernel.kernel.cell import remember_source
from monarch_kernel.kernel.output.cell_errors import CellFailure, MeshCellError, MeshCellInterrupt, cell_error

EXTENT = Extent(("gpus",), (8,))


def fault_of(source: str, filename: str = "/tmp/cell.py") -> Fault:
    remember_source(filename, source)
    try:
        exec(compile(source, filename, "exec"), {})
    except BaseException as error:
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next
        return capture(error)
    raise AssertionError("the source raised nothing")


def plain(error: MeshCellError) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error._render_traceback_()))


def make(failures: list[CellFailure], label: Callable[[str], str | None] | None = None) -> MeshCellError:
    return MeshCellError("m", EXTENT, range(8), failures, {7: "ok"}, label or (lambda file: "Cell In[3]"))


def test_equal_tracebacks_are_shown_once_with_their_ranks() -> None:
    fault = fault_of("def f():\n    raise ValueError('boom')\n\nf()\n")
    error = make([CellFailure(rank, "h", 100 + rank, fault) for rank in (1, 3)])
    text = plain(error)
    assert "Failed on ranks 1,3 (gpus=1,3) of the 8 of mesh m that ran it" in text
    assert "[1,3] h pid 101, h pid 103" in text
    assert text.count("ValueError: boom") == 1
    assert "Cell In[3], line 4" in text
    assert "----> 2     raise ValueError('boom')" in text
    assert "in f" in text
    assert str(error) == f"{text.splitlines()[0]}: 1,3: ValueError: boom"
    assert error.values == {7: "ok"}


def test_same_place_different_messages_are_told_by_rank() -> None:
    faults = [fault_of(f"n = 'rank {rank}'; raise ValueError(n)\n") for rank in range(3)]
    text = plain(make([CellFailure(rank, fault=fault) for rank, fault in enumerate(faults)]))
    assert text.count("----> 1") == 1
    for rank in range(3):
        assert f"[{rank}] ValueError: rank {rank}" in text


def test_the_smallest_group_comes_first() -> None:
    many, one = fault_of("raise KeyError(1)\n"), fault_of("1/0\n", "/tmp/other.py")
    text = plain(make([CellFailure(0, fault=many), CellFailure(1, fault=many), CellFailure(2, fault=one)]))
    assert text.index("ZeroDivisionError") < text.index("KeyError")


def test_deaths() -> None:
    text = plain(make([CellFailure(rank, "h", 9, death="killed by SIGKILL") for rank in (0, 1)]))
    assert "[0-1] h pid 9\nkilled by SIGKILL" in text


def test_chains_and_groups() -> None:
    chained = fault_of("try:\n    1/0\nexcept Exception as e:\n    raise KeyError('k') from e\n")
    text = plain(make([CellFailure(0, fault=chained)]))
    assert "ZeroDivisionError" in text
    assert "caused this exception" in text
    group = fault_of("raise ExceptionGroup('several', [ValueError(1), TypeError(2)])\n")
    text = plain(make([CellFailure(0, fault=group)]))
    assert "ValueError: 1" in text
    assert "TypeError: 2" in text


def test_many_kinds_are_bounded() -> None:
    failures = [CellFailure(rank, fault=fault_of("1/0\n", f"/tmp/cell{rank}.py")) for rank in range(8)]
    text = plain(make(failures))
    assert text.count("---->") == 6
    assert "[7] ZeroDivisionError" in text
    assert "2 more kinds" in str(make(failures))


def test_an_interrupt_of_all_is_an_interrupt() -> None:
    fault = fault_of("raise KeyboardInterrupt\n")

    def error(*failures: CellFailure, interrupted: bool) -> MeshCellError:
        return cell_error("m", EXTENT, range(8), failures, {}, interrupted=interrupted)

    stopped = CellFailure(0, fault=fault)
    assert isinstance(error(stopped, interrupted=True), MeshCellInterrupt)
    assert not isinstance(error(stopped, interrupted=False), KeyboardInterrupt)
    assert not isinstance(error(stopped, CellFailure(1, fault=fault_of("1/0\n")), interrupted=True), KeyboardInterrupt)
