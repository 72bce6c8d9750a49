"""The progress line of a map over the ranks of a mesh, with an estimate of the time left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from monarch_kernel.display.quantities import duration
from monarch_kernel.kernel.progress import QUIET

if TYPE_CHECKING:
    from monarch_kernel.kernel.notebook import Notebook
    from monarch_kernel.pool import Mapping


class MapProgress:
    """Shows the progress of each map in the cell that started it; a subscriber of `monarch_kernel.pool.on_progress`."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def __call__(self, mapping: Mapping) -> None:
        """Show the progress of a map, or nothing once it has ended."""
        output = self._notebook.output_of(mapping.cell)
        if output is not None and output.progress(line(mapping, time.monotonic())):
            self._notebook.router.touch(output)


def line(mapping: Mapping, now: float) -> str:
    """The progress line of a map."""
    passed = now - mapping.started
    if mapping.ended or passed < QUIET:
        return ""
    total = f" of {mapping.total:,}" if mapping.total is not None else ""
    parts = [f"map {mapping.name}: {mapping.done:,}{total} items", f"{mapping.ranks} ranks"]
    if mapping.failed:
        parts.append(f"{mapping.failed:,} failed")
    if mapping.total and mapping.done:
        parts.append(f"about {duration(passed / mapping.done * (mapping.total - mapping.done))} left")
    return " · ".join(parts)
