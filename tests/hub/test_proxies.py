"""JupyterLab below a base URL, behind a reverse proxy that buffers answers and loses its connections."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, Server
from tests.browser.panel import Panel
from tests.conftest import wait_until
from tests.hub.proxy import BufferingProxy
from tests.kept.conftest import kept_folder, nothing_kept

__all__ = ["kept_folder"]

pytestmark = pytest.mark.slow

CELLS = (
    "%mesh up behind --procs 2 --keep\nfrom monarch_kernel import get_mesh",
    "get_mesh('behind').show()",
    "%%mesh\nimport os, time\nprint('begun')\nwhile not os.path.exists('go'):\n    time.sleep(0.02)\nprint('over')",
)


def test_nothing_waits_for_an_answer_that_does_not_end(browser: Any, tmp_path: Path, kept_folder: str) -> None:
    (tmp_path / "lab").mkdir()
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    with Server(tmp_path / "lab", base_url="/a/b/") as server, BufferingProxy(server.url) as proxy:
        assert proxy.url.endswith("/a/b/")
        lab = Lab(context.new_page(), server, proxy.url)
        lab.open(*CELLS)
        panel = Panel(lab)
        panel.open()
        lab.run(0)
        panel.has_states(idle=2)
        kept = panel.node.locator(".mk-Kept-item").filter(has_text="behind")
        kept.filter(has_text="attached").wait_for()
        lab.run(1)
        view = lab.cell(1).locator(".mk-View")
        view.filter(has_text=re.compile(r"idle\s*2")).wait_for()

        # All is live while a cell runs.
        lab.start(2)
        view.filter(has_text=re.compile(r"running\s*2")).wait_for()
        panel.has_states(running=2)
        panel.section("log").get_by_text("begun", exact=True).first.wait_for()
        lab.prints(2, "begun")

        # It is again when the proxy has lost all connections, without a reload.
        lost = proxy.cut()
        assert lost >= 2  # the kernel's, and that of the kept meshes
        # Jupyter's server loses what comes between the loss and its notice of it.
        wait_until(lambda: proxy.sockets() >= lost, "the page has connected again")
        server.write("go", "")
        lab.prints(2, "over")
        panel.has_states(idle=2)
        view.filter(has_text=re.compile(r"idle\s*2")).wait_for()
        lab.done()

        kept.get_by_role("button", name="Stop").click()
        lab.page.locator(".jp-Dialog").get_by_role("button", name="Stop", exact=True).click()
        kept.wait_for(state="detached")
        panel.says("This kernel has no mesh yet")
        assert not [request for request in proxy.unanswered if "monarch-kernel" in request]
        context.close()
        server.end_kernels()
    assert nothing_kept(kept_folder)
