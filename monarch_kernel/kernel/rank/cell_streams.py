"""The output streams of a rank, for cells: the only module of the kernel that imports a rank's output capture."""

from __future__ import annotations

from typing import Any

from monarch_kernel.runtime.rank import output_capture
from monarch_kernel.runtime.rank.output_capture import (
    begin_cell,
    clear_output,
    current_cell,
    emit_comm,
    end_cell,
    flush,
    set_cell,
)

__all__ = [
    "begin_cell",
    "clear_output",
    "current_cell",
    "emit_comm",
    "emit_display",
    "end_cell",
    "flush",
    "set_cell",
]

#: The view of a widget, for the manager of Jupyter's widgets.
VIEW_MIME = "application/vnd.jupyter.widget-view+json"


def emit_display(
    data: dict[str, Any],
    metadata: dict[str, Any],
    *,
    display_id: str | None = None,
    update: bool = False,
    result: bool = False,
) -> None:
    """Show a MIME bundle in the current cell, or replace the one that has this display id.

    Args:
        data: the bundle; empty removes what is replaced.
        metadata: of the bundle.
        display_id: identifies the output. A widget's view has its own by default.
        update: replace.
        result: show it as the cell's value.
    """
    if VIEW_MIME in data and display_id is None:
        try:
            from monarch_kernel.kernel.rank.rank_comms import note_shown
        except ImportError:  # without the package `comm` there are no widgets
            pass
        else:
            display_id = note_shown(data, metadata)
    output_capture.emit_display(data, metadata, display_id=display_id, update=update, result=result)
