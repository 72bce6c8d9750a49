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
    """The jobs of this user that can be joined.

    Attributes:
        jobs: the jobs, oldest first.
        joined: the names of the jobs that this process has joined.
    """

    jobs: Sequence[JoinableJob]
    joined: Sequence[str] = ()

    def table(self) -> TableView:
        """Return one row per job."""
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
        # The columns of `launchers.listing.JobList`, so that both can be combined into one table.
        headings = ["job", "engine", "meshes", "hosts", "since", "used by", "folder", "program"]
        return TableView(headings, rows, right=(4,))

    def plain(self) -> list[dict[str, Any]]:
        """Return the jobs as plain data, for ``--json``."""
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
