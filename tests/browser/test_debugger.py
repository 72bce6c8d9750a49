"""JupyterLab's own debugger over ranks, as a person uses it."""

from __future__ import annotations

import pytest

from tests.browser.lab import Lab

WORK = """%%mesh
def work(rank):
    x = rank + 1
    y = x * 10
    return y
work(rank)"""


@pytest.mark.slow
def test_a_breakpoint_in_the_gutter_stops_three_ranks(lab: Lab) -> None:
    lab.open("%mesh up --procs 3", WORK, "%mesh focus 0")
    assert "3 ranks" in lab.run(0)
    lab.debug()
    lab.break_at(1, 3)
    lab.start(1)
    frames = lab.frames(r"\[rank \d\] work")
    assert len(frames) == 2
    assert lab.highlighted(1) == 3
    shown = int(frames[0].partition("rank ")[2][0])
    assert lab.evaluate("rank * 100").strip() == str(shown * 100)

    lab.all_stopped(3)

    # Switch as our panel does it, and by a command that can be typed while the cell runs.
    other, last = (rank for rank in range(3) if rank != shown)
    assert lab.ask_debugger("mesh/focus", rank=other)["success"]
    lab.frames(rf"\[rank {other}\] work")
    assert f"rank {last} is shown" in lab.evaluate(f"%mesh focus {last}")
    lab.frames(rf"\[rank {last}\] work")
    assert lab.highlighted(1) == 3
    assert lab.evaluate("rank * 100").strip() == str(last * 100)

    # Step: the focus stays, the next line lights up, and there is a new variable.
    lab.press("Next")
    lab.lit(1, 4)
    assert lab.frames(r"work")[0] == f"[rank {last}] work"
    lab.shows("x", str(last + 1))

    # A cell that asks for another rank does not wait for the one that is stopped.
    lab.beside(2)
    lab.prints(2, "rank 0 is shown")
    lab.frames(r"\[rank 0\] work")

    # Go on, all ranks together, with JupyterLab's own button.
    lab.press("Continue")
    lab.done()
    for rank in range(3):
        lab.prints(1, rf"\[{rank}\]\s*{10 * (rank + 1)}")

    # Off and on: the breakpoint is there again, and holds. Stepping out of the cell shows the next rank, and no error.
    lab.debug(on=False)
    lab.debug()
    lab.has_break(1, 3)
    lab.start(1)
    first = lab.frames(r"\[rank \d\] work")[0]
    lab.all_stopped(3)
    lab.press("Step Out")
    lab.frames(r"<module>")
    lab.press("Step Out")
    assert lab.frames(r"\[rank \d\] work")[0] != first
    lab.press("Continue")
    lab.done()
    assert "Traceback" not in lab.output(1)
