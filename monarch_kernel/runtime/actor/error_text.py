"""Format errors over a mesh compactly, also for a thousand ranks: equal failures are shown once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from monarch_kernel.protocol.messages import Death
from monarch_kernel.runtime.mesh.rankset import format_points, format_ranks, name_ranks
from monarch_kernel.runtime.mesh.shape import Extent, Point

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.errors import RankFailure

_MAX_RUNS = 8
_MAX_GROUPS = 6
_MAX_HOSTS = 3
_MAX_PIDS = 6
_MAX_MESSAGES = 4
_MAX_MESSAGE = 200

_TITLE = " Traceback of where the remote call failed (most recent call last):"

_WHAT_NEXT = {
    "proc": "Other ranks still work: slice the mesh to them, or replace the dead ranks with heal() of the proc mesh.",
    "actor": "Its process is alive: heal() of the proc mesh makes the actor again; or slice the mesh without it.",
    "controller": "Its state is lost: get_or_spawn_controller() raises this once more, and then makes another.",
    "agent": "All ranks of that host are gone: heal(hosts=...) moves them to a spare host; or go on without them.",
    "stopped": "Spawn it again to go on.",
}


class Called(msgspec.Struct, frozen=True):
    """The actors that a call addressed, as messages name them: by their ranks in the mesh as spawned.

    Attributes:
        extent: the shape of that mesh.
        sliced: the ranks in that mesh of the called slice, in its order; None if the whole mesh was called.
    """

    extent: Extent
    sliced: tuple[int, ...] | None = None

    def ranks(self, ranks: Iterable[int]) -> list[int]:
        """Convert ranks of the slice to ranks of the mesh."""
        return list(ranks) if self.sliced is None else [self.sliced[rank] for rank in ranks]

    def name(self, ranks: Iterable[int]) -> str:
        """`rank 2`, or `ranks 0-3,7`."""
        return name_ranks(self.ranks(ranks), limit=_MAX_RUNS)

    def points(self, ranks: Iterable[int]) -> str:
        """Render their coordinates in the mesh: `gpus=2`."""
        return format_points(self.ranks(ranks), self.extent, limit=_MAX_RUNS)

    def _in_brackets(self, ranks: Iterable[int]) -> str:
        points = self.points(ranks)
        return f" ({points})" if points else ""


def headline(what: str, called: Called, ranks: Sequence[int]) -> str:
    """`what failed on ranks 1,3 of 4 (gpus=1,3).`"""
    size = called.extent.nelements
    if not called.extent.names:
        return f"{what} failed."
    if len(ranks) == size:
        return f"{what} failed on all {size} ranks." if size > 1 else f"{what} failed."
    return f"{what} failed on {called.name(ranks)} of {size}{called._in_brackets(ranks)}."


def tracebacks(failures: Iterable[RankFailure], called: Called) -> list[str]:
    """Render the tracebacks of ranks that raised, each once, with its ranks."""
    groups: dict[object, list[RankFailure]] = {}
    for failure in failures:
        if failure.fault is not None:
            groups.setdefault(failure.fault.likeness(), []).append(failure)
    lines: list[str] = []
    # The most frequent traceback first: the others are often its consequences.
    ordered = sorted(groups.values(), key=len, reverse=True)
    for group in ordered[:_MAX_GROUPS]:
        fault = group[0].fault
        assert fault is not None  # only failures with a fault were grouped
        lines += [""] if lines else [_TITLE]
        ranks = [failure.rank for failure in group]
        who = f"{called.name(ranks)}{called._in_brackets(ranks)}, " if called.extent.nelements > 1 else ""
        lines.append(f"  {who}{_hosts(group)}:")
        lines += fault.render()
        lines += _other_messages(group, called)
    rest = [failure.rank for group in ordered[_MAX_GROUPS:] for failure in group]
    if rest:
        count = len(ordered) - _MAX_GROUPS
        lines += ["", f"  and {count} more different tracebacks, on {called.name(rest)} (all are in `.failures`)"]
    return lines


def deaths(head: str, mesh_name: str, dead: Sequence[RankFailure], called: Called) -> list[str]:
    """Describe the ranks that cannot answer, the causes, and the remedy; the text begins with ``head``."""
    mesh = f" of mesh {mesh_name!r}" if mesh_name else ""
    groups: dict[tuple[str, str, str], list[RankFailure]] = {}
    for failure in dead:
        if failure.death is not None:
            groups.setdefault((failure.death.what, failure.death.cause, failure.death.detail), []).append(failure)
    lines: list[str] = []
    size = called.extent.nelements
    if len(groups) > 1:
        lines.append(f"{head}{called.name(failure.rank for failure in dead)} of {size}{mesh} cannot answer.")
        head = "  "
    for (_, cause, detail), group in list(groups.items())[:_MAX_GROUPS]:
        ranks = [failure.rank for failure in group]
        where = f"{called.name(ranks)} of {size}{mesh}{called._in_brackets(ranks)}, {_hosts(group)},"
        lines.append(f"{head}{where} cannot answer: {cause.rstrip('.')}.")
        lines += [f"    {line}" for line in detail.rstrip().split("\n") if detail]
    if len(groups) > _MAX_GROUPS:
        lines.append(f"  and {len(groups) - _MAX_GROUPS} more different causes (all are in `.failures`)")
    advice = dict.fromkeys(_WHAT_NEXT.get(what, _WHAT_NEXT["proc"]) for what, _, _ in groups)
    return lines + [f"  {text}" for text in advice]


def actor_label(cls: str, name: str, rank: int, extent: Extent) -> str:
    """Render an actor in Monarch's notation: its class, the name of its mesh, and its position there."""
    place = str(Point(rank, extent)) if extent.names else ""
    return f"<{cls} {name}{place}>"


def rank_numbers(ranks: Sequence[int], limit: int = 8) -> str:
    """Render the first of these ranks in the form that programs written for Monarch search for: ``rank=0, rank=3``."""
    shown = [f"rank={rank}" for rank in ranks[:limit]]
    return ", ".join(shown + ["..."] * (len(ranks) > limit))


def have_failed(cls: str, name: str, ranks: Sequence[int], called: Called) -> str:
    """Report dead actors in one line, in the wording that programs written for Monarch search for."""
    others = f" ({len(ranks) - 1} more of the mesh too)" if len(ranks) > 1 else ""
    label = actor_label(cls, name, called.ranks(ranks)[0], called.extent)
    return f"  The actor {label} and all its descendants have failed{others}"


def released(ranks: Sequence[RankFailure], failed: Sequence[RankFailure], called: Called) -> list[str]:
    """Describe the ranks that waited for the failed ones, and the remedy for their process group."""
    if not ranks:
        return []
    who = called.name(each.rank for each in ranks).capitalize()
    return [
        "",
        f"{who} waited in torch.distributed for {called.name(each.rank for each in failed)}, and "
        f"{'was' if len(ranks) == 1 else 'were'} released. That process group is gone: destroy_process_group() and "
        "init_process_group() on all ranks, or ProcessGroups.form(), make another.",
    ]


def answers(values: Mapping[int, object], unanswered: Sequence[int], called: Called) -> list[str]:
    """List the ranks that had answered, and those that had not."""
    lines: list[str] = []
    if values:
        results = "its result is" if len(values) == 1 else "their results are"
        by = "" if called.sliced is None else f", by rank in the slice ({format_ranks(values, limit=_MAX_RUNS)})"
        lines.append(f"{called.name(values).capitalize()} answered: {results} in `.values` of this error{by}.")
    if unanswered:
        lines.append(f"{called.name(unanswered).capitalize()} had not answered when this was raised.")
    return ["", *lines] if lines else []


def mesh_failure(mesh: str, ranks: Sequence[int], extent: Extent | None, reason: str, death: Death | None) -> str:
    """Describe a part of a mesh that died, in one line."""
    text = f"Mesh {mesh!r} failed"
    if ranks:
        text = f"Mesh {mesh!r} lost {name_ranks(ranks, limit=_MAX_RUNS)}"
        if extent is not None:
            text += f" of {extent.nelements}{Called(extent)._in_brackets(ranks)}"
    if death is not None and death.host:
        text += f" on host {death.host}" + (f", pid {death.pid}" if death.pid else "")
    return f"{text}: {reason}" if reason else text


def _hosts(group: Sequence[RankFailure]) -> str:
    by_host: dict[str, list[int]] = {}
    for failure in group:
        by_host.setdefault(failure.host, []).append(failure.pid)
    parts: list[str] = []
    for host, pids in list(by_host.items())[:_MAX_HOSTS]:
        known = [str(pid) for pid in dict.fromkeys(pids) if pid]
        shown = ",".join(known[:_MAX_PIDS])
        if len(known) > _MAX_PIDS:
            shown += f",… ({len(known) - _MAX_PIDS} more)"
        label = "pid" if len(known) == 1 else "pids"
        parts.append(f"host {host}" + (f", {label} {shown}" if known else ""))
    if len(by_host) > _MAX_HOSTS:
        parts.append(f"and {len(by_host) - _MAX_HOSTS} more hosts")
    return "; ".join(parts)


def _other_messages(group: Sequence[RankFailure], called: Called) -> list[str]:
    """Return the messages of a group that differ from the one shown, which its first rank raised."""
    by_message: dict[str, list[int]] = {}
    for failure in group:
        if failure.fault is not None:
            by_message.setdefault(failure.fault.message, []).append(failure.rank)
    if len(by_message) < 2:
        return []
    lines = [f"  (this is the message of {called.name(next(iter(by_message.values())))}; the others' differ:)"]
    others = list(by_message.items())[1:]
    for message, ranks in others[:_MAX_MESSAGES]:
        first = message.split("\n", 1)[0]
        shown = first if len(first) <= _MAX_MESSAGE and first == message else f"{first[:_MAX_MESSAGE]}…"
        lines.append(f"    {called.name(ranks)}: {shown}")
    left = others[_MAX_MESSAGES:]
    if left:
        lines.append(f"    … and {len(left)} more on {called.name(r for _, ranks in left for r in ranks)}")
    return lines
