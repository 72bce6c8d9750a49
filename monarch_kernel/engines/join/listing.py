"""The table of joinable jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.display.quantities import duration
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.engines.join.jobs import JoinableJob


@dataclass(frozen=True, repr=False)
class JoinableList(AsTable):
    """Return the engine of this controller.

    Raises:
        ImportError: torchmonarch is not installed; the message has a remedy.
    """

    jobs: Sequence[JoinableJob]
    joined: Sequence[str] = ()

    def table(self) -> TableView:
        """One row for each job."""
        now = time.time()
        rows: list[list[str]] = []
        for job in self.jobs:
            known, world = len(job.ranks), job.world
            joined = job.name in self.joined
            rows.append(
                [
                    job.name,
                    job.engine,
                    f"ranks={known}" if known == world else f"ranks={known} of {world}",
                    ", ".join(job.hosts),
                    duration(max(0.0, now - job.since)),
                    "this notebook" if joined else f"%mesh join {job.name}",
                    job.ranks[0].folder,
                    job.program,
                ]
            )
        # The columns of `launchers.listing.JobList`, so that both make one table.
        headings = ["job", "engine", "meshes", "hosts", "since", "used by", "folder", "program"]
        return TableView(headings, rows, right=(4,))

    def plain(self) -> list[dict[str, Any]]:
        """The jobs as plain data, for ``--json``."""
        return [
            {
                "name": job.name,
                "launch": job.launch,
                "world": job.world,
                "hosts": job.hosts,
                "since": job.since,
                "program": job.program,
                "ranks": [
                    {"rank": each.identity.rank, "host": each.host, "pid": each.pid, "restarts": each.identity.restarts}
                    for each in job.ranks
                ],
            }
            for job in self.jobs
        ]
