"""Hold the actor system of this process for the modules below it.

``system.ActorSystem`` is built from actors, ports, meshes and healing, and each of these needs the system of its
process. They all import this module, and name the class ``System``; only this module holds the object. It does not know
how to create one: ``system`` registers a factory when it is imported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from monarch_kernel.runtime.node.poller import FORKED

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.calls.target import Target
    from monarch_kernel.runtime.actor.system import ActorSystem as System
    from monarch_kernel.runtime.node.future import Future


if not TYPE_CHECKING:
    System = Any  # the class is in a module above this one


class SpawnedMesh(Protocol):
    """The part of a spawned mesh of procs or actors that its actor uses."""

    def _target(self) -> Target: ...
    def _stop(self, reason: str) -> Future[object]: ...


_system: System | None = None
_make_controller: Callable[[], System] | None = None
#: The id of the actor that creates the singletons of a job, in its controller.
CONTROLLERS = "controllers"
#: Held while the system of this process is created or ended.
lock = threading.RLock()


def get_system() -> System:
    """Return this process's system; a process that has none becomes a controller.

    Raises:
        RuntimeError: the runtime is not loaded, or this process is a fork of a process that has a system.
    """
    system = _system
    if system is not None:
        if system.pid == os.getpid():
            return system
        raise RuntimeError(FORKED)
    return _become_controller()


def current_system() -> System | None:
    """Return this process's system, or the system of the process it was forked from; None if there is none."""
    return _system


def started() -> bool:
    """Return whether this process has a running system."""
    return _system is not None and not _system._closed


def set_system(system: System | None) -> None:
    """Install the system of this process. A rank does this when it starts."""
    global _system
    _system = system


def set_controller_factory(make: Callable[[], System]) -> None:
    """Register ``make()``, which creates the system of a new controller; ``system`` calls this when it is imported."""
    global _make_controller
    _make_controller = make


def _become_controller() -> System:
    global _system
    with lock:
        if _system is None:
            if _make_controller is None:
                raise RuntimeError("this process has not loaded the actor runtime: import monarch_kernel.actor first")
            _system = _make_controller()
        return _system
