"""The actor in the controller that receives the stops of ranks. Ranks load this module to call it, so it is small."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.engines import tool_runtime

if TYPE_CHECKING:
    from monarch_kernel.actor import ActorMesh, Port, ProcMesh
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.model.stops import Stop

#: The name of the actor; one in each controller.
ACTOR = "debug_hub"
#: How long spawning it may take (seconds).
TIMEOUT = 30.0


class DebugHub(Actor):
    """Receives stops. Runs in the controller, on its own thread."""

    __tool__ = True
    __outlives_errors__ = True  # a rank of another program may call it wrongly

    def __init__(self) -> None:
        self._ports: dict[tuple[str, int, int, int], Port[object]] = {}
        self._held: list[object] = []

    @endpoint
    def hello(self, procs: ProcMesh) -> None:
        """Handle that a rank without an agent has reached a `breakpoint()`."""
        _debugger().watch(procs)

    @endpoint
    def joined(self, uid: str, rank: int, pid: int, stops: list[Stop]) -> None:
        """Handle that an agent has begun."""
        _debugger().registry.on_joined(uid, rank, pid, stops)

    @endpoint
    def stopped(self, uid: str, rank: int, pid: int, stop: Stop) -> None:
        """Handle that a rank has stopped."""
        _debugger().registry.on_stopped(uid, rank, pid, stop)

    @endpoint
    def resumed(self, uid: str, rank: int, stop: int, how: str) -> None:
        """Handle that a rank has continued."""
        _debugger().registry.on_resumed(uid, rank, stop, how)

    @endpoint
    def changed(self) -> None:
        """Handle that meshes were created or stopped, or that ranks died or were replaced."""
        _debugger().registry.on_meshes_changed()

    @endpoint(explicit_response_port=True)
    def vote(self, port: Port[object], uid: str, rank: int, number: int, hit: int, value: str) -> None:
        """Record the vote of a rank at a breakpoint on which ranks vote. The decision is sent as the reply."""
        self._ports[uid, number, hit, rank] = port
        self._answer(uid, number, hit, _debugger().breakpoint_table.on_vote(uid, rank, number, hit, value))

    @endpoint
    def decide(self, uid: str, number: int, hit: int) -> None:
        """Decide a vote without the missing ranks: a rank's wait for them has timed out."""
        self._answer(uid, number, hit, _debugger().breakpoint_table.on_decide(uid, number, hit))

    def _answer(self, uid: str, number: int, hit: int, decided: dict[int, bool]) -> None:
        for rank, stops in decided.items():
            port = self._ports.pop((uid, number, hit, rank), None)
            if port is not None:
                port.send(stops)

    @endpoint(explicit_response_port=True)
    def hold(self, port: Port[object]) -> None:
        """Keep the call open: it fails when this process ends, which notifies a stopped rank."""
        self._held.append(port)

    def __supervise__(self, _failure: object) -> bool:
        """Ignore the end of agents: they end with their ranks, whose owners are notified."""
        return True

    def __cleanup__(self, _error: BaseException | None) -> None:
        """Close the debugger, when the runtime ends."""
        from monarch_kernel.debugger.controller.hub import forget_debugger

        forget_debugger()


def _debugger() -> MeshDebugger:
    from monarch_kernel.debugger.controller.hub import get_debugger

    return get_debugger()


def hub_actor(mesh: ProcMesh | None = None) -> ActorMesh[DebugHub]:
    """Return the hub actor of the job's controller, from any process of the job.

    Args:
        mesh: in the controller, the proc mesh whose ranks need to reach it.
    """
    return tool_runtime().controller_actor(ACTOR, DebugHub, TIMEOUT, mesh)
