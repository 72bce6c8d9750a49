"""Inspect the activity of this process: its actors, running endpoints, awaited calls and failures.

``call_in_wait`` runs a function on the main thread while that waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from monarch_kernel.runtime.actor.calls.pending import ManyCall, OneCall, StreamCall
from monarch_kernel.runtime.actor.calls.target import Target
from monarch_kernel.runtime.actor.context import calling_origin, current
from monarch_kernel.runtime.actor.definition import known_specs
from monarch_kernel.runtime.actor.execution import postmortem
from monarch_kernel.runtime.actor.execution.instance import ActorInstance
from monarch_kernel.runtime.actor.process import get_system, started
from monarch_kernel.runtime.actor.system import get_actor_system
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.subscriptions import Subscribers, Subscription
from monarch_kernel.thread_frames import current_frames

# Support tools that change the code of live actors: wait for a safe moment, and update the runtime afterwards.
#
# A tool that reloads sources also notifies the tools that show their lines.

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


class Running(NamedTuple):
    """An endpoint that runs in this process, or the main thread of a program without actors.

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
    """Return the endpoints that run in this process now."""
    if not started():
        return []
    found: list[Running] = []
    for instance in list(get_actor_system().actors.values()):
        found += _running(instance)
    return found


def _running(instance: ActorInstance) -> list[Running]:
    name, thread, tool = instance.name, instance._thread, instance._spec.tool
    # Concurrent endpoints of an async actor run as tasks beside the task that takes its messages.
    tasks: dict[object, str] = dict(getattr(instance, "_tasks", ()))
    found = [Running(name, endpoint, thread, task, tool) for task, endpoint in tasks.items()]
    endpoint = instance.running
    if endpoint is not None:
        found.append(
            Running(name, endpoint, thread, getattr(instance, "_running_task", None), tool, instance.running_for)
        )
    return found


def interrupt_main_thread() -> None:
    """Raise KeyboardInterrupt in the endpoint on the main thread of this process, even if it waits or sleeps.

    A plain signal may arrive just before the thread enters a system call, and then does not end that call.
    """
    get_actor_system().signal_main_thread()


def running_here() -> tuple[str, str, str]:
    """Return the actor, endpoint and cell that the calling thread or task runs for; "" if there is none."""
    here = current.get()
    if here is None:
        return "", "", calling_origin()
    return here.actor_instance.name, here._endpoint, calling_origin()


def repeats_here() -> bool:
    """Return whether the endpoint on the calling thread was also the actor's previous one, as in a caller's loop."""
    here = current.get()
    instance = here.actor_instance if here is not None else None
    return here is not None and isinstance(instance, ActorInstance) and instance.calls > here._since + 1


def actors_here(actor: str = "") -> dict[str, Any]:
    """Return the objects of the actors of this process by the unique name of their mesh; optionally of one mesh only.

    There is no lock: the actors' own threads continue to use the objects.
    """
    found = get_system().actors.items()
    return {uid: instance.object for uid, instance in found if actor in ("", uid)}


_GET = Future.get.__code__


@dataclass(frozen=True, slots=True)
class Awaited:
    """A call that a thread waits for.

    Attributes:
        what: the called endpoint, such as `workers.step`.
        procs: the ids of the procs that have not answered.
        number: the number of the call in this process.
        asked: the ids of all procs that were called.
        waiters: the number of threads in its `get()`, plus its callbacks and waiting tasks.
        tool: whether the called actor belongs to a tool, such as the kernel itself.
    """

    what: str
    procs: tuple[str, ...]
    number: int
    asked: tuple[str, ...] = ()
    waiters: int = 0
    tool: bool = False


def awaited_by(frames: Iterable[FrameType]) -> Awaited | None:
    """Return the call that a thread with these frames waits for; None if it does not wait for a call."""
    for frame in frames:
        if frame.f_code is _GET:
            call = frame.f_locals.get("self")
            if isinstance(call, ManyCall):
                ranks = call.unanswered()
            elif isinstance(call, OneCall):
                ranks = [call._rank]
            else:
                return None
            return Awaited(call.what, _procs(call._target, ranks), call._number)
    return None


def awaited_here(without: Collection[str] = ()) -> list[Awaited]:
    """Return the unanswered endpoint calls of this process.

    Args:
        without: actors, by the unique names of their meshes, whose calls are omitted.
    """
    found: list[Awaited] = []
    getting: Counter[int] | None = None
    for call in list(get_system().node.calls.values()) if started() else []:
        futures: Sequence[Future[object]]
        if isinstance(call, OneCall):
            asked, ranks, futures = [call._rank], [call._rank], [call]
        elif isinstance(call, ManyCall | StreamCall) and call.asked is not None:
            asked, ranks = range(len(call._target.procs)), call.unanswered()
            futures = [call] if isinstance(call, ManyCall) else call._slots
        else:
            continue
        target = call._target
        if target.actor in without:
            continue
        if getting is None:
            getting = Counter(_futures_in_get())
        waiters = sum(len(future._callbacks or ()) + getting[id(future)] for future in futures)
        found.append(
            Awaited(call.what, _procs(target, ranks), call._number, _procs(target, asked), waiters, target.of_tool)
        )
    return found


def _procs(target: Target, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(target.procs[rank].id for rank in ranks))


def _futures_in_get() -> Iterator[int]:
    """Return the identities of the futures whose `get()` is running on a thread of this process."""
    for frame in current_frames().values():
        here: FrameType | None = frame
        while here is not None:
            if here.f_code is _GET:
                yield id(here.f_locals.get("self"))
            here = here.f_back


def proc_here() -> str:
    """Return the id of this process among the procs; "" before the runtime has started."""
    return get_system().node.id if started() else ""


def keep_failure(
    error: BaseException,
    cell: str,
    running: tuple[str, str] | None = None,
    later: Callable[[float, Callable[[], None]], object] | None = None,
) -> None:
    """Keep an exception of user code that a tool's endpoint caught, as if the endpoint itself had failed.

    Args:
        cell: the cell that it ran for.
        running: the actor and the endpoint, if another engine runs them.
        later: calls a function after a delay in seconds, for processes without an actor system of this package.
    """
    name, endpoint = running or running_here()[:2]
    postmortem.failed(error, name, endpoint, cell, later or get_system().node.poller.call_later)


def on_failure(callback: Callable[[BaseException], None] | None) -> Subscription | None:
    """Call ``callback(error)`` on the thread where an endpoint or a cell fails, before any other report of the failure.

    Returns:
        The subscription; close (or call) it to unsubscribe. ``on_failure(None)`` ends all subscriptions.
    """
    if callback is None:
        postmortem.failed_here.clear()
        return None
    return postmortem.failed_here.subscribe(callback)


failures = postmortem.failures


def latest_failure() -> postmortem.Failure | None:
    """Return the failure that ended the last endpoint or cell here.

    None if its actor has begun another endpoint since.
    """
    kept = postmortem.failures()
    if not kept:
        return None
    last = kept[-1]
    actors = list(get_system().actors.values()) if last.begun >= 0 and started() else []
    superseded = any(each.name == last.actor and getattr(each, "calls", 0) > last.begun for each in actors)
    return None if superseded else last


def call_in_wait(errand: Callable[[], None]) -> None:
    """Call ``errand()`` on the main thread of this process while it waits for ranks: now, or in its next wait.

    The errand may wait itself. An exception in it ends the wait.
    """
    get_system().node.poller.call_in_wait(errand)
