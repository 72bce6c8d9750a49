"""`ActorMesh`: an array of actors, whose endpoints are its attributes."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch_kernel.protocol.messages import (
    ProcRef,
    StopActor,
)
from monarch_kernel.protocol.serialize import dumps_flat, loads
from monarch_kernel.runtime.actor.calls.endpoint import Endpoint, PlainMethod
from monarch_kernel.runtime.actor.calls.pending import ManyCall, send_to_all
from monarch_kernel.runtime.actor.calls.target import Target
from monarch_kernel.runtime.actor.definition import ActorSpec, class_label, spec_of
from monarch_kernel.runtime.actor.error_text import Called
from monarch_kernel.runtime.actor.healing.healed import Healable
from monarch_kernel.runtime.actor.meshes.tool_methods import view_method
from monarch_kernel.runtime.actor.process import System, get_system
from monarch_kernel.runtime.actor.wire_types import MessageLink
from monarch_kernel.runtime.mesh.shape import Extent, MeshTrait, Region
from monarch_kernel.runtime.node.future import Future

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh


T_co = TypeVar("T_co", covariant=True)


class ActorMesh(Healable, MeshTrait, Generic[T_co]):
    """A mesh of actors of one class. Its endpoints are attributes: ``mesh.method.call(...)``.

    Created by ``ProcMesh.spawn``. It can be pickled, and used in any process that receives it.
    """

    def __init__(
        self,
        system: System,
        actor: str,
        name: str,
        mesh_name: str,
        cls: type | bytes,
        procs: tuple[ProcRef, ...],
        region: Region,
        ready: Future[None] | None = None,
        spawned: Extent | None = None,
    ) -> None:
        """``spawned`` is the extent of the mesh as spawned, if ``region`` is a slice of it."""
        self._system = system
        self._actor = actor
        self._name = name
        self._mesh_name = mesh_name
        self._cls_or_pickle = cls
        self._procs = procs
        self._shape = region
        self._ready = ready
        self._spawned = region.extent if spawned is None else spawned
        self._spawned_on: ProcMesh | None = None  # the proc mesh; None: another process spawned this
        self._cached: Target | None = None
        self._cached_at = 0  # the node's generation at that time

    # -- the class ------------------------------------------------------------------------------

    @property
    def _cls(self) -> type:
        if isinstance(self._cls_or_pickle, bytes):
            self._cls_or_pickle = loads(self._cls_or_pickle)
        assert isinstance(self._cls_or_pickle, type)
        return self._cls_or_pickle

    def _class_label(self) -> str:
        """Return the name of the class in errors; "" if the class cannot be loaded here."""
        try:
            return class_label(self._cls)
        except Exception:  # unpickling runs user code
            return ""

    @property
    def _spec(self) -> ActorSpec:
        return spec_of(self._cls, RESERVED)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name.startswith("_") and name in _FIELDS:
            raise AttributeError(name)
        spec = self._spec
        endpoint = spec.endpoints.get(name)
        if endpoint is not None:
            handle = Endpoint(self, name, endpoint)
            self.__dict__[name] = handle  # further lookups do not call this function
            return handle
        if callable(getattr(spec.cls, name, None)):
            return PlainMethod(self, name)
        if (view := view_method(self, name)) is not None:
            return view
        known = ", ".join(sorted(spec.endpoints)) or "none"
        raise AttributeError(f"{spec.cls.__name__} has no endpoint {name!r} (its endpoints: {known})")

    # -- shape ----------------------------------------------------------------------------------

    @property
    def _region(self) -> Region:
        return self._shape

    def _new_with_region(self, region: Region) -> ActorMesh[T_co]:
        mesh: ActorMesh[T_co] = type(self)(
            self._system,
            self._actor,
            self._name,
            self._mesh_name,
            self._cls_or_pickle,
            self._procs,
            region,
            self._ready,
            self._spawned,
        )
        mesh._spawned_on = self._spawned_on
        return mesh

    @property
    def _proc_mesh(self) -> ProcMesh:
        """The proc mesh that the whole mesh was spawned on. Programs written for Monarch use it."""
        if self._spawned_on is None:
            extent = self._shape.extent
            if extent.nelements != len(self._procs):
                extent = Extent(("procs",), (len(self._procs),))
            self._spawned_on = self._system.proc_mesh_of(self._mesh_name, self._procs, extent)
        return self._spawned_on

    @_proc_mesh.setter
    def _proc_mesh(self, mesh: ProcMesh) -> None:
        self._spawned_on = mesh  # programs set it, too

    def _called(self) -> Called:
        ranks = self._shape.ranks()
        if ranks == tuple(range(len(self._procs))):
            return Called(self._shape.extent)
        return Called(self._spawned, ranks)

    def _target(self) -> Target:
        node = self._system.node
        if self._cached is None or self._cached_at != node.generation:
            self._cached_at = node.generation
            procs = tuple(node.current(self._procs[rank]) for rank in self._shape.ranks())
            if self._cached is None or procs != self._cached.procs:
                self._cached = Target(self._name, self._actor, self._shape.extent, procs, self._system.reported, self)
        return self._cached

    def _reach(self, ref: ProcRef) -> MessageLink | None:
        """Return a link to one of the mesh's procs, opened if necessary; None if the proc is dead."""
        self._system.node.learn(ref)
        return self._system.node.link_to(ref.id)

    # -- life -----------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[None]:
        """A future that is done when every actor's ``__init__`` has returned. It raises if one of them failed."""
        if self._ready is None:
            raise RuntimeError(
                f"{self!r} came from another process: only the handle that spawn returned knows when it is ready"
            )
        return self._ready

    def stop(self, reason: str = "stopped by its owner") -> Future[None]:
        """Stop all actors of the mesh after their current message: first their owned meshes, then ``__cleanup__``."""
        return self._stop(reason)

    def _stop(self, reason: str) -> Future[Any]:
        if len(self._shape.ranks()) == len(self._procs):
            self._system.tree.stopped(self._actor)
            self._system.healer.forget(self._actor)
        node = self._system.node
        target = self._target()
        call = ManyCall(node, f"{self._name}.stop", target)
        send_to_all(self._system, target, StopActor(self._actor, call._number, 0, reason), sink=call)
        # An actor that has already died counts as stopped.
        return settled(call)

    def __await__(self) -> Generator[Any, None, ActorMesh[T_co]]:
        yield from self.initialized.__await__()
        return self

    def __reduce__(self) -> Any:
        cls = self._cls_or_pickle
        if not isinstance(cls, bytes):
            cls = self.__dict__.get("_pickled_cls") or dumps_flat(cls)
            self.__dict__["_pickled_cls"] = cls
        return (
            _rebuild_actor_mesh,
            (
                self._actor,
                self._name,
                self._mesh_name,
                cls,
                tuple(map(self._system.node.current, self._procs)),
                self._shape,
                None if self._shape.extent == self._spawned else self._spawned,
            ),
        )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v}" for k, v in self.sizes.items())
        return f"<ActorMesh {self._name} ({sizes or 'one actor'})>"


_FIELDS = frozenset(
    {
        *("_cls_or_pickle", "_system", "_actor", "_name", "_mesh_name"),
        *("_procs", "_shape", "_ready", "_spawned", "_spawned_on", "_cached", "_cached_at"),
    }
)


def _rebuild_actor_mesh(
    actor: str,
    name: str,
    mesh_name: str,
    cls: bytes,
    procs: tuple[ProcRef, ...],
    region: Region,
    spawned: Extent | None = None,
) -> ActorMesh[object]:
    return ActorMesh(get_system(), actor, name, mesh_name, cls, procs, region, None, spawned)


def settled(call: Future[object]) -> Future[Any]:
    """Return a future that is done when the call ends, with or without an error."""
    done: Future[object] = Future(call._poller, call.what)
    call.add_done_callback(lambda _c: done._resolve(None))
    return done


#: Names that an endpoint cannot have, because every actor mesh has an attribute with that name.
RESERVED = frozenset(name for name in dir(ActorMesh) if not name.startswith("_"))
