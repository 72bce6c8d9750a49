"""This package's own runtime as the engine of the tools. Names are loaded on first use.

Most attributes are the functions of the public modules themselves, so that nothing is between a tool and the runtime.
The others also include the jobs that this controller has joined (``engines.join``), next to its own meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from monarch_kernel.subscriptions import Subscribers, Subscription

if TYPE_CHECKING:
    from monarch_kernel.actor import ProcMesh
    from monarch_kernel.actor import this_host as this_host
    from monarch_kernel.engines.interface import ControlFollower
    from monarch_kernel.engines.join.controller import JoinController
    from monarch_kernel.introspection import Awaited, StackRead
    from monarch_kernel.introspection import actors_here as actors_here
    from monarch_kernel.introspection import awaited_by as awaited_by
    from monarch_kernel.introspection import deaths_of as deaths_of
    from monarch_kernel.introspection import endpoints_here as endpoints_here
    from monarch_kernel.introspection import home as home
    from monarch_kernel.introspection import hosts_of as hosts_of
    from monarch_kernel.introspection import interrupt_main_thread as interrupt_main_thread
    from monarch_kernel.introspection import keep_failure as keep_failure
    from monarch_kernel.introspection import proc_here as proc_here
    from monarch_kernel.introspection import running_here as running_here
    from monarch_kernel.introspection import whole_of as whole_of
    from monarch_kernel.meshes import KeptHost
    from monarch_kernel.meshes import attach as attach
    from monarch_kernel.meshes import end_kept as end_kept
    from monarch_kernel.meshes import held as held
    from monarch_kernel.meshes import keep as keep
    from monarch_kernel.meshes import kept as kept
    from monarch_kernel.meshes import taken_over as taken_over
    from monarch_kernel.output import RankOutput

NAME: str = "monarch_kernel"
OFFERS = frozenset({"debugpy", "heal", "keep", "sync"})
#: Ranks of this runtime are its own processes.
OF_PROGRAM: bool = False

_joined: JoinController | None = None
#: Callbacks for the meshes and the output of joined jobs, subscribed before the first job is joined.
_joined_changes: Subscribers[[]] = Subscribers("a callback of on_change")
_joined_output: Subscribers[[RankOutput]] = Subscribers("an output subscriber")

_FROM = {
    "actor": ("this_host",),
    "introspection": (
        "actors_here",
        "awaited_by",
        "deaths_of",
        "endpoints_here",
        "home",
        "hosts_of",
        "interrupt_main_thread",
        "keep_failure",
        "proc_here",
        "running_here",
        "whole_of",
    ),
    "meshes": (
        "attach",
        "end_kept",
        "held",
        "keep",
        "kept",
        "taken_over",
    ),
}
_MODULES = {name: f"monarch_kernel.{module}" for module, names in _FROM.items() for name in names}


def actor_here() -> Any:
    """Return the actor that the calling code runs for; outside any actor, the client."""
    from monarch_kernel.actor import context

    return context().actor_instance


def drives(uid: str) -> bool:
    """Return whether a controller has control of this process.

    Every controller that reaches a rank of this runtime has.
    """
    return True


def follow_control(follower: ControlFollower) -> None:
    """Do nothing: control of ranks of this runtime is never handed over."""


def joined_jobs() -> JoinController:
    """Return the joined jobs of this process."""
    global _joined
    if _joined is None:
        from monarch_kernel.engines.join.controller import JoinController

        _joined = JoinController()
        _joined.on_change(_joined_changes.notify)
        _joined.subscribe(_joined_output.notify)
    return _joined


def is_joined(mesh: Any) -> bool:
    """Return whether a mesh is a joined job, whose processes another program started."""
    return _joined is not None and _joined.is_joined(mesh)


def driver_of(mesh: Any, ask: bool = True) -> str:
    """Return which other viewer controls a joined job; "" if this process does, as with all its own meshes."""
    return _joined.driver_of(mesh, ask) if _joined is not None else ""


class _OfBoth(Subscription):
    """One callback for both this runtime and the joined jobs.

    Args:
        own: the subscription to this runtime.
        joined: the subscription to joined jobs.
    """

    __slots__ = ("_joined", "_own")

    def __init__(self, own: Subscription, joined: Subscription) -> None:
        self._own = own
        self._joined = joined
        self.callback = own.callback

    def close(self) -> None:
        """See ``Subscription``."""
        self._own.close()
        self._joined.close()


def list_proc_meshes() -> list[ProcMesh]:
    """Return the proc meshes of this process, oldest first, then joined jobs."""
    from monarch_kernel.meshes import list_proc_meshes as own

    return own() if _joined is None else [*own(), *_joined.list_proc_meshes()]


def get_mesh(name: str) -> ProcMesh:
    """Return the proc mesh, or the joined job, of that name; raise LookupError if there is none."""
    for mesh in _joined.list_proc_meshes() if _joined is not None else ():
        if mesh.name == name:
            return mesh
    from monarch_kernel.meshes import get_mesh as own

    return own(name)


def on_change(callback: Callable[[], None]) -> Subscription:
    """Call back when meshes start or stop, are joined or left, or ranks die."""
    from monarch_kernel.meshes import on_change as own

    return _OfBoth(own(callback), _joined_changes.subscribe(callback))


def subscribe(callback: Callable[[RankOutput], None]) -> Subscription:
    """Call back for all output of ranks. Of joined jobs, only output of cells is included."""
    from monarch_kernel.output import subscribe as own

    return _OfBoth(own(callback), _joined_output.subscribe(callback))


def logs(mesh: ProcMesh, *, ranks: Sequence[int] | None = None, tail: int | None = None) -> Any:
    """Return a ValueMesh of the stored output of each rank."""
    if _joined is not None and _joined.is_joined(mesh):
        return _joined.logs(mesh, ranks=ranks, tail=tail)
    from monarch_kernel.output import logs as own

    return own(mesh, ranks=ranks, tail=tail)


def stacks_from_outside(
    mesh: Any, ranks: Iterable[int], *, native: bool = False, timeout: float = 2.0
) -> dict[int, StackRead]:
    """Read the stacks of ranks without their cooperation."""
    if _joined is not None and _joined.is_joined(mesh):
        return _joined.stacks_from_outside(mesh, ranks, native=native, timeout=timeout)
    from monarch_kernel.introspection import stacks_from_outside as own

    return own(mesh, ranks, native=native, timeout=timeout)


def awaited_here(without: Collection[str] = ()) -> list[Awaited]:
    """Return the unanswered endpoint calls of this process."""
    from monarch_kernel.introspection import awaited_here as own

    return own(without) if _joined is None else [*own(without), *_joined.awaited_here(without)]


def call_in_wait(errand: Callable[[], None]) -> None:
    """Call ``errand()`` in the main thread's wait, for ranks of either kind."""
    from monarch_kernel.introspection import call_in_wait as own

    if _joined is None:
        own(errand)
        return
    left = [errand]

    def once() -> None:
        if left:
            left.pop()()

    own(once)
    _joined.call_in_wait(once)


def kept_host_of(mesh: ProcMesh) -> KeptHost | None:
    """Return the kept host of a mesh; None if the mesh ends with this process, or is a joined job."""
    if is_joined(mesh):
        return None
    from monarch_kernel.meshes import kept_host_of as own

    return own(mesh)


def controller_actor(name: str, cls: type[Any], timeout: float, mesh: Any = None) -> Any:
    """Return the actor of that name in the job's controller, as the ranks of a mesh reach it."""
    if _joined is not None and _joined.is_joined(mesh):
        return _joined.controller_actor(name, cls, timeout)
    from monarch_kernel.actor import get_or_spawn_controller

    return get_or_spawn_controller(name, cls).get(timeout)


def shut_down(timeout: float) -> None:
    """Leave joined jobs, and end the meshes and host agents of this process, if there are any."""
    global _joined
    joined, _joined = _joined, None
    if joined is not None:
        joined.shut_down(timeout)
    from monarch_kernel.actor import shutdown_context

    shutdown_context().get(timeout)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(module), name)
    return found
