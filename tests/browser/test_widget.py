"""The live view in a notebook's output, while a cell of the kernel runs."""

from __future__ import annotations

import re

import pytest

from monarch_kernel.widgets.mesh_widget import BUNDLE
from tests.browser.lab import Lab

pytestmark = [
    pytest.mark.skipif(not BUNDLE.exists(), reason="the widget is not built: no node 20"),
    pytest.mark.slow,
]

# It holds the kernel's main thread for longer than a lease: what the view asks meanwhile must not wait for its end.
HELD = """import time
print("it runs")
end = time.monotonic() + 120
while time.monotonic() < end:
    time.sleep(0.05)"""


def test_a_view_is_live_and_asks_and_acts_while_a_cell_runs(lab: Lab) -> None:
    lab.open("%mesh up --procs 3", "%mesh status", HELD)
    lab.run(0)
    lab.run(1)
    view = lab.cell(1).locator(".mk-Board")
    view.locator(".mk-Card").nth(2).wait_for()
    lab.start(2)
    lab.prints(2, "it runs")

    view.locator(".mk-Card").nth(1).click()
    details = view.locator(".mk-Details")
    details.get_by_role("tab", name="Stack").click()
    details.get_by_text("No user code runs.").wait_for()
    details.get_by_role("button", name="Kill", exact=True).click()
    details.locator("[data-sure]").click()
    view.locator(".mk-Card[data-state=dead]").wait_for()
    headline = view.locator(".mk-News-headline").inner_text()
    assert re.search(r"1 dead: .*SIGKILL", headline), headline
    # The lease was renewed all the time: the kernel is there.
    assert view.locator(".mk-Banner").is_hidden()
    lab.page.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    lab.done()
