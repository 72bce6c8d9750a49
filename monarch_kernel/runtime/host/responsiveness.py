"""Detect unresponsive ranks: the host agent pings each rank periodically and reports one that does not answer.

A rank answers as long as any of its threads can take the GIL, so a busy rank still answers. A rank that does not answer
is stopped (SIGSTOP, a debugger), waits for a disk, or has a thread in native code that holds the GIL. The agent reports
this to the rank's owner and watchers at once, again with the stack that py-spy has read, and again when the rank
answers. An unresponsive rank is not declared dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from monarch_kernel import environment
from monarch_kernel.protocol.messages import Death, Message, Ping, ProcResponds, ProcUnresponsive, encode
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.host.procs import Proc
from monarch_kernel.runtime.host.py_spy import state_of
from monarch_kernel.runtime.host.stack_reader import PySpy
from monarch_kernel.runtime.node.node import Node

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
