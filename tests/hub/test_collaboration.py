"""Two browsers with one notebook (jupyter-collaboration): outputs, live views and the panel are right in both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, Server
from tests.browser.panel import Panel
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUNS = "import os, time\nprint('begun')\nwhile not os.path.exists('{0}'):\n    time.sleep(0.02)\nprint('over')"
CELLS = (
    "%mesh up m --procs 2\nfrom monarch_kernel import get_mesh\nm = get_mesh('m')",
    "m.show()",
    # An output that is replaced when there is one below it.
    "line = display('first', display_id=True)\nprint('second')\n"
    "for at in range(3):\n    line.update(f'first {at}')\nprint('third')",
    f"%%mesh\n{RUNS.format('go')}",
    "%mesh kill -r 1",
    f"%%mesh -r 0\n{RUNS.format('end')}",
)


@pytest.fixture
def pages(browser: Any, hub_python: Path, tmp_path: Path) -> Iterator[tuple[Lab, Lab]]:
    """A server, and two browsers that know nothing of one another."""
    (tmp_path / "lab").mkdir()
    contexts = [browser.new_context(viewport={"width": 1400, "height": 1000}) for _ in range(2)]
    with Server(tmp_path / "lab", hub_python) as server:
        first, second = (Lab(each.new_page(), server) for each in contexts)
        yield first, second
        for at, each in enumerate(contexts):
            for page in each.pages:
                page.screenshot(path=str(tmp_path / f"page{at}.png"))
            each.close()
        server.end_kernels()


def both_show(pages: tuple[Lab, ...], at: int, text: str) -> None:
    """Wait until a cell's outputs are these words in both pages."""
    for page, lab in enumerate(pages):
        wait_until(lambda lab=lab: lab.output(at).split() == text.split(), f"page {page} shows {text!r}", 30)


def saved(lab: Lab, at: int) -> list[str]:
    """The words of each output of a cell in the file."""
    lab.save()
    book = json.loads((lab.folder / "work" / "book.ipynb").read_text())
    texts = [each.get("text") or each["data"]["text/plain"] for each in book["cells"][at]["outputs"]]
    return [" ".join("".join(text).split()) for text in texts]


def test_one_notebook_in_two_browsers(pages: tuple[Lab, Lab]) -> None:
    first, second = pages
    first.open(*CELLS)
    second.join()
    for lab in pages:
        assert lab.is_shared()
    panels = [Panel(lab) for lab in pages]
    for panel in panels:
        panel.open()
    first.run(0)
    for panel in panels:
        panel.has_states(idle=2)
    first.run(1)
    views = [lab.cell(1).locator(".mk-View") for lab in pages]
    for view in views:
        view.filter(has_text=re.compile(r"idle\s*2")).wait_for()

    # What one page has run, the other shows in the same order.
    first.run(2)
    both_show(pages, 2, "'first 2' second third")
    second.run(2)
    both_show(pages, 2, "'first 2' second third")

    # A page that joins while a cell runs leaves its progress to the page that shows it.
    first.start(3)
    for lab in pages:
        lab.prints(3, "0 of 2 ranks done")
    for panel, view in zip(panels, views, strict=True):
        panel.has_states(running=2)
        view.filter(has_text=re.compile(r"running\s*2")).wait_for()
    second.page.reload()
    second.prints(3, "0 of 2 ranks done")
    panels[1].has_states(running=2)
    first.prints(3, "0 of 2 ranks done")
    first.write("go")
    both_show(pages, 3, "[0-1] begun over")
    first.done()
    views[1].filter(has_text=re.compile(r"idle\s*2")).wait_for()

    # What one page does, both see; each shows what it has opened.
    second.run(4)
    for panel, view in zip(panels, views, strict=True):
        panel.has_states(dead=1, idle=1)
        view.filter(has_text=re.compile(r"dead\s*1")).wait_for()
    panels[0].press("heal")
    for panel, view in zip(panels, views, strict=True):
        panel.has_states(idle=2)
        view.filter(has_text=re.compile(r"idle\s*2")).wait_for()

    # The page that runs a cell goes: the other one keeps its views and its panel.
    first.start(5)
    second.prints(5, "waiting for 0")
    first.page.context.close()
    panels[1].has_states(running=1, idle=1)
    second.write("end")
    panels[1].has_states(idle=2)
    views[1].filter(has_text=re.compile(r"idle\s*2")).wait_for()
    assert saved(second, 2) == ["'first 2'", "second third"]
    assert saved(second, 3) == ["[0-1] begun over"]
