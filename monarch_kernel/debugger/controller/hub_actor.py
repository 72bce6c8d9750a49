"""The actor in the controller that receives the stops of ranks. Ranks load this module to call it, so it is light."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch_kernel.actor import Actor, endpoint, get_or_spawn_controller

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.model.stops import Stop

#: The name of the actor; one in each controller.
ACTOR = "debug_hub"
#: How long spawning it may take (seconds).
TIMEOUT = 30.0


class DebugHub(Actor):
    """Receives stops. Runs in the controller, on a thread of its own."""

    __tool__ = True

    def __init__(self) -> None:
        self._ports: dict[tuple[str, int, int, int], Any] = {}
        self._held: list[Any] = []

    @endpoint
    def hello(self, procs: Any) -> None:
        """A rank without an agent has come to a `breakpoint()`."""
        _debugger().watch(procs)

    @endpoint
    def joined(self, uid: str, rank: int, pid: int, stops: list[Stop]) -> None:
        """An agent has begun."""
        _debugger().registry.on_joined(uid, rank, pid, stops)

    @endpoint
    def stopped(self, uid: str, rank: int, pid: int, stop: Stop) -> None:
        """A rank has stopped."""
        _debugger().registry.on_stopped(uid, rank, pid, stop)

    @endpoint
    def resumed(self, uid: str, rank: int, stop: int, how: str) -> None:
        """A rank has continued."""
        _debugger().registry.on_resumed(uid, rank, stop, how)

    @endpoint
    def changed(self) -> None:
        """Meshes were made or stopped, or ranks have died or were replaced."""
        _debugger().registry.on_meshes_changed()

    @endpoint(explicit_response_port=True)
    def vote(self, port: Any, uid: str, rank: int, number: int, hit: int, value: str) -> None:
        """A rank has come to a breakpoint on which the ranks vote; the answer comes with the decision."""
        self._ports[uid, number, hit, rank] = port
        self._answer(uid, number, hit, _debugger().breakpoint_table.on_vote(uid, rank, number, hit, value))

    @endpoint
    def decide(self, uid: str, number: int, hit: int) -> None:
        """A rank has waited long enough for the votes of the others."""
        self._answer(uid, number, hit, _debugger().breakpoint_table.on_decide(uid, number, hit))

    def _answer(self, uid: str, number: int, hit: int, decided: dict[int, bool]) -> None:
        for rank, stops in decided.items():
            port = self._ports.pop((uid, number, hit, rank), None)
            if port is not None:
                port.send(stops)

    @endpoint(explicit_response_port=True)
    def hold(self, port: Any) -> None:
        """Never answered: the call fails when this process ends, which is how a stopped rank notices."""
        self._held.append(port)

    def __supervise__(self, _failure: Any) -> bool:
        """Agents end with their ranks; the owners of those hear of it."""
        return True

    def __cleanup__(self, _error: BaseException | None) -> None:
        """The runtime ends, and the debugger with it."""
        from monarch_kernel.debugger.controller.hub import forget_debugger

        forget_debugger()


def _debugger() -> MeshDebugger:
    from monarch_kernel.debugger.controller.hub import get_debugger

    return get_debugger()


def hub_actor() -> Any:
    """The hub actor of the job's controller, from any process of the job."""
    return get_or_spawn_controller(ACTOR, DebugHub).get(TIMEOUT)
