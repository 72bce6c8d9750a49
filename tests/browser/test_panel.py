"""The panel of meshes in JupyterLab and Notebook, as a person uses it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from monarch_kernel.meshes import KeptError, end_kept
from tests.browser.lab import Lab
from tests.browser.panel import Panel

TRAIN = """%%mesh
import os, time
step = 0
while not os.path.exists("go"):
    print("step", step, flush=True)
    step += 1
    time.sleep(0.1)
print("the last one", flush=True)"""
WORK = """%%mesh
def work(rank):
    x = rank + 1
    return x * 10
work(rank)"""

pytestmark = pytest.mark.slow


def kernel_status(lab: Lab) -> str:
    return str(lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"))


def source(lab: Lab, at: int) -> str:
    return str(lab.cell(at).locator(".cm-content").inner_text()).strip()


def test_a_session_with_the_panel(lab: Lab, tmp_path: Path) -> None:
    lab.open("1 + 1", TRAIN)
    panel = Panel(lab)
    lab.page.keyboard.press("Control+Alt+m")
    panel.node.wait_for()

    # There is no mesh yet: the form brings one up, and the panel fills.
    panel.says("This kernel has no mesh yet")
    panel.picture("panel_form", tmp_path)
    panel.node.locator(".mk-Up-size").fill("eight")
    panel.node.get_by_role("button", name="Bring up", exact=True).click()
    panel.says("a number such as 4")
    panel.node.locator(".mk-Up-size").fill("4")
    panel.node.get_by_role("button", name="Bring up", exact=True).click()
    panel.has_states(idle=4)
    panel.status("m: 4 ranks · idle")

    # While a cell runs: states, the log as it grows, and the kernel is never said to be idle.
    log = panel.section("log")
    lab.page.evaluate(
        """() => {
            window.statuses = [];
            const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
            kernel.statusChanged.connect((_, status) => window.statuses.push(status));
        }"""
    )
    lab.start(1)
    panel.has_states(running=4)
    panel.status("all running")
    log.get_by_text("step 50", exact=True).first.wait_for()  # after 5 s: the lease was renewed meanwhile
    assert lab.page.evaluate("() => window.statuses") == ["busy"]

    # Search, and by rank.
    log.locator("input[type=search]").fill("step 4")
    log.get_by_text("step 7", exact=True).first.wait_for(state="hidden")
    assert log.locator("mark").first.inner_text() == "step 4"
    log.locator("input[type=search]").fill("")

    # A reload in the middle of the cell finds all again: the mesh, the open section, the log.
    lab.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    lab.page.reload()
    panel.has_states(running=4)
    log = panel.section("log")
    log.get_by_text(re.compile(r"^step \d+$")).first.wait_for()

    # Kill a rank by click, and heal the mesh.
    panel.rank(2).click()
    details = panel.details()
    details.locator("[data-deed=kill]").click()
    details.get_by_role("button", name="Kill", exact=True).last.click()
    panel.has_states(dead=1)
    panel.status(r"m: 4 ranks · 1 dead")
    assert "SIGKILL" in details.locator(".mk-Details-cause").inner_text()
    (lab.folder / "work" / "go").touch()
    log.get_by_text("the last one", exact=True).first.wait_for()
    panel.has_states(dead=1, idle=3)
    details.get_by_role("button", name="Close").click()
    panel.section("log")
    panel.node.locator("[data-section=log]").click()
    panel.picture("panel_light", tmp_path)
    panel.theme("Dark")
    panel.picture("panel_dark", tmp_path)
    panel.theme("Dark High Contrast")
    panel.picture("panel_contrast", tmp_path)
    panel.theme("Light")
    panel.press("heal")
    panel.has_states(idle=4)
    panel.says("rank 2")

    # A button gives its code instead, and does nothing.
    panel.node.get_by_role("button", name="Insert as code").first.click()
    cells = lab.page.locator(".jp-Notebook .jp-CodeCell").count()
    panel.press("down")
    lab.page.locator(f".jp-Notebook .jp-CodeCell >> nth={cells}").wait_for()
    assert any(source(lab, at) == "%mesh down m" for at in range(cells + 1))
    panel.has_states(idle=4)
    panel.node.get_by_role("button", name="Insert as code").first.click()

    # And does it, after a question.
    panel.press("down")
    lab.page.locator(".jp-Dialog").get_by_role("button", name="Stop", exact=True).click()
    panel.says("This kernel has no mesh yet")


def test_notebook_7_loads_the_same_panel(lab: Lab) -> None:
    pytest.importorskip("notebook", reason="Notebook 7 is not installed")
    lab.open("%mesh up --procs 2", in_notebook_7=True)
    panel = Panel(lab)
    panel.open()
    panel.says("This kernel has no mesh yet")
    lab.run(0)
    panel.has_states(idle=2)
    panel.section("hosts").locator("tbody tr").first.wait_for()


def test_a_stopped_rank_is_picked(lab: Lab, tmp_path: Path) -> None:
    lab.open("%mesh up --procs 3", WORK)
    panel = Panel(lab)
    panel.open()
    lab.run(0)
    panel.has_states(idle=3)
    lab.debug()
    lab.break_at(1, 3)
    lab.start(1)
    stops = panel.section("debug")
    panel.has_states(stopped=3)
    shown = int(lab.frames(r"\[rank \d\] work")[0].partition("rank ")[2][0])
    for rank in {0, 1, 2} - {shown}:
        stops.locator(f"[data-rank='{rank}']").click()
        lab.frames(rf"\[rank {rank}\] work")
        stops.locator(f"[data-rank='{rank}'][aria-checked=true]").wait_for()
        assert lab.highlighted(1) == 3
    stops.locator(".mk-Breakpoints-item").filter(has_text="line 3").wait_for()
    panel.picture("panel_stops", tmp_path)
    panel.command("monarch-kernel:next-stop")
    lab.frames(r"\[rank 0\] work" if shown != 2 else r"\[rank \d\] work")
    stops.get_by_role("button", name="Continue all").click()
    lab.done()
    panel.has_states(idle=3)
    stops.get_by_text("No rank is stopped").wait_for()


def test_two_notebooks_two_kernels_and_one_kernel_in_two_tabs(lab: Lab) -> None:
    lab.open("%mesh up --procs 2", "import os, signal", "%mesh kill -r 0")
    panel = Panel(lab)
    panel.open()
    lab.run(0)
    panel.has_states(idle=2)

    # Another notebook with a kernel of its own: without a mesh, and the first one's is not shown.
    other = lab.second_notebook()
    panel.says("This kernel has no mesh yet")
    assert panel.node.locator(".mk-Card").count() == 0 or not panel.node.locator(".mk-Card").first.is_visible()

    # A rank of the first dies while its notebook is not in view: a notice says so, and leads there.
    lab.page.evaluate(
        """() => {
            const widgets = Array.from(window.jupyterapp.shell.widgets('main'));
            const book = widgets.find(each => each.context?.path === 'book.ipynb');
            book.sessionContext.session.kernel.requestExecute({code: '%mesh kill -r 0'});
        }"""
    )
    notice = lab.page.locator(".Toastify__toast").filter(has_text="book.ipynb")
    notice.wait_for()
    notice.get_by_role("button", name="Show").click()
    panel.has_states(dead=1, idle=1)

    # The other notebook gets the first one's kernel: the same mesh in both, also when the first is closed.
    lab.page.evaluate(
        """async path => {
            const widgets = Array.from(window.jupyterapp.shell.widgets('main'));
            const [book, other] = ['book.ipynb', path].map(each => widgets.find(one => one.context?.path === each));
            window.jupyterapp.shell.activateById(other.id);
            await other.sessionContext.changeKernel({id: book.sessionContext.session.kernel.id});
            await book.context.save();
            book.sessionContext.kernelPreference = {...book.sessionContext.kernelPreference, shutdownOnDispose: false};
            book.dispose();
        }""",
        other,
    )
    panel.has_states(dead=1, idle=1)
    panel.press("heal")
    panel.has_states(idle=2)

    # A restart: the old mesh has gone with its kernel, and a new one shows up.
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    panel.says("This kernel has no mesh yet")
    lab.page.evaluate(
        "() => { window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
        ".requestExecute({code: '%mesh up n --procs 3'}) }"
    )
    panel.has_states(idle=3)
    panel.status("n: 3 ranks · idle")


def test_a_kept_mesh_after_a_restart_of_its_kernel(lab: Lab, tmp_path: Path) -> None:
    lab.open("%mesh up browser_kept --procs 2 --keep")
    panel = Panel(lab)
    panel.open()
    lab.run(0)
    panel.has_states(idle=2)
    kept = panel.node.locator(".mk-Kept-item").filter(has_text="browser_kept")
    try:
        kept.filter(has_text="attached").wait_for()
        lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
        panel.says("This kernel has no mesh yet")
        kept.filter(has_text="free").wait_for()
        panel.picture("panel_kept", tmp_path)
        kept.get_by_role("button", name="Attach").click()
        panel.has_states(idle=2)
        kept.filter(has_text="attached").wait_for()
        kept.get_by_role("button", name="Stop").click()
        lab.page.locator(".jp-Dialog").get_by_role("button", name="Stop", exact=True).click()
        kept.wait_for(state="detached")
    finally:
        with contextlib.suppress(KeptError):
            end_kept("browser_kept", force=True)


def test_a_kernel_without_the_extension_says_so_and_loads_it(lab: Lab) -> None:
    lab.open("1 + 1", kernel="python3")
    panel = Panel(lab)
    panel.open()
    panel.says("monarch_kernel is not loaded")
    panel.node.get_by_role("button", name="Load it").click()
    panel.says("This kernel has no mesh yet")
    assert any(source(lab, at) == "%load_ext monarch_kernel" for at in range(2))
