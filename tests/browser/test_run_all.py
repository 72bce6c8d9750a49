"""JupyterLab's "Run All" over a notebook whose ranks stop: no prompt holds it up; a cell that is run alone has one."""

from __future__ import annotations

import pytest

from tests.browser.lab import Lab

SHOWN = "%mesh status"
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


@pytest.mark.slow
def test_the_status_of_a_mesh_that_ended_stays_in_the_record(lab: Lab) -> None:
    lab.open("%mesh up --procs 2", SHOWN, "%mesh down", "print('over')", "'the end'")
    lab.run_all(4)
    lab.prints(3, "over")
    lab.prints(1, "This mesh has ended. This is its (last )?state")
    assert "2 idle" in lab.output(1) or lab.cell(1).locator(".mk-Card").count() == 2
