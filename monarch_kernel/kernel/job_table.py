"""One table of all jobs of a user: those that engines run for notebooks, and those that notebooks can join."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.engines.join.listing import JoinableList
from monarch_kernel.launchers.listing import JobList

_HEADINGS = ("job", "engine", "meshes", "hosts", "since", "used by", "folder", "program")


@dataclass(frozen=True, repr=False)
class AllJobs(AsTable):
    """All jobs of this user; what notebooks can join comes last."""

    listed: JobList
    joinable: JoinableList

    def table(self) -> TableView:
        """One row for each job, in the columns of the jobs of engines."""
        rows: list[list[str]] = []
        notes: list[str] = []
        for view in (self.listed.table(), self.joinable.table()):
            at = {heading: number for number, heading in enumerate(view.headings)}
            rows += [[row[at[heading]] if heading in at else "" for heading in _HEADINGS] for row in view.rows]
            notes += [view.note] if view.note else []
        return TableView(_HEADINGS, rows, right=(4,), note="\n".join(notes)).without_empty_columns()
