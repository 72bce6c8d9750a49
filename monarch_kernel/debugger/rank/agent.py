"""The debugger's actor on a rank: runs what it is asked on threads of its own, so that nothing waits for anything."""

from __future__ import annotations

import threading
from typing import Any

import cloudpickle

from monarch_kernel.actor import Actor, context, endpoint
from monarch_kernel.debugger.rank.process import attach


class DebugAgent(Actor):
    """One on each rank that was ever asked something.

    Args:
        hub: the actor that hears of this rank's stops (`hub.DebugHub`).
        uid: the unique name of the proc mesh.
        mesh: its name for people.
    """

    __tool__ = True
    __background__ = True

    def __init__(self, hub: Any, uid: str, mesh: str) -> None:
        self._point = context().actor_instance.rank
        attach(hub, uid, mesh, self._point)

    @endpoint(explicit_response_port=True)
    def run(self, port: Any, request: bytes) -> None:
        """Answer with this rank and what the pickled ``(function, args)`` gives."""
        threading.Thread(target=self._run, args=(port, request), name="monarch-debugger", daemon=True).start()

    def _run(self, port: Any, request: bytes) -> None:
        try:
            function, args = cloudpickle.loads(request)
            port.send((self._point.rank, function(*args)))
        except BaseException as error:
            port.exception(error)
