"""What the kernel is: its names, its start, its debugger, its end."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from monarch_kernel._version import __version__
from tests.kernel.harness import Kernel, stop_kernel, wait_gone


def test_it_says_what_it_is(kernel: Kernel) -> None:
    kernel.client.kernel_info()
    info = kernel.client.get_shell_msg(timeout=30)["content"]
    assert info["implementation"] == "monarch_kernel"
    assert info["implementation_version"] == __version__
    assert info["language_info"]["name"] == "python"
    assert info["banner"].startswith(f"monarch_kernel {__version__}\n")
    assert {"debugger", "kernel subshells"} <= set(info["supported_features"])


def test_the_start_imports_nothing_heavy(kernel: Kernel) -> None:
    heavy = ("torch", "numpy", "pandas", "matplotlib", "rich", "ipywidgets")
    out = kernel.ok(f"import sys; [name for name in {heavy!r} if name in sys.modules]")
    assert out.text == "[]"


def test_what_the_start_has_loaded_is_never_searched_for_garbage_and_what_cells_make_is(fresh_kernel: Kernel) -> None:
    """A collection of all that was 0.1 s of each start and 0.2 s of each end."""
    assert fresh_kernel.ok("import gc\ngc.get_freeze_count() > len(gc.get_objects())").text == "True"
    cycle = "import weakref\nclass Cycle: pass\nc = Cycle()\nc.own = c\nend = weakref.ref(c)\ndel c"
    fresh_kernel.ok(cycle)
    assert fresh_kernel.ok("made = [[] for _ in range(10**6)]\ngc.isenabled(), end() is None").text == "(True, True)"


def test_a_bare_kernel_has_no_processes(kernel: Kernel) -> None:
    kernel.ok("1")
    assert psutil.Process(kernel.pid).children() == []


def test_the_user_namespace_is_untouched(fresh_kernel: Kernel) -> None:
    out = fresh_kernel.ok("sorted(name for name in globals() if not name.startswith('_'))")
    assert out.text == "['In', 'Out', 'exit', 'get_ipython', 'open', 'quit']"


def test_children_do_not_hang_once_the_debugger_is_on(fresh_kernel: Kernel) -> None:
    assert fresh_kernel.debug("initialize", {"clientID": "test", "adapterID": ""})["success"]
    assert fresh_kernel.debug("attach")["success"]
    assert fresh_kernel.debug("debugInfo")["body"]["isStarted"]
    out = fresh_kernel.ok(
        "import subprocess, sys\nsubprocess.check_output([sys.executable, '-c', 'print(6*7)'], text=True, timeout=60)"
    )
    assert out.text == "'42\\n'"
    out = fresh_kernel.ok(
        "import os\npid = os.fork()\nif pid == 0:\n    os._exit(7)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    )
    assert out.text == "7"


def test_the_debugger_stops_at_a_breakpoint_and_goes_on(fresh_kernel: Kernel) -> None:
    kernel = fresh_kernel
    assert kernel.debug("initialize", {"clientID": "test", "adapterID": ""})["success"]
    assert kernel.debug("attach")["success"]
    code = "def f(x):\n    y = x + 1\n    return y\nf(41)"
    path = kernel.debug("dumpCell", {"code": code})["body"]["sourcePath"]
    reply = kernel.debug("setBreakpoints", {"source": {"path": path}, "breakpoints": [{"line": 3}]})
    assert [point["verified"] for point in reply["body"]["breakpoints"]] == [True]
    kernel.debug("configurationDone")
    cell = kernel.send(code)
    stopped = cell.event("stopped")
    frames = kernel.debug("stackTrace", {"threadId": stopped["body"]["threadId"]})["body"]["stackFrames"]
    assert (frames[0]["name"], frames[0]["line"]) == ("f", 3)
    kernel.debug("continue", {"threadId": stopped["body"]["threadId"]})
    assert cell.wait().text == "42"


def test_a_debug_request_that_fails_is_answered(kernel: Kernel) -> None:
    reply = kernel.debug("richInspectVariables")
    assert reply["success"] is False
    assert reply["message"] == "KeyError: 'variableName'"


def test_shutdown_and_restart_leave_nothing(fresh_kernel: Kernel) -> None:
    before = fresh_kernel.pid
    fresh_kernel.ok("x = 1")
    fresh_kernel.manager.restart_kernel()
    fresh_kernel.client.wait_for_ready(timeout=60)
    wait_gone([before])
    assert fresh_kernel.run("x").ename == "NameError"
    stop_kernel(fresh_kernel)


def test_a_kernel_told_to_quit_by_a_cell_ends(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel()
    pid = kernel.pid
    kernel.run("quit")
    wait_gone([pid])
