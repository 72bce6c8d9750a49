"""What axe-core finds in the panel, in views and tables of cells, and in reports: nothing serious, in both themes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab
from tests.browser.panel import Panel
from tests.conftest import wait_until
from tests.join.conftest import Job, start_torchrun  # noqa: F401  # a fixture
from tests.join.test_reports import SCRIPT, run_report, sleeping

ROOT = Path(__file__).resolve().parents[2]
AXE = ROOT / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
#: The rules of WCAG 2.2, levels A and AA; of what is found, what keeps people from using it.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
SERIOUS = ("serious", "critical")
WORK = """%%mesh
def work(rank):
    x = rank + 1
    return 1 / (x - 2)
work(rank)"""

#: The ranks wait at different lines.
WAIT = """%%mesh -a -o job
import os, time
if rank == 1:
    while not os.path.exists("go"):
        time.sleep(0.05)
while not os.path.exists("go"):
    time.sleep(0.05)"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: npm --prefix labextension ci"),
]


def findings(page: Any, *within: str) -> list[str]:
    """Return the serious findings in the elements that selectors name, each with its first elements.

    Only violations list all of their elements: axe takes as long to describe those that pass as to check them.
    """
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE.read_text())
    found = page.evaluate(
        """([within, rules]) => axe.run(
            {include: within.map(each => [each])},
            {runOnly: {type: 'tag', values: rules}, resultTypes: ['violations']}
        )""",
        [list(within), RULES],
    )
    assert found["passes"], "axe has seen nothing there"
    return [
        f"{each['id']} ({each['impact']}): {each['help']}: "
        + "; ".join(f"{node['html'][:160]} {node['failureSummary']}" for node in each["nodes"][:3])
        for each in found["violations"]
        if each["impact"] in SERIOUS
    ]


@pytest.fixture
def open_panel(lab: Lab) -> Panel:
    """The panel with everything open: a dead rank, a failed cell, the details of a rank, all sections."""
    lab.open("%mesh up --procs 4", WORK, "%mesh kill -r 3", "%mesh stacks", "%mesh diff rank", "%mesh hang")
    panel = Panel(lab)
    panel.open()
    lab.run(0)
    panel.has_states(idle=4)
    lab.run(1)
    lab.run(2)
    panel.has_states(dead=1, idle=3)
    panel.rank(1).click()
    panel.details().wait_for()
    for name in ("debug", "log", "stacks", "hang", "actors", "hosts", "jobs"):
        panel.section(name)
    panel.node.get_by_role("button", name="Bring up a mesh …").click()
    return panel


def test_nothing_serious_is_found_in_the_panel(lab: Lab, open_panel: Panel) -> None:
    found: dict[str, list[str]] = {}
    for theme in ("Light", "Dark", "Dark High Contrast"):
        open_panel.theme(theme)
        found[theme] = findings(lab.page, "#monarch-kernel-meshes", ".mk-Status")
    open_panel.theme("Light")
    assert not any(found.values()), found


def test_nothing_serious_is_found_in_views_and_tables_of_cells(lab: Lab) -> None:
    cells = ("%mesh diff rank", WAIT, "%mesh stacks", "%mesh hang", "%mesh status", "%mesh plot rank")
    lab.open(
        "%mesh up --procs 4\nfrom monarch_kernel import get_mesh\nget_mesh('m')",
        "%%mesh\nprint(rank)",
        *cells,
        "job.result()",
    )
    panel = Panel(lab)
    ended = 2 + len(cells)
    lab.run(0)
    lab.cell(0).locator(".mk-View").wait_for()
    lab.run(1)
    for at in range(2, ended):
        lab.run(at)
    lab.prints(4, "1 of 4|2 different|ranks diverge")
    found: dict[str, list[str]] = {}
    for theme in ("Light", "Dark"):
        panel.theme(theme)
        outputs = [
            f".jp-Notebook .jp-Cell:nth-child({at + 1}) .jp-OutputArea-output" for at in (0, 2, *range(4, ended))
        ]
        assert [each for each in outputs if not lab.page.locator(each).count()] == []
        found[theme] = findings(lab.page, *outputs)
    panel.theme("Light")
    (lab.folder / "work" / "go").touch()
    lab.run(ended)
    assert not any(found.values()), found


def test_nothing_serious_is_found_in_a_report(
    start_torchrun: Callable[..., Job],  # noqa: F811
    browser: Any,
    tmp_path: Path,
) -> None:
    job = start_torchrun("hung", script=SCRIPT)
    wait_until(lambda: sleeping(job), "rank 0 waits", 60)
    done = run_report(job.gate.parent, "hung", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert job.end().count("ends") == 2
    (report,) = tmp_path.glob("*.html")
    found: dict[str, list[str]] = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(report.as_uri())
        page.evaluate("() => document.querySelectorAll('details').forEach(each => { each.open = true })")
        found[scheme] = findings(page, "body")
        page.close()
    assert not any(found.values()), found
