"""JupyterLab's "Run All" over a notebook whose ranks stop: no prompt holds it up; a cell that is run alone has one."""

from __future__ import annotations

import pytest

from tests.browser.lab import Lab

STOPS = "%%mesh\nbreakpoint()\nprint('on')"


@pytest.mark.slow
def test_run_all_goes_on_past_a_breakpoint(lab: Lab) -> None:
    lab.open("%mesh up --procs 2", STOPS, "print('the cell below ran')", "%mesh debug")
    lab.run_all(3)
    lab.prints(2, "the cell below ran")
    lab.prints(1, "[Oo]ther cells are already waiting")
    lab.start(3)  # alone: now there is somebody to ask
    lab.prints(3, "This cell holds the notebook")
    lab.answer(3, "continue")
    lab.done()
    lab.prints(1, r"\[0-1\]\s*on")
