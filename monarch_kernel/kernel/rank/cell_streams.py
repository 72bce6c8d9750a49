"""The output streams of a rank, for cells: the only module of the kernel that imports a rank's output capture."""

from __future__ import annotations

from monarch_kernel.runtime.rank.output_capture import (
    begin_cell,
    clear_output,
    current_cell,
    emit_comm,
    emit_display,
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
