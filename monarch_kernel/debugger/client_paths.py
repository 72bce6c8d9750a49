"""Translate source paths of ranks to the controller's paths, so that a front end opens its own files.

A sync copies the controller's folders to other paths on hosts. ``monarch_kernel.workers.client_path`` maps these paths
back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from monarch_kernel.debugger.model.evidence import Evidence
from monarch_kernel.debugger.model.stops import StackSnapshot, Stop
from monarch_kernel.debugger.source_locations import SourceLocation
from monarch_kernel.workers import client_path


def stop_at_client(stop: Stop) -> Stop:
    """Return a copy of a stop whose frames use the controller's file names."""
    frames = tuple(
        replace(frame, file=path, loaded=frame.file)
        if (path := client_path(frame.file)) is not None and path != frame.file
        else frame
        for frame in stop.frames
    )
    return stop if frames == stop.frames else replace(stop, frames=frames)


def snapshot_at_client(snapshot: StackSnapshot) -> StackSnapshot:
    """Return a copy of a rank's stacks that uses the controller's file names."""
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


def evidence_at_client(evidence: Evidence) -> Evidence:
    """Return a copy of a rank's evidence with the controller's file names, so that all hosts are comparable."""
    places = [place for place in (evidence.place, *evidence.stack) if place is not None]
    if all(client_path(place.file) is None for place in places):
        return evidence
    return cast("Evidence", _renamed(evidence, {}))


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, SourceLocation):
        if value.file not in names:
            names[value.file] = client_path(value.file) or value.file
        return value._replace(file=names[value.file])
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _renamed(getattr(value, field.name), names) for field in fields(value)}
        return replace(value, **changed)
    if type(value) is tuple:
        return tuple(_renamed(each, names) for each in cast("tuple[Any, ...]", value))
    if isinstance(value, Mapping):
        return {key: _renamed(each, names) for key, each in cast("Mapping[Any, Any]", value).items()}
    return value
