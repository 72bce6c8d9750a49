"""``monarch-kernel apply``: request the hosts of a job that a Python file defines."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from monarch_kernel.cli.lines import LineError, add_json, guarded

if TYPE_CHECKING:
    from monarch_kernel.job import EngineJob


def add_apply_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel apply``."""
    parser.description = (
        "Requests the hosts of a job and waits for them, unless an equal job already has them. Programs in this "
        "folder find the hosts by state() of an equal job; exec, shell and notebooks use the job's id."
    )
    parser.add_argument(
        "spec",
        metavar="MODULE.NAME|FILE[:NAME]",
        help="the job, or a function that returns it: jobs.train, jobs.py:train (NAME in a file: job)",
    )
    parser.add_argument("--script", metavar="FILE", help="run this on the hosts once they are up (batch mode)")
    parser.add_argument("--no-wait", action="store_true", help="return once the provider has accepted the request")
    add_json(parser)
    parser.set_defaults(run=guarded(_apply))


def _apply(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.listing import plain_host

    job = _defined(options.spec)
    new = True
    if options.script is not None:
        try:
            job.apply(options.script)
        except ValueError as e:
            raise LineError(str(e)) from None
        status = job.status()
    else:
        new = job.find_or_apply()
        try:
            status = job.status() if options.no_wait else job.wait()
        except BaseException:
            if new:
                job.kill()
            raise
    if options.json:
        hosts = [plain_host(host) for host in status.hosts]
        print(json.dumps({"job": job.job_id, "engine": job.engine, "new": new, "meshes": job.meshes, "hosts": hosts}))
    else:
        print(f"{status}; the job is {job.job_id}{'' if new else ' (it already existed)'}")
    return 0


def _defined(spec: str) -> EngineJob:
    """Return the job that a command line names.

    Raises:
        LineError: the module, file, name or job does not exist.
    """
    from monarch_kernel.job import EngineJob
    from monarch_kernel.launchers.current_job import defined_job

    try:
        found = defined_job(spec)
    except ValueError as e:
        raise LineError(str(e)) from None
    if not isinstance(found, EngineJob):
        raise LineError(
            f"{spec} is a {type(found).__name__}, which only its own program can use, so it cannot be applied: "
            "use a job of a provider, such as SlurmJob"
        )
    return found
