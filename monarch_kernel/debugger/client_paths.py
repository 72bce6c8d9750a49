"""Sources of ranks by the names that the controller has for them: a front end opens its own file.

A sync puts the controller's folders elsewhere on hosts; ``monarch_kernel.workers.client_path`` knows which is which.
"""

from __future__ import annotations

from dataclasses import replace

from monarch_kernel.debugger.model.stacks import Snapshot
from monarch_kernel.debugger.model.stops import Stop
from monarch_kernel.workers import client_path


def stop_at_client(stop: Stop) -> Stop:
    """A stop whose frames name files as the controller does."""
    frames = tuple(
        replace(frame, file=path, loaded=frame.file)
        if (path := client_path(frame.file)) is not None and path != frame.file
        else frame
        for frame in stop.frames
    )
    return stop if frames == stop.frames else replace(stop, frames=frames)


def snapshot_at_client(snapshot: Snapshot) -> Snapshot:
    """What a rank does, with files as the controller names them."""
    files = {frame.place.file for stack in snapshot.stacks for frame in stack.frames}
    names = {file: path for file in files if (path := client_path(file)) is not None}
    if not names:
        return snapshot
    stacks = tuple(
        stack._replace(
            frames=tuple(
                frame._replace(place=frame.place._replace(file=names.get(frame.place.file, frame.place.file)))
                for frame in stack.frames
            )
        )
        for stack in snapshot.stacks
    )
    return snapshot._replace(stacks=stacks)
