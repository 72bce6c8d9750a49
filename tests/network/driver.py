"""A controller on a test host: ``python -m tests.network.driver``, told by stdin what to run, one by one.

A request is a line of JSON: a *program* (a function of a test module, ``"module:name"``), the URLs of the workers, and
its arguments. The program is called with the mesh of these workers, in the main thread, as a user's script would. What
it ``say``s and what it returns goes back as lines of JSON. What the procs print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import traceback
from typing import Any

import monarch_kernel.actor
from monarch_kernel.actor import HostMesh

#: Faults that nobody handled, as they come: a script would end.
faults: queue.Queue[Any] = queue.Queue()

_meshes: dict[tuple[str, ...], HostMesh] = {}
_answers: Any = None


def say(value: Any) -> None:
    """Tell the test something while the program runs on."""
    print(json.dumps({"said": value}), file=_answers, flush=True)


def pause(value: Any = None) -> str:
    """Tell the test something, and wait until it says to go on; returns what else it says."""
    say(value)
    return sys.stdin.readline().rstrip("\n")


def forget(hosts: HostMesh) -> None:
    """Attach anew next time: these workers are not what they were."""
    for workers in [workers for workers, mesh in _meshes.items() if mesh is hosts]:
        del _meshes[workers]


def _attached(workers: tuple[str, ...]) -> HostMesh | None:
    if workers and workers not in _meshes:
        _meshes[workers] = monarch_kernel.actor.attach_to_workers(ca="trust_all_connections", workers=list(workers))
    return _meshes.get(workers)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    module, _, name = request["program"].partition(":")
    program = getattr(importlib.import_module(module), name)
    try:
        hosts = _attached(tuple(request["workers"]))
        value = program(*([] if hosts is None else [hosts]), *request["args"])
        if hosts is not None and hosts in _meshes.values():
            hosts.stop("the test is over").get(30)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return {"error": type(error).__name__, "message": str(error), "traceback": text}
    return {"value": value}


def main() -> None:
    global _answers
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    monarch_kernel.actor.unhandled_fault_hook = faults.put
    for line in sys.stdin:
        answer = _run(json.loads(line))
        print(json.dumps(answer), file=_answers, flush=True)
    monarch_kernel.actor.shutdown_context().get(30)


if __name__ == "__main__":
    # Programs import this module by its name, which must not be another one than the one that runs.
    importlib.import_module("tests.network.driver").main()
