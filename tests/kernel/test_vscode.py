"""The kernel under VS Code: start, code that the extension runs for itself, variables, widgets, output, interrupts."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_kernel.kernel.install import kernel_spec
from monarch_kernel.widgets.open_views import VIEW_MIME
from tests.kernel import harness
from tests.kernel.harness import Bell, Kernel, stop_kernel, wait_gone
from tests.kernel.screen import text
from tests.kernel.views.page import Page
from tests.kernel.vscode import ENVIRONMENT, NOTEBOOK, Window

#: How VS Code finds cells, files and lines in a traceback, to make them links.
_CELL = re.compile(r"(?:\x1b\[.+?m)*Cell(?:\x1b\[.+?m|\s)*In(?:\x1b\[.+?m|\s)*\[(\d+)\](?:\x1b\[.+?m|\s|,)+line (\d+)")
_LINE = re.compile(r"^(?:\x1b\[.+?m|\s|-|>)*(\d+)(?:\x1b\[.+?m)* .*")

#: What the list of variables does with the objects of a notebook.
_VARIABLES = """
import json

def full(kind):
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

def described(value):
    found = {"type": full(type(value)), "interfaces": [full(each) for each in type(value).__mro__]}
    found["named"] = hasattr(value, "__dict__") or isinstance(value, dict)
    if hasattr(value, "shape") and isinstance(value.shape, tuple):
        found["shape"] = str(value.shape)
    if hasattr(value, "__len__"):
        found["count"] = len(value)
    for name in ("toPandas", "to_pandas", "is_sparse"):
        hasattr(value, name)
    return {**found, "value": repr(value)[:1000], "summary": str(value)[:50]}

def children(value):
    found = {}
    for name in dir(value):
        if not name.startswith("__"):
            try:
                child = getattr(value, name)
            except Exception:
                continue
            if child is not None and type(child).__name__ not in ("module", "function", "method", "class", "type"):
                found[name] = described(child)
    return found
"""


@pytest.fixture(scope="module")
def window() -> Iterator[Window]:
    """VS Code with a kernel that it has started, and a mesh of two ranks."""
    kernel = harness.start_kernel(env={**os.environ, **ENVIRONMENT})
    try:
        window = Window(kernel)
        info = window.open()
        assert info["language_info"]["name"] == "python", info
        window.ok("%mesh up --procs 2")
        yield window
    finally:
        stop_kernel(kernel)


def test_its_own_code_leaves_no_trace_in_the_notebook(window: Window) -> None:
    first = window.ok("In[-1], _ih[-1]")
    number = first.result
    assert number is not None
    assert window.hidden("1 + 1").text == "2"
    assert window.hidden("1 / 0").ename == "ZeroDivisionError"
    assert window.ok("_i").text == repr("In[-1], _ih[-1]"), "hidden code is in no history"
    quiet = {"code": "", "silent": True, "store_history": False, "user_expressions": {"two": "1 + 1", "bad": "1 / 0"}}
    answers = window.ask("execute_request", quiet)["user_expressions"]
    assert answers["two"]["data"]["text/plain"] == "2"
    assert answers["bad"]["ename"] == "ZeroDivisionError"


def test_a_fault_waits_for_a_cell_that_the_user_sees(window: Window) -> None:
    pid = window.ok(
        "from monarch_kernel.actor import Actor, endpoint, this_host\n"
        "import os\n"
        "class Worker(Actor):\n"
        "    @endpoint\n"
        "    def pid(self): return os.getpid()\n"
        "procs = this_host().spawn_procs({'gpus': 1})\n"
        "workers = procs.spawn('workers', Worker)\n"
        "workers.pid.call_one().get()"
    ).text
    os.kill(int(pid), signal.SIGKILL)
    heard = window.hidden("import time\nwhile not get_ipython().kernel.faults._waiting: time.sleep(0.01)")
    assert (heard.status, heard.displays, heard.stdout, heard.stderr) == ("ok", [], "", "")
    assert window.hidden("1").displays == []
    (notice,) = window.ok("2").displays
    assert "workers" in notice["text/plain"] and "SIGKILL" in notice["text/plain"]


def test_a_warning_waits_for_a_cell_that_the_user_sees(window: Window) -> None:
    counter = "class Stale(Actor):\n    @endpoint\n    def count(self):\n        return {}\n"
    window.ok(counter.format(1) + "from monarch_kernel import get_mesh\nstale = get_mesh('m').spawn('stale', Stale)")
    window.ok(counter.format(2))
    asked = window.hidden("import json\nprint(json.dumps(type(stale).__name__))")
    assert asked.stdout == '"ActorMesh"\n', "the extension parses this"
    assert "stale: these actors run the class Stale as it was" in window.ok("stale.count.call().get()").stdout


def test_late_output_is_shown_in_the_last_cell_that_the_user_sees(window: Window, tmp_path: Path) -> None:
    go = tmp_path / "go"
    window.cells.append(
        "%%mesh -r 1\nimport subprocess\n"
        f"late = subprocess.Popen('while [ ! -e {go} ]; do sleep 0.02; done; echo late', shell=True)"
    )
    cell = window.start(len(window.cells) - 1)
    cell.ok()
    hidden = window.send_hidden("1")
    hidden.ok()
    go.touch()
    while "late" not in text(cell.outcome):
        message = window.kernel.client.get_iopub_msg(timeout=harness.PATIENCE)
        assert message["parent_header"].get("msg_id") != hidden.msg_id or message["msg_type"] == "status", message
        if message["parent_header"].get("msg_id") == cell.msg_id:
            cell.take(message)
    window.ok("%%mesh -r 1\nlate.wait()")


def test_hidden_code_can_run_cells_and_commands(window: Window) -> None:
    window.ok("%%mesh\nnow = 'seen'")
    assert "[0-1] 'seen'" in text(window.hidden("%%mesh\nnow"))
    assert "m " in window.hidden("%mesh ls").text
    failed = window.hidden("%%mesh\n1 / 0")
    assert failed.ename == "MeshCellError"


def test_the_audit_log_names_the_notebook(start_kernel: Callable[..., Kernel], tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    environment = {key: value for key, value in os.environ.items() if key != "JPY_SESSION_NAME"}
    kernel = start_kernel(env={**environment, **ENVIRONMENT, "MONARCH_KERNEL_AUDIT_LOG": str(log)})
    window = Window(kernel)
    window.open()
    window.ok("x = 1")
    window.hidden("x")
    lines = log.read_text().splitlines()
    did = [re.search('"did": "([^"]*)"', line) for line in lines]
    assert [each[1] for each in did if each] == ["hidden code", "hidden code", "cell", "hidden code"]
    assert f'"notebook": "{NOTEBOOK}"' in lines[4] and '"did": "cell"' in lines[4]


def test_completions_and_help(window: Window) -> None:
    asked = window.ask("complete_request", {"code": "%mesh sta", "cursor_pos": 9})
    assert asked["status"] == "ok" and "status" in asked["matches"]
    found = window.background("return get_ipython().kernel.do_complete('%mesh sta', 9)")
    assert found["matches"] == asked["matches"]
    assert found["metadata"]["_jupyter_types_experimental"]
    # Ranks of a busy machine take longer to answer than a person who types should wait.
    window.hidden(
        f"from monarch_kernel.kernel.magics import ipython_hooks as r\nr.FIRST = r.LATER = {harness.PATIENCE}"
    )
    window.ok("%%mesh\nlearning_rate = 0.1")
    code = "%%mesh\nlearning_r"
    assert (
        "learning_rate"
        in window.background(f"return get_ipython().kernel.do_complete({code!r}, {len(code)})")["matches"]
    )
    help_text = window.background("return get_ipython().kernel.do_inspect('%mesh', 5, 0)")
    assert help_text["found"] and "%mesh" in help_text["data"]["text/plain"]
    code = "%%mesh\nlearning_rate"
    told = window.background(f"return get_ipython().kernel.do_inspect({code!r}, {len(code)}, 0)")
    assert "0.1" in told["data"]["text/plain"]


def test_a_request_during_a_cell_is_answered_after_it(window: Window, bell: Bell, tmp_path: Path) -> None:
    go = tmp_path / "go"
    window.cells.append(
        f"%%mesh\nimport os, time\n{bell.code()}ring()\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n'over'"
    )
    cell = window.start(len(window.cells) - 1)
    bell.wait(2)
    client = window.kernel.client
    sent = [client.complete("%mesh sta", 9), client.inspect("%mesh", 5)]
    hidden = window.send_hidden("print('hidden')")
    go.touch()
    replies: dict[str, Any] = {}
    while len(replies) < 4:
        reply = client.get_shell_msg(timeout=harness.PATIENCE)
        replies[reply["parent_header"]["msg_id"]] = reply["content"]
    assert list(replies) == [cell.msg_id, *sent, hidden.msg_id]
    assert "status" in replies[sent[0]]["matches"] and replies[sent[1]]["found"]
    cell.until(lambda out: "[0-1] 'over'" in text(out))
    assert cell.outcome.stdout == "", "the extension's own output is not in the cell"


def test_the_list_of_variables_shows_meshes_and_touches_no_rank(window: Window, tmp_path: Path) -> None:
    end = tmp_path / "end"
    window.ok(
        "from monarch_kernel.actor import Actor, endpoint, this_host\nfrom monarch_kernel import get_mesh\n"
        "import os, threading, time\n"
        "class Counter(Actor):\n"
        "    def __init__(self): self.calls = 0\n"
        "    @endpoint\n"
        "    def count(self):\n        self.calls += 1\n        return self.calls\n"
        "    @endpoint\n"
        "    def shape(self):\n        self.calls += 100\n"
        "    @endpoint\n"
        f"    def wait(self):\n        while not os.path.exists({str(end)!r}): time.sleep(0.01)\n        return 'end'\n"
        "host, m = this_host(), get_mesh('m')\n"
        "counters = m.spawn('counters', Counter)\n"
        "waiting = m.spawn('waiting', Counter)\n"
        "values = counters.count.call().get()\n"
        "pending = waiting.wait.call()\n"
        "threads = {each.name for each in threading.enumerate()}"
    )
    listed = window.background(
        f"{_VARIABLES}\nvariables = %who_ls\n"
        "return json.dumps({name: described(globals()[name]) for name in variables})"
    )
    found: dict[str, Any] = json.loads(listed)
    wanted = {"host": "HostMesh", "m": "ProcMesh", "counters": "ActorMesh", "values": "ValueMesh", "pending": "Future"}
    for name, kind in wanted.items():
        assert kind in [each.rpartition(".")[2] for each in found[name]["interfaces"]]
        assert not found[name]["value"].startswith("<monarch_kernel"), f"{name} says nothing of itself"
    opened = window.background(
        f"{_VARIABLES}\nreturn json.dumps({{name: children(globals()[name]) for name in {list(wanted)}}})"
    )
    inside: dict[str, Any] = json.loads(opened)
    assert inside["counters"]["count"]["type"].endswith("Endpoint"), inside["counters"]
    assert inside["m"]["name"]["value"] == "'m'"
    end.touch()
    assert "'end'" in window.ok("str(pending.get())").text
    assert "2" in window.ok("str(counters.count.call().get())").text, "no endpoint was called"
    begun = window.ok("sorted({each.name for each in threading.enumerate()} - threads)").text
    assert "monarch-tensor" not in begun, "ranks have loaded no torch"


def test_widgets(window: Window) -> None:
    out = window.ok("%mesh status")
    assert out.stdout == "", "nothing is missing here, and there is no Jupyter server to look after"
    result = out.result
    assert result is not None and "mesh m" in result["text/html"]
    model = result[VIEW_MIME]["model_id"]
    assert model in window.ask("comm_info_request", {"target_name": "jupyter.widget"})["comms"]
    client = window.kernel.client
    opened = client.session.msg(
        "comm_open",
        {"comm_id": "control", "target_name": "jupyter.widget.control", "data": {}},
        metadata={"version": "1.0.0"},
    )
    client.shell_channel.send(opened)
    client.shell_channel.send(
        client.session.msg("comm_msg", {"comm_id": "control", "data": {"method": "request_states"}})
    )
    while True:
        message = client.get_iopub_msg(timeout=harness.PATIENCE)
        if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == "control":
            break
    answer = message["content"]["data"]
    assert answer["method"] == "update_states"
    state = answer["states"][model]
    assert (state["model_module"], state["state"]["mesh"]) == ("anywidget", result_key(window))
    page = Page(window.kernel, subshell=False)
    page.use_widget(model)
    page.lease()
    page.rank("m", 1, state="idle")
    page.close()
    window.cells.append("%mesh status")
    cells = len(window.cells) - 1
    older = window.start(cells).ok().result
    newer = window.start(cells).ok().result
    assert older is not None and newer is not None
    comms = window.ask("comm_info_request", {"target_name": "jupyter.widget"})["comms"]
    assert newer[VIEW_MIME]["model_id"] in comms
    assert older[VIEW_MIME]["model_id"] not in comms, "a cell that is run again replaces its view"


def result_key(window: Window) -> str:
    """The key of mesh `m` in views."""
    return str(window.ok("from monarch_kernel.widgets.plotting import key_of\nkey_of(get_mesh('m'))").text).strip("'")


def test_links_in_the_traceback_of_a_rank(window: Window) -> None:
    cell = "%%mesh\ndef halve(x):\n    return x / 0\n\n\nhalve(rank)"
    failed = window.run(cell)
    number = int(window.ok("len(In) - 2").text)
    places = _CELL.findall(failed.traceback)
    assert (str(number), "3") in places and (str(number), "6") in places, failed.traceback
    lines = failed.traceback.split("\n")
    at = next(index for index, line in enumerate(lines) if (found := _CELL.search(line)) and found[2] == "3")
    numbered = [found[1] for line in lines[at + 1 :] if (found := _LINE.match(line))]
    assert "3" in numbered, "VS Code makes the number of the line a link"


def test_much_output(window: Window) -> None:
    count = 800_000
    out = window.ok(f"print('\\n'.join(map(str, range({count}))))")
    assert out.stdout.count("\n") == count and out.stdout.endswith(f"\n{count - 1}\n")
    ranks = window.ok(f"%%mesh\nprint('\\n'.join(map(str, range({count}))))")
    sizes = [len(str(message["content"])) for message in ranks.messages]
    assert max(sizes) < 2_000_000 and sum(sizes) < 20_000_000, "VS Code keeps the output of a cell in the notebook"
    assert f"{count - 1}" in text(ranks), "the last lines are shown"
    many = window.ok("%%mesh\nfor n in range(5000): print(n, flush=True)")
    shown = [message for message in many.messages if message["msg_type"].endswith("display_data")]
    assert len(shown) < 500, "ranks' lines arrive together"


def test_output_that_is_replaced(window: Window) -> None:
    out = window.ok(
        "from IPython.display import clear_output, display\n"
        "shown = display('first', display_id=True)\nshown.update('second')\nclear_output(wait=True)\nprint('left')"
    )
    kinds = [message["msg_type"] for message in out.messages]
    assert [kind for kind in kinds if kind not in ("status", "execute_input")] == [
        "display_data",
        "update_display_data",
        "clear_output",
        "stream",
    ]
    ids = {
        message["content"]["transient"]["display_id"] for message in out.messages if "transient" in message["content"]
    }
    assert len(ids) == 1
    ranks = window.ok(
        "%%mesh\nfrom IPython.display import clear_output, display\n"
        "shown = display('first', display_id=True)\nshown.update('second')"
    )
    assert "second" in text(ranks) and "first" not in text(ranks)
    cleared = window.ok("%%mesh\nprint('before')\nclear_output(wait=True)\nprint('after')")
    assert text(cleared) == "[0-1] after"


@pytest.mark.parametrize("how", ["signal", "message"])
def test_interrupts(window: Window, bell: Bell, how: str) -> None:
    assert "interrupt_mode" not in kernel_spec(), "VS Code signals the kernel's process, but not its group"
    window.cells.append(f"%%mesh\nimport time\n{bell.code()}ring()\ntime.sleep(300)")
    cell = window.start(len(window.cells) - 1)
    bell.wait(2)
    if how == "signal":
        os.kill(window.kernel.pid, signal.SIGINT)
    else:
        window.kernel.control("interrupt_request")
    assert cell.wait().ename == "MeshCellInterrupt"
    assert text(window.ok("%%mesh\n'alive'")) == "[0-1] 'alive'"


def test_restarts(start_kernel: Callable[..., Kernel]) -> None:
    window = Window(start_kernel(env={**os.environ, **ENVIRONMENT}))
    window.open()
    window.ok("%mesh up --procs 2")
    kernel = window.kernel
    old = [process.pid for process in psutil.Process(kernel.pid).children(recursive=True)]
    assert len(old) >= 3
    kernel.manager.restart_kernel()  # as a Jupyter server does, over the same connection
    kernel.client.wait_for_ready(timeout=harness.PATIENCE)
    wait_gone(old)
    window.open()
    assert "m" not in window.hidden("%mesh ls").text.split()
    window.ok("%mesh up --procs 2")
    assert text(window.ok("%%mesh\nrank")) == "[0] 0\n[1] 1"
    # VS Code itself ends a kernel by a signal to each of its processes.
    tree = [*psutil.Process(kernel.pid).children(recursive=True), psutil.Process(kernel.pid)]
    for process in tree:
        if process.is_running():
            process.terminate()
    wait_gone([process.pid for process in tree])
