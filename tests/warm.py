"""A process that has loaded what every pytest loads, from which batches of tests are forked.

``tests.run`` has two: a plain one, and one that has loaded torch. A pytest that is forked has begun after a tenth of
the time; what a test then starts is started as anywhere.

Three processes each have one task. The *server* forks. The *guard* of a batch inherits whatever pytest has started and
left, ends that, and counts the processor time of all. *pytest* runs the tests.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
#: What most test files load. Nothing of this project: what it notes as it is loaded belongs to one process.
_PLAIN = ("pytest", "hypothesis", "jupyter_client.blocking.client", "jupyter_client.manager", "psutil", "cloudpickle")
#: An optimizer's first step imports torch._dynamo, which takes as long as torch.
_TORCH = ("numpy", "torch", "torch.distributed.tensor", "torch._dynamo")
#: How long what the tests have started may take to end after them (seconds).
_GRACE = 20.0


@dataclass
class Ended:
    """What became of a batch.

    Attributes:
        code: of pytest, or minus the signal.
        took: wall-clock time (seconds).
        computed: processor time of all its processes (seconds).
        left: processes that were still there after it, and were killed.
    """

    number: int
    code: int
    took: float
    computed: float
    left: list[str]


class Warm:
    """A server, for the process that runs the suite."""

    def __init__(self, torch: bool, grace: float = _GRACE) -> None:
        self._grace = grace
        self._socket, there = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _close_all_but(there.fileno())
            _leave(lambda: _serve(there, torch))
        there.close()
        self._rest = b""

    def fileno(self) -> int:
        """For ``select``: readable when a batch has ended."""
        return self._socket.fileno()

    def start(self, number: int, arguments: list[str], folder: Path) -> None:
        """Run pytest with these arguments; in this folder ``output`` is what it prints, ``computed`` what each cost."""
        request = {"number": number, "arguments": arguments, "folder": str(folder), "grace": self._grace}
        self._socket.sendall(json.dumps(request).encode() + b"\n")

    def ended(self) -> list[Ended]:
        """The batches that have ended.

        Raises:
            RuntimeError: the server has.
        """
        data = self._socket.recv(1 << 16)
        if not data:
            raise RuntimeError("the process from which batches are forked has ended; the lines above say why")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [Ended(**json.loads(line)) for line in lines]

    def close(self) -> None:
        """End it, and every batch that still runs."""
        self._socket.close()
        os.waitpid(self.pid, 0)


def _close_all_but(kept: int) -> None:
    """Close every descriptor but the standard ones and one: another server's socket would keep that one alive."""
    os.closerange(3, kept)
    os.closerange(max(3, kept + 1), max(map(int, os.listdir("/proc/self/fd"))) + 1)


def _leave(work: Any) -> None:
    """Do the work of a forked process, and end it without its parent's exit handlers."""
    code = 1
    try:
        code = work() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        os._exit(code)


def _serve(requests: socket.socket, torch: bool) -> None:
    os.setsid()  # a Ctrl-C is the runner's, which closes the socket
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for name in (*_PLAIN, *(_TORCH if torch else ())):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    from _pytest.config import default_plugins

    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    gc.collect()
    gc.freeze()
    guards: dict[int, tuple[int, int, int]] = {}  # pidfd -> (pid, batch, what it says)
    rest = b""
    try:
        while True:
            ready, _, _ = select.select([requests, *guards], [], [])
            for fd in ready:
                if fd is requests:
                    data = requests.recv(1 << 16)
                    if not data:
                        return
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        request = json.loads(line)
                        read, write = os.pipe()
                        pid = os.fork()
                        if pid == 0:
                            _close_all_but(write)
                            _leave(lambda: _guard(request, write))  # noqa: B023  # it runs at once
                        os.close(write)
                        guards[os.pidfd_open(pid)] = pid, request["number"], read
                else:
                    pid, _number, said = guards.pop(fd)
                    os.close(fd)
                    os.waitpid(pid, 0)
                    with open(said, "rb") as answer:
                        requests.sendall(answer.read())
    finally:
        for pid, _number, _said in guards.values():
            os.kill(pid, signal.SIGTERM)
        for pid, _number, _said in guards.values():
            os.waitpid(pid, 0)


def _guard(request: dict[str, Any], answer: int) -> None:
    """Run pytest, and be the parent of all that outlives its own parent below it."""
    server = os.getppid()
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, _give_up)
    if os.getppid() != server:
        os._exit(1)
    output = os.open(os.path.join(request["folder"], "output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    began = time.monotonic()
    tests = os.fork()
    if tests == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _close_all_but(2)
        os.environ["MK_TEST_COMPUTED"] = os.path.join(request["folder"], "computed")
        _leave(lambda: _pytest(request["arguments"]))
    code = 0
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == tests:
            code = os.waitstatus_to_exitcode(status)
            break
    took = time.monotonic() - began
    left = _end_rest(request["grace"])
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = Ended(request["number"], code, took, usage.ru_utime + usage.ru_stime, left)
    os.write(answer, json.dumps(asdict(ended)).encode() + b"\n")


def _give_up(_number: int, _frame: object) -> None:
    _end_rest(0)
    os._exit(1)


def _end_rest(grace: float) -> list[str]:
    """Wait until no process is left below this one; kills those that are still there then, and names them."""
    end = time.monotonic() + grace
    named: list[str] = []
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return named
        if pid:
            continue
        if time.monotonic() > end:
            for child in psutil.Process().children():  # those below them fall to this process, and are next
                with suppress(psutil.NoSuchProcess):
                    named.append(f"{child.pid}: {' '.join(child.cmdline())[:200] or child.name()}")
                    child.kill()
        time.sleep(0.02)


def _pytest(arguments: list[str]) -> int:
    """What ``python -m pytest`` does, in a process that nothing tells from it."""
    import pytest

    main = types.ModuleType("__main__")
    main.__spec__ = importlib.util.find_spec("pytest.__main__")
    main.__file__ = main.__spec__.origin if main.__spec__ else None
    sys.modules["__main__"] = main
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]  # pytest loads them in its own way
    sys.argv = [main.__file__ or "pytest", *arguments]
    atexit._clear()  # what is registered is the server's
    atexit.register(logging.shutdown)
    code = int(pytest.main(arguments))
    atexit._run_exitfuncs()
    return code
