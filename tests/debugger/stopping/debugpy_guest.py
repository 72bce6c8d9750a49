"""Runs in a process of its own: a function that debugpy and the tracer both stop in.

``python debugpy_guest.py FIRST``: FIRST is "debugpy" or "engine", whichever is there before the other. Prints lines of
JSON: the port of debugpy, then where the engine has stopped.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from typing import Any

import debugpy

from monarch_kernel.debugger.model.stops import Breakpoint, Stopped
from monarch_kernel.debugger.rank.stopping.tracer import StopTracer
from tests.debugger.stopping import guest
from tests.debugger.stopping.driving import line


def say(what: Any) -> None:
    """For the test."""
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


def work(rounds: queue.SimpleQueue[bool], done: queue.SimpleQueue[bool]) -> None:
    """The thread that stops."""
    while rounds.get():
        guest.caller(1)
        say("round")
        done.put(True)


def main(first: str) -> None:
    """See the module."""

    engine_stopped = threading.Event()

    def on_event(event: Any) -> None:
        if isinstance(event, Stopped):
            say(["engine", event.stop.frames[0].line])
            engine_stopped.set()
            threading.Thread(target=engine.resume, args=(event.stop.id,)).start()

    rounds: queue.SimpleQueue[bool] = queue.SimpleQueue()
    done: queue.SimpleQueue[bool] = queue.SimpleQueue()
    thread = threading.Thread(target=work, args=(rounds, done))
    thread.start()
    engine = StopTracer(on_event, lambda *_: True, lambda: ("", "", ""))
    points = [Breakpoint(1, guest.__file__, line("plain second"))]
    if first == "engine":
        engine.arm(points)
    say(debugpy.listen(("127.0.0.1", 0))[1])
    debugpy.wait_for_client()
    engine.arm(points)
    # On Python 3.11 debugpy takes all threads when its breakpoints change; the engine goes on a moment later.
    while not engine_stopped.is_set():
        rounds.put(True)
        done.get()
    rounds.put(False)
    thread.join()
    engine.close()
    guest.caller(1)
    say("closed")


if __name__ == "__main__":
    main(*sys.argv[1:])
