"""Ctrl-C on a real kernel: what runs ends, and everything is usable afterwards."""

from __future__ import annotations

import pytest

from tests.kernel.harness import Kernel

#: Ends long after the test has failed; nothing waits for it when all is well.
LONG = 120

TARGET = """
import threading
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay

class Target:
    def __init__(self): self.interrupted = threading.Event(); self.killed = []
    def describe(self): return "mesh 'm'"
    def interrupt(self): self.interrupted.set()
    def unanswered(self): return [1, 2, 3, 6]
    def kill(self, ranks): self.killed.extend(ranks)

target = Target()
get_relay().logic.window = 120  # however slow the machine
"""


def interrupted(kernel: Kernel, code: str) -> None:
    cell = kernel.send(code)
    cell.prints("ready")
    kernel.interrupt()
    out = cell.wait()
    assert (out.status, out.ename) == ("error", "KeyboardInterrupt"), out
    assert "KeyboardInterrupt" in out.traceback
    assert kernel.ok("6*7").text == "42"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(f"import time\nprint('ready', flush=True)\ntime.sleep({LONG})", id="sleep"),
        pytest.param("print('ready', flush=True)\nwhile True: pass", id="loop"),
        pytest.param(f"import asyncio\nprint('ready', flush=True)\nawait asyncio.sleep({LONG})", id="idle await"),
        pytest.param(
            f"import asyncio, time\nawait asyncio.sleep(0)\nprint('ready', flush=True)\ntime.sleep({LONG})",
            id="computing in an async cell",
        ),
        pytest.param(
            "import asyncio, time\n"
            "async def work():\n"
            "    print('ready', flush=True)\n"
            f"    time.sleep({LONG})\n"
            "await asyncio.gather(work())",
            id="computing in a task of an async cell",
        ),
    ],
)
def test_interrupt_ends_the_cell_and_the_kernel_goes_on(kernel: Kernel, code: str) -> None:
    interrupted(kernel, code)


def test_a_shell_command_is_interrupted_as_in_ipython(kernel: Kernel) -> None:
    cell = kernel.send(f"!echo ready; sleep {LONG}")
    cell.prints("ready")
    kernel.interrupt()
    out = cell.wait()
    assert (out.status, "^C" in out.stdout) == ("ok", True)
    assert kernel.ok("_exit_code").text == "-2"


def test_the_interrupt_message_does_the_same(kernel: Kernel) -> None:
    cell = kernel.send(f"import time\nprint('ready', flush=True)\ntime.sleep({LONG})")
    cell.prints("ready")
    assert kernel.control("interrupt_request")["status"] == "ok"
    assert cell.wait().ename == "KeyboardInterrupt"


def test_what_a_subshell_does_meanwhile_changes_nothing(kernel: Kernel) -> None:
    subshell = kernel.control("create_subshell_request")["subshell_id"]
    for wait in (f"import time; print('ready', flush=True); time.sleep({LONG})", "print('ready'); await forever()"):
        kernel.ok(f"import asyncio\nasync def forever(): await asyncio.sleep({LONG})")
        cell = kernel.send(wait)
        cell.prints("ready")
        for code in ("1 + 1", "import asyncio; await asyncio.sleep(0, 2)"):
            assert kernel.send(code, subshell).wait().text == "2"
        kernel.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"
    assert kernel.control("delete_subshell_request", {"subshell_id": subshell})["status"] == "ok"


def test_a_signal_that_another_thread_gets_still_wakes_the_main_thread(kernel: Kernel) -> None:
    out = kernel.run(
        "import signal, threading, time\n"
        "def catch():\n"
        "    time.sleep(0.1)\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
        "threading.Thread(target=catch).start()\n"
        f"time.sleep({LONG})"
    )
    assert out.ename == "KeyboardInterrupt"


def test_an_interrupt_that_falls_into_a_destructor_is_not_lost(kernel: Kernel) -> None:
    cell = kernel.send(
        "import time\n"
        "class Slow:\n"
        "    def __del__(self):\n"
        "        print('ready', flush=True)\n"
        f"        time.sleep({LONG})\n"
        "Slow()\n"
        f"time.sleep({LONG})"
    )
    cell.prints("ready")
    kernel.interrupt()
    out = cell.wait()
    assert (out.ename, out.stderr) == ("KeyboardInterrupt", "")


def test_an_interrupt_leaves_no_lock_held(kernel: Kernel) -> None:
    out = kernel.run(
        "import functools, signal, threading\n"
        "class Lock:  # its owner is interrupted at the moment when it gets it\n"
        "    def __init__(self):\n"
        "        self.held = True\n"
        "        self.__enter__ = functools.partial(signal.raise_signal, signal.SIGINT)\n"
        "        self.__exit__ = lambda *_: setattr(self, 'held', False)\n"
        "        self.acquire = self.release = lambda: True\n"
        "lock = Lock()\n"
        "with threading.Condition(lock):\n"
        f"    threading.Event().wait({LONG})"
    )
    assert out.ename == "KeyboardInterrupt"
    assert kernel.ok("lock.held").text == "False"


def test_a_lock_that_never_comes_can_be_interrupted(kernel: Kernel) -> None:
    interrupted(
        kernel,
        "import threading\n"
        "lock = threading.Lock()\n"
        "lock.acquire()\n"
        "print('ready', flush=True)\n"
        "with threading.Condition(lock):\n"
        "    pass",
    )


def test_ranks_hear_of_it_though_the_kernel_is_inside_native_code(kernel: Kernel) -> None:
    kernel.ok(TARGET)
    cell = kernel.send(
        "import ctypes\n"
        "libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "libc.pthread_mutex_lock(mutex)\n"
        f"free = lambda: (target.interrupted.wait({LONG}), libc.pthread_mutex_unlock(mutex))\n"
        "threading.Thread(target=free).start()\n"
        "with get_relay().active(target):\n"
        "    print('ready', flush=True)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "    print('went on')"
    )
    cell.prints("ready")
    kernel.interrupt()
    out = cell.wait()
    assert (out.ename, out.stdout) == ("KeyboardInterrupt", "ready\n")
    # It was one press: the handler, when it ran at last, did not make it two.
    kernel.ok(f"get_relay().flush({LONG})")
    assert kernel.ok("target.killed").text == "[]"


def test_signals_of_children_are_not_the_kernels(kernel: Kernel) -> None:
    kernel.ok(TARGET)
    out = kernel.ok(
        "import os, signal\n"
        "with get_relay().active(target):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        except KeyboardInterrupt:\n"
        "            os._exit(7)\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        f"    get_relay().flush({LONG})\n"
        "code, target.interrupted.is_set()"
    )
    assert out.text == "(7, False)"


def test_an_event_loops_own_signal_handlers_work(kernel: Kernel) -> None:
    out = kernel.ok(
        "import asyncio, os, signal\n"
        "loop, got = asyncio.get_running_loop(), asyncio.Event()\n"
        "loop.add_signal_handler(signal.SIGUSR1, got.set)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "await asyncio.wait_for(got.wait(), 60)"
    )
    assert out.text == "True"
    interrupted(kernel, f"import asyncio\nprint('ready', flush=True)\nawait asyncio.sleep({LONG})")
    kernel.ok("import asyncio, signal; asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1);")
    kernel.ok("import asyncio; await asyncio.sleep(0)")


def test_an_idle_kernel_shrugs_off_interrupts(kernel: Kernel) -> None:
    kernel.ok("1")
    kernel.interrupt()
    kernel.interrupt()
    assert kernel.ok("6*7").text == "42"
    assert kernel.ok("import asyncio; await asyncio.sleep(0, 3)").text == "3"


def test_a_cell_may_handle_the_interrupt_itself(kernel: Kernel) -> None:
    cell = kernel.send(
        "import time\n"
        "try:\n"
        "    print('ready', flush=True)\n"
        f"    time.sleep({LONG})\n"
        "except KeyboardInterrupt:\n"
        "    print('tidied up')"
    )
    cell.prints("ready")
    kernel.interrupt()
    out = cell.wait()
    assert out.status == "ok"
    assert "tidied up" in out.stdout


def test_a_cells_own_cancellation_is_not_called_an_interrupt(kernel: Kernel) -> None:
    out = kernel.run("import asyncio\nraise asyncio.CancelledError('mine')\nawait asyncio.sleep(0)")
    assert (out.status, out.ename, out.evalue) == ("error", "CancelledError", "mine")


def test_a_signal_handler_left_by_a_cell_does_not_stay(kernel: Kernel) -> None:
    kernel.ok("import signal; signal.signal(signal.SIGINT, lambda *a: None);")
    interrupted(kernel, f"import time\nprint('ready', flush=True)\ntime.sleep({LONG})")


def test_a_press_reaches_active_targets_and_a_second_one_kills(kernel: Kernel) -> None:
    kernel.ok(TARGET)
    cell = kernel.send(
        "with get_relay().active(target):\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        f"        target.interrupted.wait({LONG}) and threading.Event().wait({LONG})\n"
        "    except KeyboardInterrupt:\n"
        f"        target.interrupted.wait({LONG})\n"
        "        print('waiting for ranks', flush=True)\n"
        f"        threading.Event().wait({LONG})\n"
    )
    cell.prints("ready")
    kernel.interrupt()
    cell.prints("waiting for ranks")
    kernel.interrupt()
    out = cell.wait()
    assert (out.status, out.ename) == ("error", "KeyboardInterrupt")
    kernel.ok(f"get_relay().flush({LONG})")
    assert kernel.ok("target.killed").text == "[1, 2, 3, 6]"
    assert kernel.ok("target.interrupted.is_set()").text == "True"


def test_the_second_press_may_come_when_the_cell_has_ended(kernel: Kernel) -> None:
    kernel.ok(TARGET)
    cell = kernel.send(
        f"import time\nwith get_relay().active(target):\n    print('ready', flush=True)\n    time.sleep({LONG})"
    )
    cell.prints("ready")
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    kernel.interrupt()
    # The notice goes to the cell that was interrupted, though it has ended.
    notice = "Killed ranks 1-3,6 of mesh 'm': no answer to the interrupt."
    while notice not in cell.outcome.stderr:
        cell.read()
    assert kernel.ok("target.killed").text == "[1, 2, 3, 6]"


def test_the_notice_of_a_press_in_a_running_cell_goes_to_that_cell(kernel: Kernel) -> None:
    kernel.ok(TARGET)
    cell = kernel.send(
        "with get_relay().active(target):\n"
        "    for attempt in range(2):\n"
        "        try:\n"
        "            print('ready', attempt, flush=True)\n"
        f"            threading.Event().wait({LONG})\n"
        "        except KeyboardInterrupt:\n"
        "            pass\n"
        f"    get_relay().flush({LONG})"
    )
    cell.prints("ready 0")
    kernel.interrupt()
    cell.prints("ready 1")
    kernel.interrupt()
    out = cell.wait()
    assert out.status == "ok"
    assert "Killed ranks 1-3,6 of mesh 'm'" in out.stderr
