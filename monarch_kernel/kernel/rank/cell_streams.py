"""What rank code of the kernel uses to put out more than text; one place that knows where it comes from."""

from __future__ import annotations

from monarch_kernel.runtime.rank.output_capture import (
    begin_cell,
    clear_output,
    emit_display,
    end_cell,
    flush,
)

__all__ = ["begin_cell", "clear_output", "emit_display", "end_cell", "flush"]
