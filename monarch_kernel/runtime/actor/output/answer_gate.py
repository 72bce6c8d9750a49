"""Output before answers: a call resolves when what its ranks had put out before they answered is here.

Output comes through the host agents, while answers come directly, and mostly sooner. A rank that has put something out
ends it with a numbered mark in its pipe. Every answer names the last mark, and is kept back until that has come, or for
``PATIENCE``. Ranks that have put out nothing have no mark, and their answers pass.
"""

from __future__ import annotations

from typing import Any

from monarch_kernel.protocol.messages import Reply
from monarch_kernel.protocol.output_records import decode_answer
from monarch_kernel.runtime.node.node import Node

#: How long an answer waits for output (seconds).
PATIENCE = 0.5


class _Proc:
    """The marks of one proc."""

    __slots__ = ("both", "held", "late", "seen")

    def __init__(self) -> None:
        self.seen = [0, 0]  # the last mark on each pipe
        self.both = 0  # the last mark on stdout's pipe that has a counterpart on stderr's
        self.held: list[tuple[Reply, Any]] = []
        self.late = False  # output did not come in time: nothing waits for it again before some has come

    @property
    def arrived(self) -> int:
        """The last mark before which everything is here."""
        return self.seen[0] if self.both <= self.seen[1] else self.both - 1


class AnswerGate:
    """Keeps answers back until output has come. All its methods are called by the thread that polls."""

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
        self._node.poller.call_later(PATIENCE, lambda: self._give_up(state, number))
        return True

    def mark(self, proc: str, stream: int, token: str) -> None:
        """A mark has come; what was put out before it has been handed on."""
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
