"""Output before answers: a call resolves once the earlier output of its ranks has arrived.

Output arrives through the host agents, while answers arrive directly and are usually faster. A rank that has written
output ends it with a numbered mark in its pipe. Every answer names the last mark, and is held until that mark arrives,
for at most ``OUTPUT_TIMEOUT``. Ranks without output have no mark, and their answers are not held.
"""

from __future__ import annotations

from typing import Any

from monarch_kernel.protocol.messages import Reply
from monarch_kernel.protocol.output_records import decode_answer
from monarch_kernel.runtime.node.node import Node

#: How long an answer waits for output (seconds).
OUTPUT_TIMEOUT = 0.5


class _Proc:
    """The marks of one proc."""

    __slots__ = ("both", "held", "late", "seen")

    def __init__(self) -> None:
        self.seen = [0, 0]  # the last mark on each pipe
        self.both = 0  # the last mark on stdout's pipe that has a counterpart on stderr's
        self.held: list[tuple[Reply, Any]] = []
        self.late = False  # output timed out, so answers do not wait until some arrives again

    @property
    def arrived(self) -> int:
        """The last mark before which all output has arrived."""
        return self.seen[0] if self.both <= self.seen[1] else self.both - 1


class AnswerGate:
    """Holds answers until output has arrived. The polling thread calls all its methods."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._procs: dict[str, _Proc] = {}
        node.reply_gate = self

    def holds(self, proc: str, reply: Reply, body: Any) -> bool:
        """See ``ReplyGate``."""
        state = self._procs.setdefault(proc, _Proc())
        if reply.written <= state.arrived or state.late:
            return False
        number = reply.written
        state.held.append((reply, bytes(body) if isinstance(body, memoryview) else body))
        self._node.poller.call_later(OUTPUT_TIMEOUT, lambda: self._give_up(state, number))
        return True

    def mark(self, proc: str, stream: int, token: str) -> None:
        """Record a mark that has arrived, after the output before it was delivered."""
        number, both = decode_answer(token)
        if not number:
            return
        state = self._procs.setdefault(proc, _Proc())
        state.seen[stream - 1] = max(state.seen[stream - 1], number)
        if both:
            state.both = max(state.both, number)
        state.late = False
        if state.held:
            self._pass(state, state.arrived)

    def release(self, proc: str) -> None:
        """See ``ReplyGate``."""
        state = self._procs.pop(proc, None)
        if state is not None:
            self._pass(state, None)

    def _give_up(self, state: _Proc, number: int) -> None:
        if any(reply.written <= number for reply, _ in state.held):
            state.late = True
            self._pass(state, number)

    def _pass(self, state: _Proc, upto: int | None) -> None:
        held, state.held = state.held, []
        for reply, body in held:
            if upto is None or reply.written <= upto:
                self._node.settle(reply, body)
            else:
                state.held.append((reply, body))
