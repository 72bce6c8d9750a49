"""Job-wide singletons: actors that exist once, in the controller, whoever asks first."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from monarch_kernel.protocol.messages import ProcRef
from monarch_kernel.runtime.actor.base import Actor, endpoint, spec_of
from monarch_kernel.runtime.actor.meshes import _NO_EXTENT, RESERVED, ActorMesh
from monarch_kernel.runtime.actor.system import get_system
from monarch_kernel.runtime.mesh.shape import Region
from monarch_kernel.runtime.node.future import Future

T = TypeVar("T")

_DIRECTORY = "controllers"


class _Directory(Actor):
    """Lives in the controller; makes each named singleton once."""

    def __init__(self) -> None:
        self._made: dict[str, ActorMesh[Any]] = {}

    @endpoint
    def get(self, name: str, cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorMesh[Any]:
        mesh = self._made.get(name)
        if mesh is None:
            mesh = get_system().this_proc().spawn(name, cls, *args, **kwargs)
            mesh.initialized.get()
            self._made[name] = mesh
        return mesh


def get_or_spawn_controller(name: str, cls: type[T], *args: Any, **kwargs: Any) -> Future[ActorMesh[T]]:
    """The actor called ``name`` in the controller, made by the first who asks, from any process of the job.

    Raises (from ``get``/``await``):
        ActorError: its ``__init__`` raised.
    """
    spec_of(cls, RESERVED)
    return _directory().get.call_one(name, cls, args, kwargs)


_lock = threading.Lock()


def _directory() -> Any:
    system = get_system()
    root: ProcRef = system.root
    if system.is_root:
        with _lock:
            if _DIRECTORY not in system.actors:
                start_directory()
    system.node.learn(root)
    return ActorMesh(system, _DIRECTORY, _DIRECTORY, "this_proc()", _Directory, (root,), Region.from_extent(_NO_EXTENT))


def start_directory() -> None:
    """Make the directory in this process, which is the controller."""
    system = get_system()
    system.start_local_actor(_DIRECTORY, _DIRECTORY, _Directory)
