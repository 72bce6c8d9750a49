"""Show live tables of meshes in a terminal: the tables of `status_table`, redrawn after each change."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from typing import Any, TextIO

from monarch_kernel.display.tables import table_text
from monarch_kernel.introspection import whole_of
from monarch_kernel.watch.model import RankState
from monarch_kernel.watch.status_table import StatusTable, status_tables
from monarch_kernel.watch.watcher import watch

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
    mesh: Any = None, *, ranks: Collection[int] = (), seconds: float | None = None, period: float = PERIOD
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
    mesh: Any = None, *, ranks: Collection[int] = (), seconds: float | None = None, period: float = PERIOD
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
