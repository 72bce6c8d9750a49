"""This package's own runtime as the engine of the tools. A name is loaded when a tool first uses it.

Its attributes are the functions of the façades themselves, so nothing lies between a tool and the runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.actor import this_host as this_host
    from monarch_kernel.introspection import actors_here as actors_here
    from monarch_kernel.introspection import awaited_by as awaited_by
    from monarch_kernel.introspection import awaited_here as awaited_here
    from monarch_kernel.introspection import call_in_wait as call_in_wait
    from monarch_kernel.introspection import deaths_of as deaths_of
    from monarch_kernel.introspection import endpoints_here as endpoints_here
    from monarch_kernel.introspection import home as home
    from monarch_kernel.introspection import hosts_of as hosts_of
    from monarch_kernel.introspection import interrupt_main_thread as interrupt_main_thread
    from monarch_kernel.introspection import keep_failure as keep_failure
    from monarch_kernel.introspection import proc_here as proc_here
    from monarch_kernel.introspection import running_here as running_here
    from monarch_kernel.introspection import stacks_from_outside as stacks_from_outside
    from monarch_kernel.introspection import whole_of as whole_of
    from monarch_kernel.meshes import attach as attach
    from monarch_kernel.meshes import end_kept as end_kept
    from monarch_kernel.meshes import get_mesh as get_mesh
    from monarch_kernel.meshes import held as held
    from monarch_kernel.meshes import keep as keep
    from monarch_kernel.meshes import kept as kept
    from monarch_kernel.meshes import kept_host_of as kept_host_of
    from monarch_kernel.meshes import list_proc_meshes as list_proc_meshes
    from monarch_kernel.meshes import on_change as on_change
    from monarch_kernel.meshes import taken_over as taken_over
    from monarch_kernel.output import logs as logs
    from monarch_kernel.output import subscribe as subscribe

NAME: str = "monarch_kernel"
OFFERS = frozenset({"debugpy", "heal", "keep", "sync"})

_FROM = {
    "actor": ("this_host",),
    "introspection": (
        "actors_here",
        "awaited_by",
        "awaited_here",
        "call_in_wait",
        "deaths_of",
        "endpoints_here",
        "home",
        "hosts_of",
        "interrupt_main_thread",
        "keep_failure",
        "proc_here",
        "running_here",
        "stacks_from_outside",
        "whole_of",
    ),
    "meshes": (
        "attach",
        "end_kept",
        "get_mesh",
        "held",
        "keep",
        "kept",
        "kept_host_of",
        "list_proc_meshes",
        "on_change",
        "taken_over",
    ),
    "output": ("logs", "subscribe"),
}
_MODULES = {name: f"monarch_kernel.{module}" for module, names in _FROM.items() for name in names}


def actor_here() -> Any:
    """The actor for which the calling code runs; outside any actor, the client."""
    from monarch_kernel.actor import context

    return context().actor_instance


def controller_actor(name: str, cls: type[Any], timeout: float) -> Any:
    """The actor of that name in the job's controller."""
    from monarch_kernel.actor import get_or_spawn_controller

    return get_or_spawn_controller(name, cls).get(timeout)


def shut_down(timeout: float) -> None:
    """End the meshes and host agents of this process, if there are any."""
    from monarch_kernel.actor import shutdown_context

    shutdown_context().get(timeout)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(module), name)
    return found
