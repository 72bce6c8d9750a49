"""Read stacks of ranks from outside with py-spy, for ranks that cannot answer, and for native frames.

py-spy runs as a separate process and does not block the agent.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from monarch_kernel import programs
from monarch_kernel.protocol.messages import AskStacks, StackRead
from monarch_kernel.runtime.host import py_spy
from monarch_kernel.runtime.host.procs import Proc
from monarch_kernel.runtime.node.poller import Poller

#: The maximum size of a dump (bytes): enough for a thousand threads.
DUMP_MAX = 8_000_000
#: The maximum number of parallel py-spy processes.
AT_ONCE = 4


class PySpy:
    """Runs py-spy processes, a few in parallel."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = 0

    def dump(self, pid: int, options: tuple[str, ...], timeout: float, done: Callable[[str, str], None]) -> None:
        """Run ``py-spy dump`` on a process; call ``done(output, error)`` once, within ``timeout`` seconds."""
        _Dump(self, self._poller, pid, options, timeout, done)

    def begin(self, start: Callable[[], None]) -> None:
        """Call ``start`` when another py-spy may run."""
        self._waiting.append(start)
        self._next()

    def end(self) -> None:
        """Record that one py-spy has ended, and start the next."""
        self._running -= 1
        self._next()

    def _next(self) -> None:
        while self._waiting and self._running < AT_ONCE:
            self._running += 1
            self._waiting.popleft()()


class _Dump:
    """One run of py-spy: waits for its turn, runs, and is killed at its timeout."""

    def __init__(
        self,
        spy: PySpy,
        poller: Poller,
        pid: int,
        options: tuple[str, ...],
        timeout: float,
        done: Callable[[str, str], None],
    ) -> None:
        self._spy = spy
        self._poller = poller
        self._argv = ("dump", *options, "--pid", str(pid))
        self._done: Callable[[str, str], None] | None = done
        self._output = self._process = self._errors = -1
        self._text = bytearray()
        self._timeout = timeout
        self._timer = poller.call_later(timeout, self._late)
        spy.begin(self._start)

    def _start(self) -> None:
        if self._done is None:  # it timed out while it waited
            self._spy.end()
            return
        program = py_spy.program()
        if program is None:
            self._finish(py_spy.MISSING)
            return
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._errors = os.memfd_create("py-spy", os.MFD_CLOEXEC)
        os.set_blocking(theirs, True)
        try:
            # The agent reaps it, as it does all its children.
            child = programs.spawn([program, *self._argv], os.environ, {1: theirs, 2: self._errors})
            self._process = os.pidfd_open(child)
        except OSError as error:
            os.close(ours)
            self._finish(f"py-spy could not be started there: {error}")
            return
        finally:
            os.close(theirs)
        self._output = ours
        self._poller.register(ours, self._on_output)

    def _on_output(self, _events: int) -> None:
        while True:
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._finish("")
                return
            self._text += data[: DUMP_MAX - len(self._text)]

    def _late(self) -> None:
        if self._process >= 0:
            try:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            except OSError:
                pass  # it has just ended
            self._finish(f"py-spy did not read its stack within {self._timeout:g} s")
        elif self._done is not None:
            done, self._done = self._done, None
            done("", f"py-spy could not begin to read its stack within {self._timeout:g} s: others came first")

    def _finish(self, error: str) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._timer.cancel()
        if self._output >= 0:
            self._poller.unregister(self._output)
        if self._errors >= 0:
            error = error or py_spy.plain_error(os.pread(self._errors, 4096, 0).decode("utf-8", "replace"))
        for fd in (self._output, self._process, self._errors):
            if fd >= 0:
                os.close(fd)
        self._output = self._process = self._errors = -1
        done(self._text.decode("utf-8", "replace"), error)
        self._spy.end()


class StackReader:
    """Answers ``AskStacks``."""

    def __init__(self, spy: PySpy, host: str) -> None:
        self._spy = spy
        self._host = host

    def read(self, message: AskStacks, procs: Mapping[str, Proc], reply: Callable[[bytes], None]) -> None:
        """Read all requested stacks, then reply, within the request's timeout."""
        deadline = time.monotonic() + message.timeout
        found: dict[str, StackRead] = {}

        def note(read: StackRead) -> None:
            found[read.proc] = read
            if len(found) == len(message.procs):
                reply(msgspec.msgpack.encode(list(found.values())))

        if not message.procs:
            reply(msgspec.msgpack.encode([]))
        for name in dict.fromkeys(message.procs):
            proc = procs.get(name)
            if proc is None:
                note(StackRead(name, 0, self._host, "", "", "its host agent does not know it"))
            elif proc.exit is not None:
                note(StackRead(name, proc.pid, self._host, "", "", proc.exit.cause))
            elif not proc.pid:
                note(StackRead(name, 0, self._host, "", "", "it has not started yet"))
            else:
                self._one(proc, message.native, deadline, note)

    def _one(self, proc: Proc, native: bool, deadline: float, note: Callable[[StackRead], None]) -> None:
        why = py_spy.state_of(proc.pid)
        ways = py_spy.ways(native, stopped=bool(why))

        def attempt(rest: list[tuple[str, ...]]) -> None:
            left = max(0.01, deadline - time.monotonic())
            self._spy.dump(proc.pid, (*py_spy.JSON, *rest[0]), left, lambda text, error: ended(rest, text, error))

        def ended(rest: list[tuple[str, ...]], text: str, error: str) -> None:
            good = py_spy.is_whole(text)
            if not good and rest[1:] and time.monotonic() < deadline:
                attempt(rest[1:])
                return
            trouble = "" if good else error or "py-spy has read nothing"
            note(StackRead(proc.id, proc.pid, self._host, why, text if good else "", trouble))

        attempt(ways)
