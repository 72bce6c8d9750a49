"""A front end's debugger over a real kernel and real ranks, as JupyterLab and VS Code speak to it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from monarch_kernel.debugger.dap.stop_table import BASE
from tests.debugger.dap.client import Ide
from tests.kernel import harness
from tests.kernel.harness import Bell, Cell, Kernel, stop_kernel

RANKS = 3
WORK = """%%mesh
def work(rank):
    x = rank + 1
    y = x * 10
    return y
work(rank)"""


class FrontEnd:
    """What a front end does."""

    def __init__(self, kernel: Kernel, client: str = "jupyterlab") -> None:
        self.kernel = kernel
        reply = kernel.debug("initialize", {"clientID": client, "clientName": client})
        assert reply["success"], reply
        self.filters = [each["filter"] for each in reply["body"]["exceptionBreakpointFilters"]]
        self.ask("attach")

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        reply = self.kernel.debug(command, arguments)
        assert reply["success"], reply
        return dict(reply.get("body") or {})

    def break_at(self, code: str, *lines: int, **more: Any) -> list[dict[str, Any]]:
        """Set the breakpoints of a cell."""
        path = self.ask("dumpCell", code=code)["sourcePath"]
        wanted = [{"line": line, **more} for line in lines]
        made = self.ask("setBreakpoints", source={"path": path}, breakpoints=wanted)["breakpoints"]
        self.ask("configurationDone")
        return list(made)

    def clear(self) -> None:
        """Take all breakpoints of the kernel away."""
        for each in self.ask("debugInfo")["breakpoints"]:
            self.ask("setBreakpoints", source={"path": each["source"]}, breakpoints=[])

    def off(self) -> None:
        """Turn the debugger off."""
        self.kernel.debug("disconnect", {"restart": False, "terminateDebuggee": False})

    def top(self, thread: int) -> dict[str, Any]:
        """The innermost frame."""
        return dict(self.ask("stackTrace", threadId=thread)["stackFrames"][0])

    def locals(self, frame: int) -> dict[str, str]:
        scope = self.ask("scopes", frameId=frame)["scopes"][0]
        variables = self.ask("variables", variablesReference=scope["variablesReference"])["variables"]
        return {each["name"]: each["value"] for each in variables}


def stopped(cell: Cell, count: int) -> list[int]:
    """The threads of the first `count` stops that were told, in order."""
    cell.until(lambda _: len(threads_of(cell)) >= count)
    return threads_of(cell)[:count]


def threads_of(cell: Cell) -> list[int]:
    return [each["body"]["threadId"] for each in cell.events if each["event"] == "stopped"]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel with a mesh."""
    kernel = harness.start_kernel()
    kernel.ok(f"%mesh up --procs {RANKS}")
    yield kernel
    stop_kernel(kernel)


@pytest.fixture
def lab(kernel: Kernel) -> Iterator[FrontEnd]:
    """JupyterLab with its debugger on."""
    front = FrontEnd(kernel)
    yield front
    front.clear()
    front.off()


@pytest.fixture
def code(kernel: Kernel) -> Iterator[FrontEnd]:
    """VS Code debugging a cell."""
    front = FrontEnd(kernel, "vscode")
    yield front
    front.off()


def test_a_breakpoint_in_a_cell_stops_every_rank_one_is_shown_and_the_others_follow(lab: FrontEnd) -> None:
    made = lab.break_at(WORK, 4)
    assert [(each["verified"], each["line"]) for each in made] == [(True, 4)]
    cell = lab.kernel.send(WORK)
    seen: list[str] = []
    for number in range(1, RANKS + 1):
        thread = stopped(cell, number)[-1]
        assert thread >= BASE
        frames = lab.ask("stackTrace", threadId=thread)["stackFrames"]
        assert [frame["line"] for frame in frames] == [4, 6]
        assert frames[0]["source"]["path"] == lab.ask("dumpCell", code=WORK)["sourcePath"]
        rank = int(frames[0]["name"].removeprefix("[rank ").partition("]")[0])
        assert frames[0]["name"] == f"[rank {rank}] work"
        assert lab.locals(frames[0]["id"]) == {"rank": str(rank), "x": str(rank + 1)}
        assert lab.ask("evaluate", expression="x * 100", frameId=frames[0]["id"])["result"] == str((rank + 1) * 100)
        seen.append(frames[0]["name"])
        everybody_stops(lab)
        left = sorted(set(range(RANKS)) - {int(name.partition("]")[0].removeprefix("[rank ")) for name in seen})
        if left:
            lab.ask("mesh/focus", rank=left[0])
    lab.ask("continue", threadId=1)  # what JupyterLab 4.6 says; all go on
    assert len(set(seen)) == RANKS
    cell.ok()
    assert lab.ask("debugInfo")["stoppedThreads"] == []


def test_ranks_are_switched_stepped_and_changed(lab: FrontEnd) -> None:
    lab.break_at(WORK, 3)
    cell = lab.kernel.send(WORK)
    stopped(cell, 1)
    state = everybody_stops(lab)
    assert [rank["stops"][0]["line"] for rank in state["meshes"][0]["ranks"]] == [3] * RANKS
    assert lab.ask("mesh/focus", rank=2)["shown"] == "rank 2"
    thread = stopped(cell, 2)[-1]
    frame = lab.top(thread)
    assert (frame["name"], frame["line"]) == ("[rank 2] work", 3)
    lab.ask("next", threadId=thread)
    assert stopped(cell, 3)[-1] == thread
    frame = lab.top(thread)
    assert (frame["line"], lab.locals(frame["id"])) == (4, {"rank": "2", "x": "3"})
    scope = lab.ask("scopes", frameId=frame["id"])["scopes"][0]["variablesReference"]
    lab.ask("setVariable", variablesReference=scope, name="x", value="50")
    lab.ask("evaluate", expression="%mesh focus 0", frameId=frame["id"], context="repl")  # as a person can type it
    first = stopped(cell, 4)[-1]
    assert lab.top(first)["name"] == "[rank 0] work"
    reply = lab.kernel.debug("evaluate", {"expression": "%mesh focus 7"})
    assert "rank 7 is not stopped" in reply["message"]
    lab.ask("mesh/resume", how="continue")
    cell.ok()
    assert lab.kernel.ok("list(_.values())").text == "[10, 20, 500]"


def everybody_stops(front: FrontEnd, ranks: int = RANKS) -> dict[str, Any]:
    """Wait until so many ranks are stopped; the state of all."""
    end = time.monotonic() + harness.PATIENCE
    while True:
        state = front.ask("mesh/state")
        if sum(rank["state"] == "stopped" for mesh in state["meshes"] for rank in mesh["ranks"]) == ranks:
            return state
        assert time.monotonic() < end, state


def test_the_kernels_own_breakpoints_work_as_ever(lab: FrontEnd) -> None:
    code = "def here(x):\n    y = x + 1\n    return y\nhere(1)"
    lab.break_at(code, 3)
    cell = lab.kernel.send(code)
    thread = stopped(cell, 1)[0]
    assert thread < BASE
    assert lab.top(thread)["name"] == "here"
    assert lab.ask("evaluate", expression="y", frameId=lab.top(thread)["id"])["result"] == "2"
    lab.ask("next", threadId=thread)
    assert stopped(cell, 2)[1] == thread
    lab.ask("continue", threadId=thread)
    assert cell.wait().text == "2"


def test_ranks_answer_while_the_kernel_is_stopped(lab: FrontEnd) -> None:
    code = "def here(x):\n    y = x + 1\n    return y\nhere(1)"
    background = WORK.replace("%%mesh", "%%mesh --no-wait")
    lab.break_at(code, 3)
    lab.break_at(background, 4)
    assert lab.kernel.send(background).wait().status == "ok"
    everybody_stops(lab)
    cell = lab.kernel.send(code)
    for rank in range(RANKS):
        lab.ask("mesh/focus", rank=rank)
        assert lab.top(lab.ask("debugInfo")["stoppedThreads"][0])["name"] == f"[rank {rank}] work"
    lab.ask("mesh/resume")
    cell.until(lambda _: threads_of(cell)[-1:] < [BASE] and bool(threads_of(cell)))
    thread = threads_of(cell)[-1]
    assert lab.top(thread)["name"] == "here"
    lab.ask("continue", threadId=thread)
    assert cell.wait().text == "2"


def test_pause_stops_the_ranks_that_a_cell_waits_for(lab: FrontEnd) -> None:
    cell = lab.kernel.send("%%mesh\nimport time\ngo = True\nprint('going')\nwhile go:\n    time.sleep(0.01)")
    cell.until(lambda out: "going" in str(out.displays) + str(out.updates) + out.stdout)
    lab.ask("pause", threadId=1)
    stopped(cell, 1)
    everybody_stops(lab)
    for rank in range(RANKS):
        lab.ask("mesh/focus", rank=rank)
        frame = lab.top(lab.ask("debugInfo")["stoppedThreads"][0])
        lab.ask("evaluate", expression="go = False", frameId=frame["id"])
    lab.ask("mesh/resume")
    cell.ok()


def test_code_of_an_ordinary_cell_stops_on_the_ranks_that_run_it(lab: FrontEnd) -> None:
    code = """
from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.meshes import get_mesh
class Model(Actor):
    @endpoint
    def forward(self, x):
        y = x * 2
        return y
models = get_mesh('m').spawn('models', Model)
models.forward.call(21).get()"""
    (made,) = lab.break_at(code, 8)
    assert made["verified"]
    cell = lab.kernel.send(code)
    thread = stopped(cell, 1)[0]
    assert (lab.top(thread)["name"].partition("] ")[2], lab.top(thread)["line"]) == ("Model.forward", 8)
    everybody_stops(lab)
    lab.ask("mesh/resume")
    cell.ok()


def test_a_condition_stops_one_rank(code: FrontEnd) -> None:
    code.break_at(WORK, 4, condition="rank == 1")
    cell = code.kernel.send(WORK)
    thread = stopped(cell, 1)[0]
    names = {each["id"]: each["name"] for each in code.ask("threads")["threads"]}
    assert names[thread] == "rank 1 (gpus=1): work"
    assert "rank 0 (gpus=0)" in names.values()
    assert any(number < BASE for number in names)  # the kernel's
    code.ask("continue", threadId=thread)
    cell.ok()


def test_vs_code_sees_every_stop_as_a_thread(code: FrontEnd) -> None:
    code.break_at(WORK, 4)
    cell = code.kernel.send(WORK)
    threads = stopped(cell, RANKS)
    assert len(set(threads)) == RANKS
    for thread in reversed(threads):
        assert code.top(thread)["name"] == "work"
        code.ask("stepIn", threadId=thread)
    again = stopped(cell, 2 * RANKS)[RANKS:]
    assert sorted(again) == sorted(threads)
    for thread in threads:
        code.ask("continue", threadId=thread)
    cell.ok()


def test_a_failure_stops_where_it_was_raised(lab: FrontEnd) -> None:
    assert "mesh" in lab.filters
    lab.ask("setExceptionBreakpoints", filters=["mesh"])
    cell = lab.kernel.send("%%mesh -r 1\ndef bad():\n    batch = 3\n    raise ValueError('bad batch')\nbad()")
    thread = stopped(cell, 1)[0]
    event = next(each for each in cell.events if each["event"] == "stopped")
    assert event["body"]["reason"] == "exception"
    assert "bad batch" in event["body"]["text"]
    frame = lab.top(thread)
    assert (frame["line"], lab.locals(frame["id"])) == (4, {"batch": "3"})
    assert not lab.kernel.debug("next", {"threadId": thread})["success"]  # its frames have ended
    lab.ask("continue", threadId=thread)
    assert cell.wait().ename == "MeshCellError"
    lab.ask("setExceptionBreakpoints", filters=[])


def test_turning_the_debugger_off_lets_the_cell_end_and_on_again_works(kernel: Kernel) -> None:
    lab = FrontEnd(kernel)
    lab.break_at(WORK, 4)
    cell = kernel.send(WORK)
    stopped(cell, 1)
    everybody_stops(lab)
    assert kernel.debug("disconnect", {"restart": False, "terminateDebuggee": False})["success"]
    cell.ok()
    assert kernel.ok(WORK).status == "ok"  # nothing is armed any more
    lab = FrontEnd(kernel)
    lab.break_at(WORK, 4)
    cell = kernel.send(WORK)
    assert lab.top(stopped(cell, 1)[0])["line"] == 4
    kernel.debug("disconnect", {"restart": False, "terminateDebuggee": False})
    cell.ok()


def is_adapter(process: psutil.Process, tag: str) -> bool:
    try:
        return "debugpy/adapter" in " ".join(process.cmdline()) and process.environ().get("MK_ADAPTER_OF") == tag
    except psutil.Error:
        return False


def test_the_debugger_is_turned_off_while_debugpy_does_not_answer(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel()
    tag = secrets.token_hex(8)  # debugpy's adapter is no child of the kernel: it is known by what it inherits
    kernel.ok(f"import os; os.environ['MK_ADAPTER_OF'] = {tag!r}")
    lab = FrontEnd(kernel)
    [adapter] = [each for each in psutil.process_iter() if is_adapter(each, tag)]
    adapter.suspend()
    try:
        lab.off()  # is answered
        assert kernel.ok("1 + 1").text == "2"
    finally:
        adapter.resume()


def test_a_page_that_was_reloaded_finds_its_stop(lab: FrontEnd) -> None:
    lab.break_at(WORK, 4)
    cell = lab.kernel.send(WORK)
    thread = stopped(cell, 1)[0]
    info = lab.ask("debugInfo")
    assert (info["isStarted"], info["stoppedThreads"]) == (True, [thread])
    assert [[each["line"] for each in of["breakpoints"]] for of in info["breakpoints"]] == [[4]]
    everybody_stops(lab)
    lab.ask("mesh/resume")
    cell.ok()


def test_a_mesh_that_comes_later_joins(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel()
    lab = FrontEnd(kernel)
    (made,) = lab.break_at(WORK, 4)
    assert made["verified"]  # as far as the kernel's file goes
    kernel.ok("%mesh up late --procs 2")
    cell = kernel.send(WORK)
    thread = stopped(cell, 1)[0]
    assert lab.top(thread)["line"] == 4
    everybody_stops(lab, 2)
    lab.ask("mesh/resume")
    cell.ok()


def test_a_cell_that_is_run_before_its_breakpoint_is_set_on_all_ranks_stops_there(lab: FrontEnd) -> None:
    cells = [f"%%mesh\nlen('cell {number}')" for number in range(20)]
    for code, line in [*((code, 2) for code in cells), (WORK, 4)]:  # set one after the other, so the last takes a while
        path = lab.ask("dumpCell", code=code)["sourcePath"]
        arguments = {"source": {"path": path}, "breakpoints": [{"line": line}]}
        setting = {"type": "request", "seq": 9, "command": "setBreakpoints", "arguments": arguments}
        send_control(lab.kernel, "debug_request", setting)
    lab.kernel.control("kernel_info_request")  # its answer says that the requests before it have arrived
    cell = lab.kernel.send(WORK)
    stopped(cell, 1)
    everybody_stops(lab)
    lab.ask("mesh/resume")
    cell.ok()


def test_a_frozen_rank_does_not_block_the_others_and_a_dead_one_is_dropped(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel()
    kernel.ok("%mesh up --procs 3")
    kernel.ok("%%mesh\nimport os\nos.getpid()")
    pids = json.loads(kernel.ok("list(_.values())").text)
    lab = FrontEnd(kernel)
    lab.break_at(WORK, 4)
    cell = kernel.send(WORK)
    stopped(cell, 1)
    everybody_stops(lab)
    lab.ask("mesh/focus", rank=1)
    frame = lab.top(stopped(cell, 2)[1])["id"]
    os.kill(pids[1], signal.SIGSTOP)
    try:
        send_control(
            kernel,
            "debug_request",
            {"type": "request", "seq": 9, "command": "evaluate", "arguments": {"expression": "x", "frameId": frame}},
        )
        asked = send_control(kernel, "kernel_info_request", {})
        first = kernel.client.get_control_msg(timeout=harness.PATIENCE)
        assert first["parent_header"]["msg_id"] == asked  # it does not wait for the rank
        second = kernel.client.get_control_msg(timeout=harness.PATIENCE)["content"]
        assert second["success"] is False
        assert "rank 1 of mesh m" in second["message"]
    finally:
        os.kill(pids[1], signal.SIGCONT)
    os.kill(pids[1], signal.SIGKILL)
    thread = stopped(cell, 3)[2]
    assert lab.top(thread)["name"] in ("[rank 0] work", "[rank 2] work")
    lab.ask("mesh/resume")
    assert "killed by SIGKILL" in cell.wait().evalue + cell.outcome.traceback
    states = [rank["state"] for rank in lab.ask("mesh/state")["meshes"][0]["ranks"]]
    assert states == ["running", "dead", "running"]


def send_control(kernel: Kernel, kind: str, content: dict[str, Any]) -> str:
    message = kernel.client.session.msg(kind, content)
    kernel.client.control_channel.send(message)
    return str(message["header"]["msg_id"])


def test_sources_and_rich_values_of_ranks_are_shown(lab: FrontEnd) -> None:
    lab.break_at(WORK, 4)
    cell = lab.kernel.send(WORK)
    thread = stopped(cell, 1)[0]
    frame = lab.top(thread)
    body = lab.ask("richInspectVariables", variableName="x", frameId=frame["id"])
    assert body["data"]["text/plain"] in {"1", "2", "3"}
    assert "y = x * 10" in lab.ask("source", source={"path": frame["source"]["path"]})["content"]
    lab.ask("copyToGlobals", srcVariableName="x", dstVariableName="kept", srcFrameId=frame["id"])
    everybody_stops(lab)
    lab.ask("mesh/resume")
    cell.ok()
    lab.kernel.ok("%%mesh\nglobals().get('kept')")
    rank = int(frame["name"].removeprefix("[rank ").partition("]")[0])
    assert lab.kernel.ok(f"list(_.values())[{rank}]").text == str(rank + 1)


def test_a_breakpoint_call_stops_without_any_breakpoint_set(lab: FrontEnd) -> None:
    code = "%%mesh -r 1\nz = 5\nbreakpoint()\nz += 1"
    cell = lab.kernel.send(code)
    thread = stopped(cell, 1)[0]
    assert lab.top(thread)["line"] in (3, 4)
    lab.ask("continue", threadId=thread)
    cell.ok()


def test_the_focus_is_a_magic_too(lab: FrontEnd) -> None:
    assert "No rank is stopped" in lab.kernel.ok("%mesh focus").stdout
    lab.break_at(WORK, 4)
    cell = lab.kernel.send(WORK)
    stopped(cell, 1)
    everybody_stops(lab)
    subshell = lab.kernel.control("create_subshell_request")["subshell_id"]
    other = lab.kernel.send("%mesh focus 2", subshell=subshell)
    other.prints("rank 2 is shown")
    assert other.wait().status == "ok"
    lab.ask("mesh/resume")
    lab.kernel.control("delete_subshell_request", {"subshell_id": subshell})
    lab.kernel.ok("pass")


def test_a_cell_with_the_focus_magic_does_not_wait_for_the_cell_that_is_stopped(lab: FrontEnd) -> None:
    lab.break_at(WORK, 4)
    cell = lab.kernel.send(WORK)
    stopped(cell, 1)
    everybody_stops(lab)
    for code, said in (("%mesh focus 2", "rank 2 is shown"), ("%mesh focus", "* mesh m rank 2: line 4 in work")):
        other = lab.kernel.send(code)
        other.prints(said)
        assert other.wait().status == "ok"
    wrong = lab.kernel.run("%mesh focus 9")
    assert (wrong.status, wrong.ename) == ("error", "UsageError")
    assert "9" in wrong.evalue
    lab.ask("mesh/resume")
    lab.kernel.ok("pass")


def test_breakpoints_are_there_again_after_off_and_on(lab: FrontEnd) -> None:
    lab.break_at(WORK, 4)
    path = lab.ask("dumpCell", code=WORK)["sourcePath"]
    lab.off()
    info = lab.kernel.debug("debugInfo")["body"]
    assert (info["isStarted"], info["breakpoints"]) == (False, [{"source": path, "breakpoints": [{"line": 4}]}])
    assert lab.kernel.ok(WORK).status == "ok"  # nothing stops while it is off
    again = FrontEnd(lab.kernel)
    cell = lab.kernel.send(WORK)
    assert again.top(stopped(cell, 1)[0])["line"] == 4
    everybody_stops(again)
    again.ask("continue", threadId=1)
    cell.ok()


def test_the_debugger_is_turned_off_and_on_at_once_any_number_of_times(kernel: Kernel) -> None:
    for _ in range(15):  # debugpy's adapter stopped to accept clients after some of these
        FrontEnd(kernel).off()
    front = FrontEnd(kernel)
    assert front.ask("threads")["threads"]
    front.off()


def test_a_step_out_of_the_users_code_ends_quietly(lab: FrontEnd) -> None:
    code = "%%mesh -r 0\ndef leave():\n    return 1\nleave()"
    lab.break_at(code, 3)
    cell = lab.kernel.send(code)
    thread = stopped(cell, 1)[0]
    lab.ask("stepOut", threadId=thread)
    lab.ask("stepOut", threadId=stopped(cell, 2)[1])
    outcome = cell.wait()
    assert (outcome.status, outcome.stderr) == ("ok", ""), outcome


def test_the_focus_needs_the_debugger(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel()
    out = kernel.run("%mesh focus 1")
    assert out.ename == "UsageError"
    assert "debugger is off" in out.stderr + out.evalue


def test_lines_are_right_below_blank_lines(lab: FrontEnd) -> None:
    code = "%%mesh -r 0\n\n\nx = 1\ny = 2\nz = 3"
    lab.break_at(code, 5)
    cell = lab.kernel.send(code)
    frame = lab.top(stopped(cell, 1)[0])
    assert (frame["line"], lab.locals(frame["id"])["x"]) == (5, "1")
    lab.ask("continue", threadId=1)
    cell.ok()


def test_debugpy_is_opened_and_ended_by_a_magic(kernel: Kernel, bell: Bell) -> None:
    out = kernel.ok("%mesh debugpy -r 1").stdout
    text = out[out.index("{") : out.rindex("}") + 1]
    (configuration,) = json.loads(text)["configurations"]
    assert (configuration["type"], configuration["request"]) == ("debugpy", "attach")
    assert configuration["name"].startswith("rank 1 of mesh m on ")
    address = configuration["connect"]["host"], configuration["connect"]["port"]
    assert address[0] == "127.0.0.1"
    assert kernel.ok("%mesh debugpy").stdout.startswith("rank 1 of mesh m (pid ")
    again = kernel.ok("%mesh debugpy -r 1").stdout
    assert f"127.0.0.1:{address[1]}" in again  # one for each rank, however often it is asked for
    ide = Ide(address)
    ide.ask("initialize", clientID="test", adapterID="debugpy", linesStartAt1=True, columnsStartAt1=True)
    attached = ide.send("attach", justMyCode=configuration["justMyCode"], token=configuration["token"])
    ide.event("initialized")
    ide.ask("setExceptionBreakpoints", filters=[])
    ide.ask("configurationDone")
    ide.reply(attached)
    loop = "import time\nleft = 10_000\nring()\nwhile left:\n    left -= 1\n    time.sleep(0.001)"
    cell = kernel.send(f"%%mesh -r 1\n{bell.code()}\n{loop}")
    bell.wait()  # else the pause could come before the cell does
    names = {each["name"] for each in ide.ask("threads")["threads"]}
    assert "MainThread" in names
    thread = next(each["id"] for each in ide.ask("threads")["threads"] if each["name"] == "MainThread")
    ide.ask("pause", threadId=thread)
    ide.event("stopped")
    frame = ide.ask("stackTrace", threadId=thread)["stackFrames"][0]
    assert "ipykernel_" in frame["source"]["path"]
    ide.ask("evaluate", expression="left = 1", frameId=frame["id"], context="repl")
    ide.close()  # lost, not ended: the rank goes on
    cell.ok()
    assert "rank 1 of mesh m: debugpy has ended" in kernel.ok("%mesh debugpy --stop").stdout
    assert kernel.run("%mesh debugpy").ename == "UsageError"
    hook = "%%mesh -r 0,1 -o hooks\nimport sys\nsys.breakpointhook.__module__"
    kernel.ok(hook)
    assert len(set(kernel.ok("list(hooks.values())").text.strip("[]").split(", "))) == 1
    kernel.ok("%mesh debugpy -r 1")  # a second time, and ended again
    kernel.ok(hook)
    assert "pydevd" in kernel.ok("hooks[1]").text
    kernel.ok("%mesh debugpy --stop")
    kernel.ok("%%mesh -r 1 --no-wait -o stopped\nhere = 7\nbreakpoint()")
    kernel.ok(
        "from monarch_kernel import debug\nfrom monarch_kernel.meshes import get_mesh\nimport time\n"
        "while not get_mesh('m').debug: time.sleep(0.01)"
    )
    assert "7" in kernel.ok("str(get_mesh('m').debug.print('here'))").text
    kernel.ok("get_mesh('m').debug.cont()\nstopped.result(30)")


def test_internal_functions_are_left_out_by_few_rules(lab: FrontEnd) -> None:
    lab.kernel.ok(
        "import sys, pydevd\n"
        "rules = pydevd.get_global_debugger()._files_filtering\n"
        "def left_out(name, file=None):\n"
        "    return rules.exclude_by_filter(file or sys.modules[name].__file__, name)"
    )
    internal = ["IPython.core.interactiveshell", "ipykernel.kernelbase", "threading", "monarch_kernel.kernel.kernel"]
    assert lab.kernel.ok(f"[left_out(name) for name in {internal}]").text == str([True] * len(internal))
    # A cell, and what it has imported.
    lab.kernel.ok("import this\nassert left_out('__main__', '/tmp/ipykernel_1/1.py') is left_out('this') is None")
    # Each function is compared with each of them, again and again.
    lab.kernel.ok("assert len(rules._exclude_filters) < len(sys.modules) / 4, len(rules._exclude_filters)")
