"""``monarch-kernel up|apply|jobs|status|logs|kill``: request and manage hosts of providers from a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from monarch_kernel.cli.lines import LineError, add_job, add_json, chosen_job, guarded, variables

if TYPE_CHECKING:
    from monarch_kernel.job import EngineJob
    from monarch_kernel.launchers.base import JobStatus

_LINES = 100


def add_up_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel up``, including those of the provider on the command line."""
    from monarch_kernel.launchers.host_request import (
        add_provider_options,
        argument_of,
        memory_size,
        provider_of,
        seconds,
    )

    parser.description = (
        "Requests hosts from a provider and waits for them. They form a job, see 'monarch-kernel jobs'. To attach "
        "a notebook, run %%mesh up --on JOB. The hosts end with 'monarch-kernel kill JOB', or after their idle "
        "time without a controller. 'up ENGINE --help' lists the options of a provider."
    )
    parser.add_argument("on", metavar="ENGINE|PROFILE", help="the provider of the hosts, or a profile")
    for name, kind, metavar, text in (
        ("--hosts", int, "N", "so many hosts"),
        ("--gpus", int, "N", "with so many GPUs each"),
        ("--cpus", int, "N", "with so many processors each"),
        ("--memory", argument_of(memory_size), "SIZE", "with so much memory each: 64GB"),
        ("--walltime", argument_of(seconds), "TIME", "for so long: 2h, 30m"),
        ("--idle", argument_of(seconds), "TIME", "they end after so long without a controller (10m)"),
        ("--timeout", argument_of(seconds), "TIME", "wait so long for them (10m)"),
        ("--python", str, "PATH", "the interpreter there"),
        ("--name", str, "NAME", "what the engine calls the job"),
        ("--key-file", str, "FILE", "the key of their workers (default: a key of this job)"),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "-e", "--env", action="append", default=[], metavar="K=V", help="set a variable on the hosts; repeatable"
    )
    parser.add_argument("--no-wait", action="store_true", help="return once the provider has accepted the request")
    parser.add_argument(
        "--trust", action="store_true", help="trust the current content of the project file that has this profile"
    )
    add_json(parser)
    # Completion parses words that are not the arguments of its own process.
    if sys.argv[1:2] == ["up"] and (on := provider_of(parser, sys.argv[2:])):
        add_provider_options(parser, on)
    parser.set_defaults(run=guarded(_up))


def add_jobs_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel jobs``."""
    add_json(parser)
    parser.set_defaults(run=guarded(_jobs))


def add_status_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel status``."""
    add_job(parser)
    add_json(parser)
    parser.set_defaults(run=guarded(_status))


def add_logs_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel logs``."""
    add_job(parser)
    parser.add_argument("--host", type=int, metavar="N", help="only the log of this host")
    parser.add_argument(
        "-n", "--lines", type=int, default=_LINES, metavar="N", help=f"print the last N lines ({_LINES})"
    )
    add_json(parser)
    parser.set_defaults(run=guarded(_logs))


def add_kill_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel kill``."""
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="job id or its beginning")
    parser.add_argument("--orphans", action="store_true", help="end all jobs whose program has ended")
    add_json(parser)
    parser.set_defaults(run=guarded(_kill))


# -- commands -----------------------------------------------------------------------------------------


def _up(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.host_request import ask, given_options
    from monarch_kernel.launchers.listing import plain_host

    given = {
        name: getattr(options, name)
        for name in ("hosts", "gpus", "cpus", "memory", "walltime", "idle", "timeout", "python", "name", "key_file")
    }
    given["env"] = variables(options.env)
    asked = ask(options.on, given, given_options(options), trust=options.trust, how="--trust")
    said = ""

    def progress(status: JobStatus) -> None:
        nonlocal said
        if sys.stderr.isatty() and (text := f"{asked.engine}: {status}") != said:
            print(text, file=sys.stderr)
            said = text

    if asked.profile is not None:
        print(f"profile {asked.profile.name} of {asked.profile.file}: {asked.describe()}", file=sys.stderr)
    job = asked.job(progress)
    try:
        job.apply()
        status = job.status() if options.no_wait else job.wait()
    except BaseException:
        job.kill()
        raise
    if options.json:
        found = {"job": job.job_id, "engine": asked.engine, "hosts": [plain_host(host) for host in status.hosts]}
        print(json.dumps(found))
    else:
        print(f"{status}; the job is {job.job_id}")
    return 0


def _jobs(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.listing import list_jobs

    found = list_jobs(own_process=True)
    if options.json:
        print(json.dumps([job.plain() for job in found.jobs]))
    else:
        print(found if found.jobs else "There is no job.")
    return 0


def _status(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.listing import HostList

    job = chosen_job(options.job)
    if options.json:
        print(json.dumps(job.plain()))
    elif job.status is not None:
        print(HostList(f"job {job.job} of {job.engine}, used by {job.used_by}", job.status))
    if job.error:
        print(f"monarch-kernel: {job.error}", file=sys.stderr)
    return int(bool(job.error) or job.ended)


def _logs(options: argparse.Namespace) -> int:
    job, lines = chosen_job(options.job), max(1, options.lines)
    if options.json:
        known = [] if job.status is None else [host.host for host in job.status.hosts]
        numbers = known if options.host is None else [options.host]
        print(json.dumps([{"host": number, "log": job.log(number, lines)} for number in numbers]))
    else:
        print(job.log(options.host, lines))
    return 0


def _kill(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.base import LaunchError
    from monarch_kernel.launchers.listing import find_job, own_jobs

    if not options.jobs and not options.orphans:
        raise LineError("name the job to end, or pass --orphans; 'jobs' lists all jobs")
    ending = {job.job: job for job in map(find_job, options.jobs)}
    if options.orphans:
        ending |= {job.job: job for job in own_jobs() if job.is_left}
    ended: list[dict[str, str]] = []
    for job in ending.values():
        try:
            job.end()
        except (LaunchError, OSError) as error:  # the other jobs are ended all the same
            print(f"monarch-kernel: job {job.job} of {job.engine} was not ended: {error}", file=sys.stderr)
            continue
        ended.append({"job": job.job, "engine": job.engine})
        if not options.json:
            print(f"job {job.job} of {job.engine} ended")
    if options.json:
        print(json.dumps(ended))
    return int(len(ended) < len(ending))


# ``monarch-kernel apply``: request the hosts of a job that a Python file defines.


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
