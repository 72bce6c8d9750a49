"""For tools that change the code of live actors: when it is safe, and what the runtime has to look up again.

A tool that reloads sources reports this to the tools that show lines of them.
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
    """Run a function while no actor of this process handles a message; new messages wait for it.

    Not waited for are tools on threads of their own (a debugger), the calling actor, and threads that programs start.

    Args:
        function: must not wait for an actor of this process.
        wait: how long to wait until all actors are idle (seconds). Messages are held for a fraction of a second at a
            time, as an endpoint may wait for another actor of this process.

    Raises:
        StillBusy: an actor handled messages all the time; the message names what runs, as ``actor.endpoint``.
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
    """Make callers and live actors of a class follow its definition, which has changed in place.

    Call it between messages. Handles that callers have of endpoints that still exist check arguments as the new
    definition says.

    Raises:
        ValueError: the class is not valid any more, or its endpoints have become async or sync; nothing has changed.
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
    """Tell that ranks run new versions of these sources (paths of this controller) from now on."""
    _changed.notify(paths)
