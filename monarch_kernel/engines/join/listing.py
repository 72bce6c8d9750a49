"""The table of joinable jobs."""

from __future__ import annotations

import os
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
        jobs: oldest first.
        joined: the names of those that this process has joined.
    """

    jobs: Sequence[JoinableJob]
    joined: Sequence[str] = ()

    def table(self) -> TableView:
        """One row for each job."""
        now = time.time()
        rows: list[list[str]] = []
        for job in self.jobs:
            known, world = len(job.ranks), job.world
            rows.append(
                [
                    job.name,
                    str(known) if known == world else f"{known} of {world}",
                    ", ".join(job.hosts),
                    duration(max(0.0, now - job.since)),
                    job.program,
                    os.path.basename(job.ranks[0].folder) or "/",
                    f"%mesh leave {job.name}" if job.name in self.joined else f"%mesh join {job.name}",
                ]
            )
        return TableView(["joinable job", "ranks", "on", "since", "program", "folder"], rows)

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
