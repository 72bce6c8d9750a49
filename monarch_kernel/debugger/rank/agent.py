"""The debug agent: the debugger's actor on a rank. Each request runs on a separate thread, so none delays another."""

from __future__ import annotations

import threading
from typing import Any

import cloudpickle

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.debugger.rank.rank_debugger import attach, serve
from monarch_kernel.engines import tool_runtime


class DebugAgent(Actor):
    """The agent of one rank, spawned by the first query to its mesh.

    Args:
        hub: the actor that receives this rank's stops (`controller.hub_actor.DebugHub`).
        uid: the unique name of the proc mesh.
        mesh: its displayed name.
    """

    __tool__ = True
    __background__ = True

    def __init__(self, hub: Any, uid: str, mesh: str) -> None:
        self._point = tool_runtime().actor_here().rank
        self._uid = uid
        attach(hub, uid, mesh, self._point)

    @endpoint(explicit_response_port=True)
    def run(self, port: Any, request: bytes) -> None:
        """Call the pickled ``(function, args)``; return this rank and the function's result."""
        threading.Thread(target=self._run, args=(port, request), name="monarch-debugger", daemon=True).start()

    def _run(self, port: Any, request: bytes) -> None:
        try:
            function, args = cloudpickle.loads(request)
            port.send((self._point.rank, serve(self._uid, function, args)))
        except BaseException as error:
            port.exception(error)
