"""The activity of this process: its actors, the running endpoints, and the endpoint that the calling code runs for."""

from __future__ import annotations

from typing import Any, NamedTuple

from monarch_kernel.runtime.actor.context import calling_origin, current
from monarch_kernel.runtime.actor.execution.instance import ActorInstance
from monarch_kernel.runtime.actor.process import get_system, started
from monarch_kernel.runtime.actor.system import get_actor_system


class Running(NamedTuple):
    """An endpoint that runs in this process, or the main thread of a program that has none.

    Attributes:
        actor: the name that the actor was spawned under; "" for a program without actors.
        endpoint: its name; `__init__` while the actor is being created.
        thread: the identifier of the actor's thread.
        task: the asyncio task that runs it, for an async actor.
        tool: whether the actor belongs to a tool, so that user code is the code that it calls.
        cell: the notebook cell that it runs for; "" if unknown (concurrent endpoints).
    """

    actor: str
    endpoint: str
    thread: int
    task: Any = None
    tool: bool = False
    cell: str = ""

    @property
    def label(self) -> str:
        """What runs, for users: `actor.endpoint`."""
        return f"{self.actor}.{self.endpoint}" if self.actor else self.endpoint


def endpoints_here() -> list[Running]:
    """The endpoints that run in this process now."""
    if not started():
        return []
    found: list[Running] = []
    for instance in list(get_actor_system().actors.values()):
        found += _running(instance)
    return found


def _running(instance: ActorInstance) -> list[Running]:
    name, thread, tool = instance.name, instance._thread, instance._spec.tool
    # Concurrent endpoints of an async actor run as tasks beside the task that takes its messages.
    tasks: dict[Any, str] = dict(getattr(instance, "_tasks", ()))
    found = [Running(name, endpoint, thread, task, tool) for task, endpoint in tasks.items()]
    endpoint = instance.running
    if endpoint is not None:
        found.append(
            Running(name, endpoint, thread, getattr(instance, "_running_task", None), tool, instance.running_for)
        )
    return found


def interrupt_main_thread() -> None:
    """Raise KeyboardInterrupt in the endpoint on the main thread of this process, even if that waits or sleeps.

    A plain signal may come just before the thread enters a system call, and then does not end that call.
    """
    get_actor_system().signal_main_thread()


def running_here() -> tuple[str, str, str]:
    """The actor, endpoint and cell that the calling thread or task runs for; "" where there is none."""
    here = current.get()
    if here is None:
        return "", "", calling_origin()
    return here.actor_instance.name, here._endpoint, calling_origin()


def repeats_here() -> bool:
    """Whether the endpoint that the calling thread runs was the latest before, too, as in a loop of its caller."""
    here = current.get()
    instance = here.actor_instance if here is not None else None
    return here is not None and isinstance(instance, ActorInstance) and instance.calls > here._since + 1


def actors_here(actor: str = "") -> dict[str, Any]:
    """The objects of the actors of this process, by the unique name of their mesh; optionally of one mesh only.

    Nothing is locked: the actors' own threads keep using them.
    """
    found = get_system().actors.items()
    return {uid: instance.object for uid, instance in found if actor in ("", uid)}
