"""Unhandled faults in a notebook: one notice below a cell, without interrupting any code.

A script ends when a failure reaches the root of the supervision tree. A kernel continues: code that waited for the
failed mesh has already received an error, and an unrelated cell is not interrupted.
"""

from __future__ import annotations

import html
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from IPython.display import publish_display_data

from monarch_kernel.display import styles
from monarch_kernel.kernel.output.cell_errors import MeshCellError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from monarch_kernel.actor import MeshFailure


class FaultNotices:
    """Collects unhandled faults, and shows them below the running cell, or else below the next one.

    A fault that an error has already reported is not reported again.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._waiting: deque[MeshFailure] = deque()
        self._reported: deque[tuple[str, int]] = deque(maxlen=256)  # host and pid of dead ranks of `%%mesh` cells

    def install(self) -> None:
        """Set the fault hook, and subscribe to the beginning and end of cells."""
        from monarch_kernel import actor

        actor.unhandled_fault_hook = self.add
        self._shell.events.register("pre_run_cell", self._before_cell)
        self._shell.events.register("post_run_cell", self._after_cell)

    def add(self, failure: MeshFailure) -> None:
        """The fault hook; called on any thread."""
        self._waiting.append(failure)

    def _before_cell(self, info: Any) -> None:
        self._show()

    def _after_cell(self, result: Any) -> None:
        error = None if result is None else result.error_in_exec
        for part in _chain(error):
            if isinstance(part, MeshCellError):
                self._reported += [(failed.host, failed.pid) for failed in part.failures if failed.death]
        self._show()

    def _show(self) -> None:
        failures: list[MeshFailure] = []
        while self._waiting:
            failure = self._waiting.popleft()
            death = failure.death
            if not failure.was_raised() and (death is None or (death.host, death.pid) not in self._reported):
                failures.append(failure)
        if failures:
            publish_display_data(render(_once_each(failures)))


def _once_each(failures: Sequence[MeshFailure]) -> list[str]:
    """Keep one report per event: the death of a process may end actors of several meshes."""
    events: dict[object, list[MeshFailure]] = {}
    for failure in failures:
        events.setdefault(failure.key if failure.key is not None else id(failure), []).append(failure)
    reports: list[str] = []
    for first, *others in events.values():
        report = first.report()
        if others:
            names = ", ".join(repr(other.mesh) for other in others)
            report += f"\nWith it went actors of {names}."
        reports.append(report)
    return reports


def render(reports: Sequence[str]) -> dict[str, str]:
    """Return the notice as a MIME bundle."""
    folded = "".join(_folded(report) for report in reports)
    return {
        "text/plain": "\n".join(reports),
        "text/html": f'<div style="{styles.WARNING_LINE}">{folded}</div>',
    }


def _folded(report: str) -> str:
    """Return a report as HTML: its first line, which expands to the others."""
    headline, _, rest = report.partition("\n")
    if not rest:
        return f"<div>{html.escape(headline)}</div>"
    return f"<details><summary>{html.escape(headline)}</summary><pre>{html.escape(rest)}</pre></details>"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
