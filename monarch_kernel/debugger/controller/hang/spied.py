"""Determine what the threads of a process are doing from frames that were read from outside. Pure."""

from __future__ import annotations

from monarch_kernel.debugger.controller.stacks.pyspy import SpiedFrame, SpiedThread
from monarch_kernel.debugger.rank.hang.flight import C10D
from monarch_kernel.debugger.source_locations import SourceLocation, is_user, kind_of


def user_location(thread: SpiedThread) -> SourceLocation | None:
    """The innermost line of user code of a thread."""
    return next((location_of_spied(frame) for frame in thread.get("frames", ()) if is_user_spied(frame)), None)


def in_collective(thread: SpiedThread) -> bool:
    """Whether a thread is in a call of `torch.distributed`."""
    return any(file_of(frame).endswith(C10D) for frame in thread.get("frames", ()))


def is_native(frame: SpiedFrame) -> bool:
    """Whether a frame is of native code."""
    return frame.get("module") is not None


def is_user_spied(frame: SpiedFrame) -> bool:
    """Whether a frame runs user code."""
    file = file_of(frame)
    return (
        bool(file) and not is_native(frame) and is_user(file) and (file, frame.get("name")) != ("<string>", "<module>")
    )


def location_of_spied(frame: SpiedFrame) -> SourceLocation:
    """Where a frame is."""
    file = file_of(frame)
    return SourceLocation(file, int(frame.get("line") or 0), frame.get("name", ""), kind_of(file))


def file_of(frame: SpiedFrame) -> str:
    """The file of a frame; "" if unknown."""
    return frame.get("filename") or ""
