"""Two users of a real JupyterHub: each has a kernel, a panel, kept meshes and metrics, and only their own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.environments import EnvironmentFailed
from tests.browser.lab import Lab
from tests.browser.panel import Panel
from tests.hub.hub import Hub, ask
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hub(hub_python: Path) -> Iterator[Hub]:
    if os.geteuid() != 0:
        pytest.skip("only root can start servers as other users")
    try:
        started = Hub(hub_python, "ann", "ben")
    except EnvironmentFailed as error:
        pytest.skip(str(error))
    with started:
        yield started


def test_each_user_has_a_kernel_a_panel_kept_meshes_and_metrics(hub: Hub, browser: Any) -> None:
    ann, ben = hub.users.values()
    page = browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()
    hub.sign_in(page, ann)
    ann.start()
    ben.start()
    lab = Lab(page, ann)
    lab.open(
        "%mesh up shared --procs 2 --keep",
        "%%mesh\nimport os, time\nstep = 7\nprint('begun')\nwhile not os.path.exists('go'):\n    time.sleep(0.02)",
        "%mesh metrics --serve",
        "from monarch_kernel import get_mesh\nget_mesh('shared').show()",
    )
    panel = Panel(lab)
    panel.open()
    lab.run(0)
    panel.has_states(idle=2)
    kept = panel.node.locator(".mk-Kept-item").filter(has_text="shared")
    kept.filter(has_text="attached").wait_for()
    lab.start(1)
    panel.has_states(running=2)
    panel.section("log").get_by_text("begun", exact=True).first.wait_for()
    ann.write("go", "")
    lab.done()
    panel.has_states(idle=2)
    lab.run(3)
    lab.cell(3).locator(".mk-View").filter(has_text=re.compile(r"2\s*ranks")).wait_for()

    # Metrics: for the user who has the token, on the machine of the server.
    port = re.search(r"127\.0\.0\.1:(\d+)/metrics", lab.run(2))
    assert port is not None
    metrics = f"http://127.0.0.1:{port[1]}/metrics"
    token = ann.folder / ".config" / "monarch_kernel" / "metrics.token"
    status, text = ask(metrics, bearer=token.read_text().strip())
    assert status == 200 and 'mesh="shared"' in text

    # The other user: by the hub and its proxy, by the server, in the kernel, and on the machine.
    for path in ("monarch-kernel/api/kept", "api/kernels", "monarch-kernel/api/kept/shared/logs"):
        assert ask(f"{ann.url}{path}", token=ann.api_token)[0] == 200, path
        assert ask(f"{ann.url}{path}", token=ben.api_token)[0] == 403, path
        assert ask(f"{ann.url}{path}")[0] in (401, 403), path
    assert ask(f"{ann.url}monarch-kernel/api/kept/shared/stop", "POST", ben.api_token, {"force": True})[0] == 403
    assert json.loads(ask(f"{ben.url}monarch-kernel/api/kept", token=ben.api_token)[1]) == {"meshes": []}
    (mesh,) = json.loads(ask(f"{ann.url}monarch-kernel/api/kept", token=ann.api_token)[1])["meshes"]
    assert mesh["name"] == "shared" and mesh["meshes"][0]["alive"] == 2
    listed, attached, read, asked, made = ben.run(
        "%mesh ls",
        "%mesh attach shared",
        f"open({str(token)!r}).read()",
        f"import urllib.request\nurllib.request.urlopen({metrics!r}).read()",
        "%mesh up shared --procs 1 --keep\n%mesh down shared",
    )
    assert "shared" not in listed
    assert "no kept mesh 'shared'" in attached
    assert read.startswith("PermissionError") and asked.startswith("HTTPError: HTTP Error 401")
    assert "Error" not in made  # the name is free for this user
    panel.has_states(idle=2)


def test_a_kept_mesh_outlives_the_server_of_its_user(hub: Hub, browser: Any) -> None:
    ann = hub.users["ann"]
    ranks = json.loads(ask(f"{ann.url}monarch-kernel/api/kept/shared", token=ann.api_token)[1])["ranks"]
    ann.stop()
    page = browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()
    hub.sign_in(page, ann)
    wait_until(ann.is_up, "the server has started again", 90)
    lab = Lab(page, ann)
    lab.open("%%mesh\nprint(step, os.getpid())")
    panel = Panel(lab)
    panel.open()
    kept = panel.node.locator(".mk-Kept-item").filter(has_text="shared")
    kept.filter(has_text="free").wait_for()
    kept.get_by_role("button", name="Attach").click()
    panel.has_states(idle=2)
    lab.run(0)
    for rank in ranks:
        assert f"7 {rank['pid']}" in lab.output(0)
    kept.get_by_role("button", name="Stop").click()
    page.locator(".jp-Dialog").get_by_role("button", name="Stop", exact=True).click()
    kept.wait_for(state="detached")
    wait_until(lambda: not ann.processes() & {rank["pid"] for rank in ranks}, "the ranks have ended")
