"""Which cell shows which stopped ranks, as plain data and as text. No debugger, no mesh."""

from __future__ import annotations

from dataclasses import replace

from monarch_kernel.debugger.events import RankStop
from monarch_kernel.kernel.debug.stop_notices import is_part_of, notice_text, notices_of, of_cell
from tests.debugger.memory import MemoryDebugger, Rank


def stopped(*ranks: int) -> list[RankStop]:
    return MemoryDebugger(*(Rank([12], number=rank) for rank in ranks)).stops()


def of(at: RankStop, *, cell: str, thread: int = 100) -> RankStop:
    """The same stop, of another cell or thread."""
    return replace(at, stop=replace(at.stop, cell=cell, thread=thread))


def test_each_cell_has_a_notice_of_its_own_stops() -> None:
    first, second, third = (of(stop, cell=cell) for stop, cell in zip(stopped(0, 1, 2), "aba", strict=True))
    notices = notices_of([first, second, third], {})
    assert [(notice.cell, [at.rank for at in notice.stops]) for notice in notices] == [("a", [0, 2]), ("b", [1])]


def test_a_stop_of_no_known_cell_is_shown_by_the_cell_that_set_the_breakpoint() -> None:
    (stop,) = stopped(0)
    assert [notice.cell for notice in notices_of([of(stop, cell="")], {stop.stop.breakpoint: "setter"})] == ["setter"]
    assert [notice.cell for notice in notices_of([of(stop, cell="")], {})] == [""]


def test_kept_frames_of_errors_are_no_stops_of_a_cell() -> None:
    (stop,) = stopped(0)
    assert notices_of([of(stop, cell="a", thread=0)], {}) == []
    assert of_cell([of(stop, cell="a", thread=0)], "a") == []


def test_a_notice_says_where_ranks_are_and_what_to_do() -> None:
    (notice,) = notices_of([of(stop, cell="a") for stop in stopped(0, 1)], {})
    text = notice_text(notice, "%mesh debug opens a prompt.", lambda _file: "Cell In[3]")
    assert text.startswith("Stopped:\n0-1  In[3]:12 in step")
    assert text.endswith("\n%mesh debug opens a prompt.")
    assert notice_text(notice, "") == notice_text(notice, "hint").removesuffix("\nhint")


def test_parts_of_a_cell_have_its_key_at_their_beginning() -> None:
    assert is_part_of("cell-1", "cell-1") and is_part_of("cell-1.7", "cell-1")
    assert not is_part_of("cell-12", "cell-1") and not is_part_of("", "cell-1")
