"""Widgets that cells make on ranks, in JupyterLab: live, after a reload of the page, and without their kernel."""

from __future__ import annotations

import re

import pytest

from tests.browser.lab import Lab
from tests.waiting import wait_for_text

CELLS = (
    "%mesh up --procs 2",
    "%%mesh\nimport ipywidgets\nslider = ipywidgets.IntSlider(value=3 + rank, description=f's{rank}')\n"
    "seen = []\nslider.observe(lambda change: seen.append(change.new), 'value')\nslider",
    "%%mesh\nfrom tqdm.notebook import tqdm\nimport os, time\n"
    "for step in tqdm(range(4)):\n    for part in tqdm(range(3), leave=False):\n        time.sleep(0.05)\n"
    "    while step == 1 and not os.path.exists('go'):\n        time.sleep(0.05)",
    "%%mesh\nslider.value, seen",
)


@pytest.mark.slow
def test_widgets_of_ranks_live_return_with_the_page_and_are_text_without_a_kernel(lab: Lab) -> None:
    lab.open(*CELLS)
    lab.run(0)
    lab.run(1)
    handles = lab.cell(1).locator(".widget-slider .noUi-handle")
    handles.nth(1).wait_for()
    assert lab.cell(1).locator(".widget-readout").all_inner_texts() == ["3", "4"]

    # Bars move while the cell runs, and those of inner loops go with their ends.
    lab.start(2)
    bars = lab.cell(2).locator(".jupyter-widgets.widget-hbox:not(:empty)")
    lab.page.wait_for_function(
        "() => [...document.querySelectorAll('.widget-html')].filter(each => each.innerText.includes('1/4')).length"
    )
    go(lab)
    lab.done()
    lab.page.wait_for_function(
        "() => [...document.querySelectorAll('.widget-html')]"
        ".filter(each => each.innerText.includes('4/4')).length === 2"
    )
    assert bars.count() == 2
    assert [each for each in lab.output(2).split() if each.startswith("[") and each.endswith("]")] == ["[0]", "[1]"]

    # The user moves one: the rank has the value, and its callback ran.
    move(lab, 1, 2)
    wait_for(lab, 3, r"\[0\]\s+\(3, \[\]\)\s+\[1\]\s+\(6, \[5, 6\]\)")

    # A page that is loaded again has them as they are, and live.
    lab.save()
    lab.reload()
    handles.nth(1).wait_for()
    assert lab.cell(1).locator(".widget-readout").all_inner_texts() == ["3", "6"]
    move(lab, 0, 1)
    wait_for(lab, 3, r"\[0\]\s+\(4, \[4\]\)\s+\[1\]\s+\(6, \[5, 6\]\)")
    lab.save()

    # Without the kernel, at once and later, there is their text.
    lab.end_kernel()
    reads_as_text(lab)
    lab.reload()
    reads_as_text(lab)


def go(lab: Lab) -> None:
    """Let the cell that runs go on."""
    (lab.folder / "work" / "go").touch()


def move(lab: Lab, rank: int, steps: int) -> None:
    """Move the slider of a rank by keys."""
    handle = lab.cell(1).locator(".widget-slider .noUi-handle").nth(rank)
    handle.focus()
    for _ in range(steps):
        handle.press("ArrowRight")


def wait_for(lab: Lab, at: int, pattern: str) -> None:
    """Run a cell until its output is this."""
    wait_for_text(lambda: lab.run(at), lambda text: re.search(pattern, text), f"the cell says {pattern!r}")


def reads_as_text(lab: Lab) -> None:
    """Both cells show the texts of their widgets, the bars as they ended, and nothing of inner ones."""
    lab.prints(1, r"IntSlider\(value=3, description='s0'\)")
    assert re.search(r"^\[0\]\s+IntSlider\(value=3.*\)\s+\[1\]\s+IntSlider\(value=4.*\)\s*$", lab.output(1))
    assert re.search(r"^\[0\]\s+100%\|#+\| 4/4 .*\s+\[1\]\s+100%\|#+\| 4/4 .*\s*$", lab.output(2).strip())
    assert "Loading" not in lab.output(1) + lab.output(2)
