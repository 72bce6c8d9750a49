"""Read stacks of ranks from outside with py-spy, for ranks that cannot answer, and for native frames.

py-spy runs as a separate process and does not block the agent.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec

from monarch_kernel import environment, programs
from monarch_kernel.protocol.messages import (
    AskStacks,
    Death,
    Message,
    Ping,
    ProcResponds,
    ProcUnresponsive,
    StackRead,
    encode,
)
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.host import py_spy
from monarch_kernel.runtime.host.procs import Proc
from monarch_kernel.runtime.host.py_spy import state_of
from monarch_kernel.runtime.node.node import Node
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


# Detect unresponsive ranks: the host agent pings each rank periodically and reports one that does not answer.
#
# A rank answers as long as any of its threads can take the GIL, so a busy rank still answers. A rank that does not
# answer is stopped (SIGSTOP, a debugger), waits for a disk, or has a thread in native code that holds the GIL. The
# agent reports this to the rank's owner and watchers at once, again with the stack that py-spy has read, and again
# when the rank answers. An unresponsive rank is not declared dead.

#: The time limit for reading a stack (seconds), and the maximum length of the stored stack (characters).
STACK_TIMEOUT = 10.0
STACK_MAX = 16_000

#: Substrings of the lines of runtime frames and of frames of the interpreter's start.
_RUNTIME = ("monarch_kernel/runtime/", "<frozen runpy>", "<module> (<string>:", "(threading.py:")
_WEDGED = "native code holds the interpreter lock, or it gets no processor"


class _RankPings:
    """The ping state of one rank; a sink for its answers."""

    def __init__(self, monitor: ResponsivenessMonitor, proc: Proc) -> None:
        self.monitor = monitor
        self.proc = proc
        self.call = monitor.node.new_call(self)
        self.asked = 0.0  # when the pending ping was sent; 0: none is pending
        self.reported = ""  # why it does not respond, once reported

    def on_reply(self, rank: int, status: int, body: Body, buffers: tuple[int, ...]) -> None:
        self.monitor.answered(self)

    def on_peer_dead(self, proc: str, death: Death) -> None:
        if proc == self.proc.id:
            self.monitor.forget(self.proc.id)


class ResponsivenessMonitor:
    """Pings all living ranks of an agent.

    Args:
        tell: ``tell(peer, message)`` sends a report.
        spy: reads stacks.
        look: called with the current time at each round of pings.
    """

    def __init__(
        self,
        node: Node,
        procs: Callable[[], Iterable[Proc]],
        tell: Callable[[str, Message], None],
        spy: PySpy,
        look: Callable[[float], None],
    ) -> None:
        self._look = look
        self.node = node
        self._spy = spy
        self._procs = procs
        self._tell = tell
        self._pings: dict[str, _RankPings] = {}
        self._period = environment.PING_PERIOD.get()
        self._patience = environment.UNRESPONSIVE_AFTER.get()
        if self._period > 0:
            node.poller.call_later(self._period, self._ask)

    def why(self, proc: str) -> str:
        """Return why this rank does not respond; '' if it does."""
        pings = self._pings.get(proc)
        return pings.reported if pings is not None else ""

    def forget(self, proc: str) -> None:
        """Drop the state of a rank that is gone."""
        pings = self._pings.pop(proc, None)
        if pings is not None:
            self.node.end_call(pings.call)

    # -- pings --------------------------------------------------------------------------------------

    def _ask(self) -> None:
        now = time.monotonic()
        self._look(now)
        for proc in self._procs():
            if proc.state != "alive" or proc.exit is not None:
                continue
            pings = self._pings.get(proc.id)
            if pings is None:
                pings = self._pings[proc.id] = _RankPings(self, proc)
            if not pings.asked:
                link = self.node.links.get(proc.id)
                if link is not None:
                    pings.asked = now
                    link.send(encode(Ping(pings.call, 0)))
            elif not pings.reported:
                self._overdue(pings, now)
        self.node.poller.call_later(self._period, self._ask)

    def _overdue(self, pings: _RankPings, now: float) -> None:
        why = state_of(pings.proc.pid)
        if why or now - pings.asked >= self._patience:
            pings.reported = why or _WEDGED
            self._report(pings, "")
            self._read_stack(pings)

    def _report(self, pings: _RankPings, stack: str) -> None:
        proc = pings.proc
        since = time.monotonic() - pings.asked
        message = ProcUnresponsive(proc.id, proc.pid, self.node.ref.host, since, pings.reported, stack)
        for peer in proc.audience():
            self._tell(peer, message)

    def answered(self, pings: _RankPings) -> None:
        """Record a rank's answer; if it was reported unresponsive, report that it responds again."""
        late = time.monotonic() - pings.asked
        pings.asked = 0.0
        if pings.reported:
            pings.reported = ""
            for peer in pings.proc.audience():
                self._tell(peer, ProcResponds(pings.proc.id, late))

    # -- stacks ---------------------------------------------------------------------------------------

    def _read_stack(self, pings: _RankPings) -> None:
        """Make py-spy read the stack of an unresponsive rank, and send it in a second report."""

        def done(text: str, error: str) -> None:
            if pings.reported and (text or error):
                self._report(pings, _tidy((text or error)[:STACK_MAX]))

        self._spy.dump(pings.proc.pid, ("--nonblocking",), STACK_TIMEOUT, done)


def _tidy(text: str) -> str:
    """Return the threads of a dump, without the runtime's threads and frames of the runtime that called user code."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("Thread "):
            blocks.append([line])
        elif blocks and line.startswith(" "):
            blocks[-1].append(line)
    if not blocks:
        return text.strip()  # it is an error message
    shown: list[str] = []
    for name, *frames in blocks:
        if '"monarch-' in name:
            continue
        while frames and any(part in frames[-1] for part in _RUNTIME):
            frames.pop()
        shown += [name, *frames] if frames else [f"{name}: in the runtime, waiting for a message"]
    return "\n".join(shown)
