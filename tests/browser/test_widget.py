"""The live view of a mesh in a cell of JupyterLab, and a plot while a cell runs."""

from __future__ import annotations

import re

from tests.browser.lab import Lab

CELLS = (
    "%mesh up --procs 4\nfrom monarch_kernel import get_mesh\nm = get_mesh('m')",
    "m.show()",
    "%mesh plot loss",
    "%%mesh\nimport time\nfor step in range(400):\n    loss = step * (50 if rank == 2 else 1)\n    time.sleep(0.01)",
    "m.slice(gpus=3).kill().get()",
)


def test_a_mesh_in_a_cell_lives(lab: Lab) -> None:
    lab.open(*CELLS)
    lab.run(0)
    lab.run(1)
    view = lab.cell(1).locator(".mk-View")
    view.wait_for()
    view.filter(has_text=re.compile(r"4\s*ranks")).wait_for()
    lab.run(2)
    lab.start(3)
    view.filter(has_text=re.compile(r"running\s*4")).wait_for()
    status = lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status")
    assert status == "busy"
    chart = lab.cell(2).locator(".mk-View")
    chart.filter(has_text=re.compile(r"rank\s*2")).wait_for()
    assert "NameError" not in chart.inner_text()  # as long as no rank had a loss
    lab.done()
    chart.filter(has_text=re.compile(r"ended")).wait_for()
    view.filter(has_text=re.compile(r"idle\s*4")).wait_for()
    lab.run(4)
    view.filter(has_text=re.compile(r"dead\s*1")).wait_for()


def test_a_saved_view_is_html_where_its_kernel_has_gone(lab: Lab) -> None:
    kill = "import time\nm.slice(gpus=3).kill().get()\nwhile not m.dead():\n    time.sleep(0.01)\nm.show()"
    lab.open(CELLS[0], kill)
    lab.run(0)
    lab.run(1)
    view = lab.cell(1).locator(".mk-View")
    view.filter(has_text=re.compile(r"dead\s*1")).wait_for()
    lab.save()
    lab.reload()
    view.filter(has_text=re.compile(r"dead\s*1")).wait_for()  # the kernel has it still
    lab.end_kernel()
    tells_its_state(lab)
    lab.reload()
    tells_its_state(lab)
    lab.end_kernel()
    lab.reload_without_kernel()
    tells_its_state(lab)


def tells_its_state(lab: Lab) -> None:
    """The output is the HTML, with a shape for each rank, and nothing else."""
    html = lab.cell(1).locator(".jp-RenderedHTML")
    html.filter(has_text=re.compile(r"mesh m.*1 dead", re.DOTALL)).wait_for()
    assert html.locator("[aria-label^='rank ']").count() == 4
    assert html.locator("[aria-label='rank 3 dead']").count() == 1
    assert lab.cell(1).locator(".mk-View").count() == 0
    assert "rror" not in lab.output(1)
    assert lab.trusts(1)
