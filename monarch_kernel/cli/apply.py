"""``monarch-kernel apply``: the hosts of a job that a Python file defines."""

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
        "Asks for the hosts of a job, and waits for them, unless an equal job has them already. A program in this "
        "folder whose state() is of an equal job finds them, and so do exec, shell and notebooks, by the job's id."
    )
    parser.add_argument(
        "spec",
        metavar="MODULE.NAME|FILE[:NAME]",
        help="where the job stands, or a function that returns it: jobs.train, jobs.py:train; NAME of a file: job",
    )
    parser.add_argument("--script", metavar="FILE", help="run this on the hosts once they are there (batch mode)")
    parser.add_argument("--no-wait", action="store_true", help="return once the engine has taken the request")
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
        print(f"{status}; the job{'' if new else ', which was there already,'} is {job.job_id}")
    return 0


def _defined(spec: str) -> EngineJob:
    """The job that a line names.

    Raises:
        LineError: there is no such module, file, name or job.
    """
    from monarch_kernel.job import EngineJob
    from monarch_kernel.launchers.current_job import defined_job

    try:
        found = defined_job(spec)
    except ValueError as e:
        raise LineError(str(e)) from None
    if not isinstance(found, EngineJob):
        raise LineError(
            f"{spec}, a {type(found).__name__}, is known to its program only, so it cannot be applied here: "
            "name a job of an engine, such as SlurmJob"
        )
    return found
