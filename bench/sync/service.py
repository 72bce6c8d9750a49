"""Requests as lines of JSON: a peer's client is a separate process, with separate clock and memory figures.

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

#: The time limit of a request (seconds).
DEADLINE = 180.0


class PeerFailedError(Exception):
    """A peer failed to fulfil a request; the message is the peer's."""


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests until stdin ends. All other output goes to stderr."""
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
        """Send one request; return its value.

        Raises:
            PeerFailedError: it failed, there is no answer, or the process has ended.
        """
        self.send(what, **request)
        return self.answer()

    def send(self, what: str, **request: Any) -> None:
        """Send one request; wait for its ``answer`` later."""
        self.program.stdin.write(json.dumps({"what": what, **request}) + "\n")
        self.program.stdin.flush()

    def answer(self) -> Any:
        """Return the value of the oldest unanswered request; raises as ``ask`` does."""
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
