"""A mesh as a text table, worst state first, with grouped rows for large meshes. Pure."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from monarch_kernel.display.quantities import duration, few, memory
from monarch_kernel.display.tables import TableView, table_text
from monarch_kernel.introspection import whole_of
from monarch_kernel.meshes import format_ranks, name_ranks
from monarch_kernel.watch.model import STATE_ORDER, FailureView, HostView, MeshView, RankState, RankView, Snapshot
from monarch_kernel.watch.watcher import watch

# Show live tables of meshes in a terminal: the tables of `status_table`, redrawn after each change.

#: The refresh interval without changes (seconds), for the displayed durations.
TICK = 1.0
#: The minimum interval between two tables (seconds).
PERIOD = 0.5

_STYLES = {
    RankState.DEAD: "bold red",
    RankState.UNRESPONSIVE: "bold yellow",
    RankState.STOPPED: "magenta",
    RankState.HEALING: "cyan",
    RankState.STARTING: "cyan",
    RankState.RUNNING: "green",
    RankState.IDLE: "dim",
    RankState.ENDED: "dim",
}


def live_tables(
    mesh: object = None, *, ranks: Collection[int] = (), seconds: float | None = None, period: float = PERIOD
) -> Iterator[list[StatusTable]]:
    """Yield the tables of all meshes, or of one, now and after each change.

    Args:
        mesh: a proc mesh or actor mesh, or a slice of one; None: all meshes, including later ones.
        ranks: ranks of the whole mesh; none: those of ``mesh``.
        seconds: the duration; None: no limit. The iteration always ends when the mesh is stopped.
        period: the minimum interval between two tables (seconds).
    """
    key = ""
    if mesh is not None:
        whole = whole_of(mesh)
        key = whole.uid
        ranks = ranks or (whole.ranks if len(whole.ranks) < len(whole.procs) else ())
    deadline = None if seconds is None else time.monotonic() + seconds
    with watch(period=period) as seen:
        while True:
            snapshot = seen.snapshot()
            yield status_tables(snapshot, time.time(), key, ranks)
            begin = time.monotonic()
            left = TICK if deadline is None else min(TICK, deadline - begin)
            if left <= 0 or (key and key not in snapshot.meshes):
                return
            next(seen.changes(left), None)
            time.sleep(max(0.0, min(period, left) - (time.monotonic() - begin)))


def show_live(
    mesh: object = None, *, ranks: Collection[int] = (), seconds: float | None = None, period: float = PERIOD
) -> None:
    """Show all meshes, or one, in this terminal until Ctrl-C or for a time. Print a table once if there is no terminal.

    Args:
        mesh: a proc mesh or actor mesh, or a slice of one; None: all meshes, including later ones.
        ranks: ranks of the whole mesh; none: those of ``mesh``.
        seconds: the duration; None: until Ctrl-C, or until the mesh is stopped.
        period: the minimum interval between two tables (seconds).
    """
    out: TextIO = sys.stdout
    if not out.isatty():
        *_, last = live_tables(mesh, ranks=ranks, seconds=seconds or 0.0, period=period)
        print(tables_text(last), file=out)
        return
    from rich.console import Console  # takes 30 ms to import
    from rich.live import Live

    try:
        with Live(console=Console(file=out, force_jupyter=False), auto_refresh=False) as live:
            for tables in live_tables(mesh, ranks=ranks, seconds=seconds, period=period):
                live.update(_drawn(tables), refresh=True)
    except KeyboardInterrupt:
        return


def tables_text(tables: list[StatusTable]) -> str:
    """Return tables as plain text."""
    return "\n\n".join(table_text(table.view) for table in tables) or "No mesh is up."


def _drawn(tables: list[StatusTable]) -> Any:
    """Return tables with colours, for rich."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for each in tables:
        view = each.view
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for at, heading in enumerate(view.headings):
            justify = "right" if at in view.right else "left"
            table.add_column(Text(heading), justify=justify, no_wrap=True, overflow="ellipsis")
        for row, state in zip(view.rows, each.states, strict=True):
            table.add_row(*map(Text, row), style=_STYLES[state])
        parts += [Text(view.caption, style="bold"), table, *([Text(view.note, style="dim")] if view.note else [])]
    return Group(*parts) if parts else Text("No mesh is up.")


#: Larger meshes are shown as groups of ranks with the same state and activity (ranks).
MOST_ROWS = 64
#: The maximum number of groups.
MOST_GROUPS = 40
#: The maximum length of a displayed cause (characters).
CAUSE = 100

#: A sign for each state, readable without colours.
SIGNS = {
    RankState.DEAD: "✖",
    RankState.UNRESPONSIVE: "?",
    RankState.STOPPED: "‖",
    RankState.HEALING: "↻",
    RankState.STARTING: "…",
    RankState.RUNNING: "▶",
    RankState.IDLE: "○",
    RankState.ENDED: "◌",
}


@dataclass(frozen=True, slots=True)
class StatusTable:
    """The table of one mesh.

    Attributes:
        view: the table.
        states: the state of each row.
    """

    view: TableView
    states: tuple[RankState, ...]


def status_tables(snapshot: Snapshot, now: float, key: str = "", ranks: Collection[int] = ()) -> list[StatusTable]:
    """Return tables of the meshes of a snapshot, or of one mesh.

    Args:
        now: seconds since 1970, from which durations are computed.
        key: the key of one mesh; "": all meshes, worst first.
        ranks: ranks of that mesh; none: all ranks.
    """
    chosen = [mesh for mesh in snapshot.meshes.values() if key in ("", mesh.key)]
    tables = [_table(mesh, _chosen(snapshot.ranks[mesh.key], ranks), snapshot, now) for mesh in chosen]
    return sorted(
        tables, key=lambda table: min((STATE_ORDER[state] for state in table.states), default=len(STATE_ORDER))
    )


def _chosen(views: Sequence[RankView], ranks: Collection[int]) -> list[RankView]:
    return [view for view in views if not ranks or view.rank in ranks]


def _table(mesh: MeshView, views: list[RankView], snapshot: Snapshot, now: float) -> StatusTable:
    grouped = len(views) > MOST_ROWS
    groups = _groups(views) if grouped else [[view] for view in views]
    groups.sort(key=lambda group: (STATE_ORDER[group[0].state], group[0].rank))
    names = {key: host.name for key, host in snapshot.hosts.items()}
    rows = [_row(group, names, now) for group in (groups[:MOST_GROUPS] if grouped else groups)]
    headings = ["", "ranks" if grouped else "rank", "state", "for", "doing", "waiting", "memory", "cpu", "host", "why"]
    left = sum(len(group) for group in groups[len(rows) :])
    note = [f"… and {left} other ranks"] if left else []
    note += [f"{_age(now - each.time)} ago: {_concerned(each.ranks)}{each.text}" for each in _news(mesh, snapshot)]
    view = TableView(headings, rows, _caption(mesh, views, snapshot, now), frozenset({3, 5, 6, 7}), "\n".join(note))
    return StatusTable(view.without_empty_columns(), tuple(group[0].state for group in groups[: len(rows)]))


def _groups(views: Iterable[RankView]) -> list[list[RankView]]:
    found: dict[tuple[RankState, str, str], list[RankView]] = {}
    for view in views:
        found.setdefault((view.state, view.doing, view.cause), []).append(view)
    return list(found.values())


def _row(group: list[RankView], hosts: dict[str, str], now: float) -> list[str]:
    first = group[0]
    since = min((view.doing_since or view.since) if view.state is RankState.RUNNING else view.since for view in group)
    names = list(dict.fromkeys(hosts.get(view.host, "") for view in group))
    stop = first.stop
    doing = f"{stop.file}:{stop.line}" if stop is not None and stop.file else first.doing
    cause = first.cause if len(first.cause) <= CAUSE else f"{first.cause[: CAUSE - 1]}…"
    largest = max(view.rss for view in group)
    cpu = sum(view.cpu for view in group) / len(group)
    return [
        SIGNS[first.state],
        format_ranks((view.rank for view in group), limit=4),
        first.state.value + (" (old tree)" if first.older else ""),
        _age(now - since) if since else "",
        doing,
        str(waiting) if (waiting := sum(view.waiting for view in group)) else "",
        memory(largest) if largest else "",
        f"{cpu:.0f} %" if largest else "",
        names[0] if len(names) == 1 else f"{len(names)} hosts",
        cause.replace("\n", " · "),
    ]


def _caption(mesh: MeshView, views: list[RankView], snapshot: Snapshot, now: float) -> str:
    sizes = ", ".join(f"{label}={size}" for label, size in zip(mesh.labels, mesh.sizes, strict=True))
    counts = Counter(view.state for view in views)
    parts = [f"{'* ' if mesh.current else ''}{mesh.name}{f' ({sizes})' if sizes else ''}"]
    parts += [f"{SIGNS[state]} {counts[state]} {state.value}" for state in RankState if counts[state]]
    for key in mesh.hosts:
        if (host := snapshot.hosts.get(key)) is not None and host.gone:
            parts.append(f"host {host.name} is gone: {host.gone}")
    if ending := ending_text(mesh, snapshot.hosts, now):
        parts.append(ending)
    if mesh.kept:
        parts.append("kept")
    if mesh.hang:
        parts.append(f"hangs: {mesh.hang}")
    return " · ".join(parts)


def ending_text(mesh: MeshView, hosts: Mapping[str, HostView], now: float) -> str:
    """Return a sentence about the hosts of a mesh whose walltime ends soon; empty if there are none."""
    known = [hosts[key] for key in mesh.hosts if key in hosts]
    ending = sorted((host for host in known if host.ends_at > now and not host.gone), key=lambda host: host.ends_at)
    if not ending:
        return ""
    first = ending[0]
    names = few([host.name for host in ending])
    return f"the walltime of {names} ends in {_age(first.ends_at - now)}: {first.then}"


def _news(mesh: MeshView, snapshot: Snapshot) -> list[FailureView]:
    return [failure for failure in reversed(snapshot.failures) if failure.mesh == mesh.key][:3]


def _concerned(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks, limit=4)}: " if ranks else ""


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s" if seconds < 60 else duration(seconds)
