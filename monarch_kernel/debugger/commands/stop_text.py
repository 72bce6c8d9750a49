"""The text of a console: stopped ranks in groups, stacks, and answers, with equal ones merged. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from monarch_kernel.debugger.events import Key, RankStop, frames_of_a_stack, shown_frame
from monarch_kernel.debugger.model.stops import Stop, StopFrame
from monarch_kernel.debugger.source_locations import Label
from monarch_kernel.display.quantities import source_line
from monarch_kernel.meshes import format_ranks

_RUNS = 8


def file_name(file: str, label: Label | None = None) -> str:
    """Return the short name of a file: `train.py`, `In[3]`."""
    named = label(file) if label is not None else None
    if named:
        return named.removeprefix("Cell ")
    return file.replace("\\", "/").rpartition("/")[2] or file


def location_text(frame: StopFrame, label: Label | None = None) -> str:
    """Return the location of a frame: `train.py:12 in Model.forward`."""
    where = f"{file_name(frame.file, label)}:{frame.line}"
    return where if frame.name in ("", "<module>") else f"{where} in {frame.name}"


def frame_source(frame: StopFrame) -> str:
    """Return the source of a frame's line, from the rank or (for a cell that ran only here) from this process."""
    return frame.source or source_line(frame.file, frame.line)


def why(stop: Stop) -> str:
    """Return the reason of a stop in a few words; "" after a step that returned nothing."""
    text = stop.text.split("\n", 1)[0]
    if stop.reason == "step":
        return text
    if stop.reason == "breakpoint":
        said = f"breakpoint {stop.breakpoint}" if stop.breakpoint else "breakpoint"
        return f"{said}: {text}" if text else said
    if stop.reason == "pause":
        return "paused"
    if stop.reason == "exception":
        return text or "exception"
    return f"{stop.reason}: {text}" if text else stop.reason


class RankNames:
    """Names the ranks of some stops.

    The name includes the mesh if there are several, and the stop's number if its rank has several stops.
    """

    def __init__(self, stops: Iterable[RankStop]) -> None:
        stops = list(stops)
        self._meshes = {at.mesh for at in stops}
        seen: dict[tuple[str, int], int] = {}
        for at in stops:
            seen[at.mesh, at.rank] = seen.get((at.mesh, at.rank), 0) + 1
        self._several = {rank for rank, count in seen.items() if count > 1}

    def of(self, keys: Iterable[Key]) -> str:
        """Name these stops, by their keys: `0-3`, `m 0-2,4`, `3.12`."""
        by_mesh: dict[str, list[tuple[int, int]]] = {}
        for mesh, rank, stop in keys:
            by_mesh.setdefault(mesh, []).append((rank, stop))
        parts: list[str] = []
        for mesh, found in by_mesh.items():
            plain = [rank for rank, _ in found if (mesh, rank) not in self._several]
            texts = [format_ranks(plain, limit=_RUNS)] if plain else []
            texts += [f"{rank}.{stop}" for rank, stop in sorted(found) if (mesh, rank) in self._several]
            said = ",".join(texts)
            parts.append(f"{mesh} {said}" if len(self._meshes) > 1 else said)
        return "; ".join(parts)

    def stops(self, stops: Iterable[RankStop]) -> str:
        """Name these stops."""
        return self.of(at.key for at in stops)


def answers(values: Mapping[Key, str], names: RankNames) -> str:
    """Merge identical answers, each prefixed with its ranks, the largest group first: `0-2,4  loss = 0.31`."""
    alike: dict[str, list[Key]] = {}
    for key in sorted(values):
        alike.setdefault(values[key], []).append(key)
    ordered = sorted(alike.items(), key=lambda item: (-len(item[1]), item[1][0]))
    return columns([(names.of(keys), text) for text, keys in ordered])


def columns(rows: Sequence[tuple[str, str]]) -> str:
    """Lay out texts, which may have several lines, beside their headings."""
    width = max((len(heading) for heading, _ in rows), default=0)
    lines: list[str] = []
    for heading, text in rows:
        first, *others = text.split("\n")
        lines.append(f"{heading:<{width}}  {first}".rstrip())
        lines += [f"{'':<{width}}  {line}".rstrip() for line in others]
    return "\n".join(lines)


def stopped_text(groups: Sequence[Sequence[RankStop]], label: Label | None = None, *, numbered: bool = False) -> str:
    """Describe which ranks are stopped where, group by group, with the source line."""
    names = RankNames(at for group in groups for at in group)
    rows: list[tuple[str, str]] = []
    for number, group in enumerate(groups, 1):
        stop = group[0].stop
        frame = shown_frame(stop.frames)
        reasons = list(dict.fromkeys(filter(None, (why(at.stop) for at in group))))
        text = location_text(frame, label) if frame is not None else "no frame"
        if reasons:
            text += f"  ({'; '.join(reasons[:2])}{'; …' if len(reasons) > 2 else ''})"
        line = frame_source(frame) if frame is not None else ""
        text += f"\n    {line}" if line else ""
        heading = names.stops(group)
        rows.append((f"{number}: {heading}" if numbered and len(groups) > 1 else heading, text))
    return columns(rows)


def stack_text(stop: Stop, current: int, label: Label | None = None, *, everything: bool = False) -> str:
    """Format a stack, innermost last as in tracebacks. `>` marks the frame with the index `current`."""
    frames = list(stop.frames) if everything else frames_of_a_stack(stop.frames)
    lines: list[str] = []
    for frame in reversed(frames):
        mark = ">" if frame.index == current else " "
        lines.append(f"{mark} {location_text(frame, label)}")
        line = frame_source(frame)
        if line:
            lines.append(f"      {line}")
    return "\n".join(lines)


def source_text(frame: StopFrame, lines: Sequence[str], around: int) -> str:
    """Return the numbered lines around a frame's line, which `->` marks."""
    first = max(1, frame.line - around)
    last = min(len(lines), frame.line + around)
    width = len(str(last))
    return "\n".join(
        f"{number:>{width}} {'->' if number == frame.line else '  '} {lines[number - 1]}".rstrip()
        for number in range(first, last + 1)
    )


def clock(seconds: float) -> str:
    """Format a remaining time: `4:12`, `0:07`."""
    left = max(0, int(seconds))
    hours, left = divmod(left, 3600)
    minutes, seconds_left = divmod(left, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def with_clock(prompt: str, left: float | None) -> str:
    """Return a prompt that includes the remaining time: `(m 0-3, 4:12 left) `."""
    return prompt if left is None else f"{prompt.rstrip().removesuffix(')')}, {clock(left)} left) "
