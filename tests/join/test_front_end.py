"""JupyterLab's debugger, and VS Code's, on ranks of a joined job."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.conftest import wait_until
from tests.debugger.dap.client import Ide
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


def test_an_ide_stops_a_rank_and_steps_until_its_notebook_dies(
    start_job: Callable[..., Job], start_kernel: Callable[..., Kernel]
) -> None:
    job = start_job("ide")
    notebook = start_kernel()
    notebook.ok("%mesh join ide")
    wait_until(lambda: notebook.run("%%mesh\nassert losses").status == "ok", "it trains", 30)
    told = shown(notebook.ok("%mesh debugpy -r 1"))
    configuration = json.loads(told[told.index("{") : told.rindex("}") + 1])["configurations"][0]
    ide = Ide((configuration["connect"]["host"], configuration["connect"]["port"]))
    ide.ask("initialize", clientID="test", adapterID="debugpy", linesStartAt1=True, columnsStartAt1=True)
    attached = ide.send("attach", justMyCode=False, token=configuration["token"])
    ide.event("initialized")
    ide.ask("setBreakpoints", source={"path": str(TRAIN)}, breakpoints=[{"line": LINE}])
    ide.ask("configurationDone")
    ide.reply(attached)
    thread = ide.event("stopped")["threadId"]
    frame = ide.ask("stackTrace", threadId=thread)["stackFrames"][0]
    assert (frame["name"], frame["line"]) == ("step", LINE)
    assert ide.ask("evaluate", expression="float(loss) >= 0", frameId=frame["id"])["result"] == "True"
    ide.ask("next", threadId=thread)
    ide.event("stopped")
    assert ide.ask("stackTrace", threadId=thread)["stackFrames"][0]["line"] == LINE + 1
    notebook.manager.shutdown_kernel(now=True)
    assert job.end().count("ends after") == 2  # what the IDE had stopped goes on
    ide.close()
