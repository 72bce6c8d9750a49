"""Support tools that change the code of live actors: wait for a safe moment, and update the runtime afterwards.

A tool that reloads sources also notifies the tools that show their lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from monarch_kernel.runtime.actor.context import current
from monarch_kernel.runtime.actor.definition import known_specs
from monarch_kernel.runtime.actor.process import started
from monarch_kernel.runtime.actor.system import get_actor_system
from monarch_kernel.subscriptions import Subscribers, Subscription

T = TypeVar("T")


def between_messages(function: Callable[[], T], wait: float = 5.0) -> T:
    """Run a function while no actor of this process handles a message. New messages wait for it.

    It does not wait for tools on separate threads (a debugger), the calling actor, or threads that programs start.

    Args:
        function: must not wait for an actor of this process.
        wait: the time limit until all actors are idle (seconds). Messages are held for a fraction of a second at a
            time, because an endpoint may wait for another actor of this process.

    Raises:
        StillBusy: actors were handling messages all the time; the message names what runs, as ``actor.endpoint``.
    """
    if not started():
        return function()
    system = get_actor_system()
    here = current.get()
    caller = here.actor_instance if here is not None else None

    def busy() -> list[str]:
        others = [each for each in list(system.actors.values()) if each is not caller and not each.spec.background]
        return [f"{each.name}.{each.running or '…'}" for each in others if each.handling]

    return system.gate.between(function, busy, wait)


def actor_class_changed(cls: type) -> None:
    """Update callers and live actors of a class after its definition was changed in place.

    Call it between messages. Existing handles of endpoints that still exist check arguments by the new definition.

    Raises:
        ValueError: the class is no longer valid, or its endpoints have become async or sync. Nothing is changed then.
    """
    specs = known_specs(cls)
    for spec in specs:
        spec.reread()
    if specs and started():
        for instance in list(get_actor_system().actors.values()):
            if instance.spec in specs:
                instance.bind_endpoints()


_changed: Subscribers[[Collection[str]]] = Subscribers("a callback on changed sources")


def on_sources_changed(callback: Callable[[Collection[str]], object]) -> Subscription:
    """Call ``callback(paths)``, with paths of this controller, after ranks have loaded new versions of sources."""
    return _changed.subscribe(callback)


def sources_changed(paths: Collection[str]) -> None:
    """Report that ranks run new versions of these sources (paths of this controller) from now on."""
    _changed.notify(paths)
