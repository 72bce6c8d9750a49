"""`mesh.map` in a notebook: progress below the cell, Ctrl-C, output where it belongs, and tables."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.kernel.harness import Bell, Kernel, Outcome
from tests.kernel.screen import ever, text


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of two ranks."""
    kernel.ok("%mesh up --procs 2")
    kernel.ok("from monarch_kernel import get_mesh\nm = get_mesh('m')")
    return kernel


def test_values_and_progress(mesh: Kernel, bell: Bell) -> None:
    gate = f"{bell.path}.gate"
    mesh.ok(
        "def slow(i):\n    import os, time\n"
        f"    while i == 5 and not os.path.exists({gate!r}):\n        time.sleep(0.005)\n    return i * 10"
    )
    cell = mesh.send("await m.map(slow, range(6))")
    outcome = cell.until(lambda outcome: "map slow: 5 of 6 items · 2 ranks · about" in ever(outcome))
    open(gate, "w").close()
    outcome = cell.wait()
    assert outcome.text == "[0, 10, 20, 30, 40, 50]"
    assert "map slow" not in text(outcome)


def test_what_the_function_prints_is_shown_below_the_cell(mesh: Kernel) -> None:
    outcome = mesh.ok("list(m.map(lambda i: print('item', i), range(2)))")
    assert re.sub(r"\[\d\] +", "", text(outcome)).split("\n") in (["item 0", "item 1"], ["item 1", "item 0"])


def test_a_stop_ends_the_map_and_frees_the_ranks(mesh: Kernel, bell: Bell) -> None:
    mesh.ok(bell.code())
    mesh.ok("def spin(i):\n    import time\n    if i < 2:\n        ring()\n    while True:\n        time.sleep(0.001)")
    for code in ("list(m.map(spin, range(100)))", "await m.map(spin, range(100))"):
        cell = mesh.send(code)
        bell.wait(2)
        mesh.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt", code
        assert mesh.ok("m.map(abs, range(4)).get()").text == "[0, 1, 2, 3]", "no rank is left busy"


def test_an_error_names_item_rank_and_cell(mesh: Kernel) -> None:
    outcome = mesh.run("def inverse(x):\n    return 1 / x\nlist(m.map(inverse, [4, 2, 0]))")
    told = re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback)
    assert outcome.ename == "ActorError[ZeroDivisionError]"
    assert re.search(r"Cell In\[\d+\], line 2, in inverse", told) and "item 2 of the map: 0" in told
    assert re.search(r"failed on rank \d of 2", told)


def test_scattered_data_are_variables_of_cells(mesh: Kernel) -> None:
    mesh.ok("m.scatter('numbers', list(range(5)));")
    assert text(mesh.ok("%%mesh\nsquares = [n * n for n in numbers]\nnumbers")) == "[0] [0, 1, 2]\n[1] [3, 4]"
    assert mesh.ok("m.gather('squares')").text == "[0, 1, 4, 9, 16]"


def html(outcome: Outcome) -> str:
    assert outcome.result is not None
    return re.sub(r' style="[^"]*"', "", outcome.result["text/html"])


def test_tables(mesh: Kernel, start_kernel: Callable[..., Kernel]) -> None:
    shown = html(mesh.ok("m"))
    assert "ProcMesh m (gpus=2)" in shown and "<td>gpus=1</td><td>alive</td>" in shown
    shown = html(mesh.ok("%%mesh\n'<b>'\n") and mesh.ok("m.map(str, range(1)) and _"))
    assert "ValueMesh (gpus=2)" in shown and "<td>0-1</td><td>gpus=0-1</td>" in shown
    assert "&lt;b&gt;" in shown and "<b>" not in shown
    mesh.ok(
        "from monarch_kernel.actor import Actor, endpoint, this_host\n"
        "class Counter(Actor):\n    @endpoint\n    def add(self, by):\n        '''Add to it.'''\n"
        "counters = m.spawn('counters', Counter)"
    )
    shown = html(mesh.ok("counters"))
    assert "ActorMesh counters (gpus=2): Counter on mesh m" in shown and "<td>add</td><td>Add to it.</td>" in shown
    assert "HostMesh" in html(mesh.ok("this_host()"))
    mesh.ok("%mesh up own --procs 1")
    mesh.ok("own = get_mesh('own')\nown.stop().get(30)")
    assert "ProcMesh own" in html(mesh.ok("own")), "a mesh that was stopped can be shown, too"
    mesh.ok("%mesh use m")
