"""Job-wide singletons: actors that exist once, in the controller, whichever process requests them first."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_kernel.protocol.messages import ProcRef
from monarch_kernel.runtime.actor.definition import Actor, concurrent_endpoint, spec_of
from monarch_kernel.runtime.actor.errors import MeshFailure
from monarch_kernel.runtime.actor.meshes.actor_mesh import RESERVED, ActorMesh
from monarch_kernel.runtime.actor.mocks import stand_in
from monarch_kernel.runtime.actor.process import CONTROLLERS, get_system
from monarch_kernel.runtime.mesh.shape import SINGLE
from monarch_kernel.runtime.node.future import Future

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class _Directory(Actor):
    """Creates each named singleton once, in the controller.

    Its endpoint is concurrent, because the ``__init__`` of one singleton may request another.
    """

    def __init__(self) -> None:
        self._made: dict[str, asyncio.Task[ActorMesh[object]]] = {}
        self._holders: dict[str, set[str]] = {}  # by name: procs that have received it
        self._failed: dict[str, MeshFailure] = {}
        self._untold: dict[tuple[str, str], str] = {}  # by name and proc with a reference to it: how it died

    @concurrent_endpoint
    async def get(
        self, name: str, cls: type[object], args: tuple[object, ...], kwargs: dict[str, object], asker: str
    ) -> ActorMesh[Any]:
        import asyncio

        self._forget_dead(name)
        died = self._untold.pop((name, asker), None)
        if died is not None:
            raise ValueError(
                f"Failure on {name}: {died}\n"
                f"  Its state is lost. The next get_or_spawn_controller({name!r}, ...) of this process makes another."
            )
        making = self._made.get(name)
        if making is None:
            making = self._made[name] = asyncio.create_task(self._make(name, cls, args, kwargs))
        try:
            mesh = await asyncio.shield(making)
        except Exception:
            if self._made.get(name) is making:  # the next request may try again
                del self._made[name]
            raise
        self._holders.setdefault(name, set()).add(asker)
        return mesh

    def _forget_dead(self, name: str) -> None:
        """Remove an actor of this name that has ended. Each proc with a reference to a failed one is notified once."""
        made = self._made.get(name)
        if made is None or not made.done() or made.cancelled() or made.exception() is not None:
            return
        death = get_system().ended.get(made.result()._actor)
        if death is None:
            return
        failure = self._failed.pop(name, None)
        holders = self._holders.pop(name, set())
        if not death.kind.intended:
            text = failure.report() if failure is not None else death.cause
            self._untold.update(((name, holder), text) for holder in holders)
        del self._made[name]

    async def _make(
        self, name: str, cls: type[object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> ActorMesh[object]:
        return await get_system().this_proc().spawn(name, cls, *args, **kwargs)

    async def __supervise__(self, failure: MeshFailure) -> bool:
        # A singleton belongs to the whole job: its failure is reported at the root, and does not end other singletons.
        made = self._made.get(failure.mesh)
        if made is not None and made.done() and made.exception() is None:
            self._failed[failure.mesh] = failure
        get_system().fault_at_root(failure)
        return True


def get_or_spawn_controller(name: str, cls: type[T], *args: object, **kwargs: object) -> Future[ActorMesh[T]]:
    """Return the actor called ``name`` in the controller. The first request from any process of the job creates it.

    Raises (from ``get``/``await``):
        ActorError: its ``__init__`` raised (a later request retries), or it has failed since this process got it; the
            next request creates another. An actor that was stopped is recreated at once.
    """
    cls = stand_in(cls)
    spec_of(cls, RESERVED)
    return _directory().get.call_one(name, cls, args, kwargs, get_system().node.id)


_lock = threading.Lock()


def _directory() -> Any:
    system = get_system()
    root: ProcRef = system.root
    if system.is_root:
        with _lock:
            if CONTROLLERS not in system.actors:
                start_directory()
    system.node.learn(root)
    return ActorMesh(system, CONTROLLERS, CONTROLLERS, "this_proc()", _Directory, (root,), SINGLE.region)


def start_directory() -> None:
    """Start the directory in this process, which is the controller."""
    system = get_system()
    system.start_local_actor(CONTROLLERS, CONTROLLERS, _Directory)
