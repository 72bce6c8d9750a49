"""Requests as lines of JSON: a peer's client is a process of its own, whose clock and memory are its own, too.

Runs inside the peers' environments, so it needs the standard library alone.
"""

from __future__ import annotations

import json
import os
import select
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.sync.hosts import Program

#: A request that takes longer has failed (seconds).
DEADLINE = 180.0


class PeerFailedError(Exception):
    """A peer did not do what it was asked to; the message is its own."""


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests until stdin ends. Whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": handlers[request.pop("what")](**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Client:
    """The other end of ``serve``."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def ask(self, what: str, **request: Any) -> Any:
        """One request; its value.

        Raises:
            PeerFailedError: it failed, there is no answer, or the process has ended.
        """
        self.send(what, **request)
        return self.answer()

    def send(self, what: str, **request: Any) -> None:
        """One request, whose ``answer`` is waited for later."""
        self.program.stdin.write(json.dumps({"what": what, **request}) + "\n")
        self.program.stdin.flush()

    def answer(self) -> Any:
        """The value of the oldest request without an answer; raises as ``ask`` does."""
        ready, _, _ = select.select([self.program.stdout], [], [], DEADLINE)
        if not ready:
            raise PeerFailedError(f"no answer within {DEADLINE:g} s")
        line = self.program.stdout.readline()
        if not line:
            raise PeerFailedError("the process has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailedError(answer["error"])
        return answer["value"]
