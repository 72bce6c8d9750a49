"""The actor that brings tools into a rank of Monarch, and information about Monarch's own actors for them."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import monarch  # pyright: ignore[reportMissingImports]  # torchmonarch is not among our dependencies
import monarch.actor as monarch_actor  # pyright: ignore[reportMissingImports]  # torchmonarch is not among our dependencies

from monarch_kernel import programs
from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.hosted.attached_process import AttachedProcess
from monarch_kernel.engines.interface import InterruptedEndpoint
from monarch_kernel.introspection import Running
from monarch_kernel.thread_frames import current_frames, raise_in_thread

NAME = "torchmonarch"
_MONARCH = os.path.join(os.path.dirname(os.path.abspath(monarch.__file__ or "")), "")
_PYTHON = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
_OURS = os.path.join(programs.PACKAGE, "")

_guest: AttachedProcess | None = None
_lock = threading.Lock()


class MonarchActors:
    """Monarch's own actors in this process (``attached_process.ProgramActors``), found by frames of threads."""

    def endpoints_here(self) -> list[Running]:
        """Return the outermost frames of Monarch's threads in user code: each is an endpoint."""
        found: list[Running] = []
        drivers = {thread.ident for thread in threading.enumerate() if thread.name.startswith("monarch-actor")}
        for thread, top in current_frames().items():
            if thread not in drivers:
                continue
            endpoint = _endpoint(top)
            if endpoint is not None:
                found.append(Running(_actor_name(endpoint), endpoint.f_code.co_name, thread))
        return found

    def actors_here(self) -> dict[str, object]:
        """Return the actors in these frames, by class: Monarch does not name the objects of its actors."""
        found: dict[str, object] = {}
        for each in gc.get_objects():
            if isinstance(each, monarch_actor.Actor) and not type(each).__module__.startswith(("monarch.", __name__)):
                label = type(each).__name__
                found[f"{label}-{len(found)}"] = each
        return found

    def interrupt(self, endpoint: Running) -> None:
        """Raise `InterruptedEndpoint` in an endpoint, at its next line of Python."""
        raise_in_thread(endpoint.thread, InterruptedEndpoint)


def _endpoint(top: FrameType | None) -> FrameType | None:
    outermost = None
    frame = top
    while frame is not None:
        if _is_of_program(frame):
            outermost = frame
        frame = frame.f_back
    return outermost


def _is_of_program(frame: FrameType) -> bool:
    """Return whether a frame belongs to neither Monarch, Python nor this package."""
    file = frame.f_code.co_filename
    of_python = file.startswith("<frozen") or (file.startswith(_PYTHON) and "-packages" not in file)
    return not of_python and not file.startswith((_MONARCH, _OURS))


def _actor_name(frame: FrameType) -> str:
    me = frame.f_locals.get("self")
    return type(me).__name__ if isinstance(me, monarch_actor.Actor) else ""


def attached_process() -> AttachedProcess:
    """Return the tools in this process."""
    global _guest
    with _lock:
        if _guest is None:
            _guest = AttachedProcess(NAME, MonarchActors())
            _keep_failures(_guest)
        return _guest


def _keep_failures(tools: AttachedProcess) -> None:
    """Keep the frames of exceptions that end endpoints and constructors of Monarch's actors, for post-mortem debugging.

    Monarch reports each exception as an ``ActorError``, which it creates in the rank while the exception has its
    traceback.
    """
    make = monarch_actor.ActorError.__init__

    @functools.wraps(make)
    def init(report: object, exception: Any, *args: object, **kwargs: object) -> None:
        with suppress(Exception):  # a report is never lost
            endpoint = _raised_in(exception)
            if endpoint is not None:
                tools.keep_failure(exception, "", (_actor_name(endpoint), endpoint.f_code.co_name))
        make(report, exception, *args, **kwargs)

    monarch_actor.ActorError.__init__ = init


def _raised_in(error: BaseException) -> FrameType | None:
    """Return the endpoint or constructor that an exception has ended; None for a user's interrupt, or other code."""
    traceback = error.__traceback__
    while traceback is not None and not isinstance(error, InterruptedEndpoint):
        if _is_of_program(traceback.tb_frame):
            return traceback.tb_frame if _actor_name(traceback.tb_frame) else None
        traceback = traceback.tb_next
    return None


class ToolListener(monarch_actor.Actor):  # pyright: ignore[reportUntypedBaseClass]  # as above
    """Carries messages between the tools in this rank and those of one controller.

    Args:
        port: takes bytes to the controller.
        first: the controller's first message.
    """

    def __init__(self, port: object, first: bytes) -> None:
        message = wire.decode(first)
        assert isinstance(message, wire.EnterRank)
        rank: int = monarch_actor.context().actor_instance.rank.rank
        self._guest = attached_process()
        self._controller = message.controller
        self._guest.enter(message, rank, _sender(port, message.uid, rank))

    @monarch_actor.endpoint
    def deliver(self, data: bytes) -> None:
        """Pass a message to the tools. Never raises: an exception would end this actor."""
        with suppress(Exception):
            self._guest.receive(self._controller, data)

    def _handle_undeliverable_message(self, _envelope: object) -> bool:
        """Ignore messages to a controller that is gone. Its missing heartbeats end what it had stopped."""
        return True


def _sender(port: Any, uid: str, rank: int) -> Callable[[bytes], None]:
    def send(data: bytes) -> None:
        with suppress(Exception):  # the controller is gone
            port.send((uid, rank, data))

    return send
