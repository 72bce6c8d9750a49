"""`%mesh status --watch`: the table of a mesh, which a front end replaces as it changes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from monarch_kernel.actor import ProcMesh
from monarch_kernel.display.tables import table_html
from monarch_kernel.kernel.output.publisher import publisher_for
from monarch_kernel.watch.live import live_tables, show_live, tables_text


def show_status(shell: Any, mesh: ProcMesh, ranks: Collection[int], seconds: float | None) -> None:
    """Show a mesh in the running cell until an interrupt, the end of the mesh, or for a time.

    Args:
        ranks: of the whole mesh; none: all.
        seconds: None: no limit.
    """
    publisher = publisher_for(shell)
    if not publisher.live:  # a terminal
        show_live(mesh, ranks=ranks, seconds=seconds)
        return
    shown: dict[str, Any] | None = None
    try:
        for tables in live_tables(mesh, ranks=ranks, seconds=seconds):
            html = "".join(table_html(table.view) for table in tables) or "The mesh was stopped."
            data = {"text/plain": tables_text(tables), "text/html": html}
            if data != shown:
                publisher.show(0, data, {}, update=shown is not None)
                shown = data
    except KeyboardInterrupt:  # the last table stays
        return
