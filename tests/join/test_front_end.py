"""JupyterLab's debugger, and VS Code's, on ranks of a joined job."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

from tests.conftest import wait_until
from tests.engines.test_tools import shown
from tests.join.conftest import TRAIN, Job
from tests.kernel.harness import Kernel

LINE = TRAIN.read_text().split("\n").index("    optimizer.zero_grad()") + 1


def test_jupyterlab_s_debugger_shows_the_stops_of_ranks(
    start_job: Callable[..., Job], start_kernel: Callable[..., Kernel]
) -> None:
    start_job("lab")
    notebook = start_kernel()
    notebook.ok("%mesh join lab")
    wait_until(lambda: notebook.run("%%mesh\nlen(losses)").status == "ok", "it trains", 30)
    assert notebook.debug("initialize", {"clientID": "test", "adapterID": ""})["success"]
    assert notebook.debug("attach")["success"]
    notebook.debug("configurationDone")
    cell = notebook.send(
        f"%mesh break {TRAIN}:{LINE}\nfrom monarch_kernel.debug import get_debugger\n"
        "get_debugger().wait(lambda stops: len(stops) == 2, 30);"
    )
    stopped = cell.event("stopped")
    thread = stopped["body"]["threadId"]
    frames = notebook.debug("stackTrace", {"threadId": thread})["body"]["stackFrames"]
    assert (frames[0]["name"], frames[0]["line"]) == ("step", LINE)
    scopes = notebook.debug("scopes", {"frameId": frames[0]["id"]})["body"]["scopes"]
    reference = scopes[0]["variablesReference"]
    found = notebook.debug("variables", {"variablesReference": reference})["body"]["variables"]
    assert "loss" in {each["name"] for each in found}
    cell.wait()
    notebook.ok("%mesh clear")
    notebook.debug("continue", {"threadId": thread})
    notebook.ok("%mesh debug continue\n%mesh leave")


def test_an_ide_can_attach_to_a_rank(start_job: Callable[..., Job], notebook: Kernel) -> None:
    start_job("ide")
    notebook.ok("%mesh join ide")
    told = shown(notebook.ok("%mesh debugpy -r 1"))
    configuration = json.loads(told[told.index("{") : told.rindex("}") + 1])["configurations"][0]
    place = configuration["connect"]
    with socket.create_connection((place["host"], place["port"]), 10) as connection:
        assert connection.getpeername()[1] == place["port"]
    notebook.ok("%mesh debugpy --stop\n%mesh leave")
