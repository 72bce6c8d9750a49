"""Shared parts of the commands about jobs: common options, looking up the job and its hosts, and exit codes.

Exit codes: 0, success; 1, the provider or a host failed; 2, the command line is wrong; 130, interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.actor import HostMesh
    from monarch_kernel.launchers.listing import ListedJob

INTERRUPTED = 130
WRONG_LINE = 2


class LineError(ValueError):
    """A command line refers to something that does not exist. The text names the mistake and how to correct it."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the job as the first positional argument."""
    parser.add_argument("job", nargs="?", metavar="JOB", help="job id or its beginning (default: the only job)")


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add ``--mesh``."""
    parser.add_argument("--mesh", metavar="NAME", help="use the hosts of this mesh (default: the first mesh)")


def add_environment(parser: argparse.ArgumentParser) -> None:
    """Add ``-e``, ``--workdir`` and ``--kill``, which apply to a command on the hosts."""
    parser.add_argument("-e", "--env", action="append", default=[], metavar="K=V", help="set a variable; repeatable")
    parser.add_argument("--workdir", metavar="PATH", help="run the command in this folder of the hosts")
    parser.add_argument("--kill", action="store_true", help="end the job afterwards")


def add_per_host(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--per-host``."""
    parser.add_argument("--per-host", action="append", default=[], metavar="DIM=N", help=text)


def guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Convert errors of command lines, providers and hosts, and interrupts, to exit codes."""

    def call(options: argparse.Namespace) -> int:
        from monarch_kernel.launchers.base import LaunchError
        from monarch_kernel.runtime.actor.errors import SupervisionError

        try:
            return run(options)
        except BrokenPipeError:  # the reader has closed the pipe, as head does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except LineError as error:
            print(f"monarch-kernel: {error}", file=sys.stderr)
            return WRONG_LINE
        except (LaunchError, OSError, SupervisionError) as error:
            print(f"monarch-kernel: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("monarch-kernel: interrupted", file=sys.stderr)
            return INTERRUPTED

    return call


def variables(items: list[str]) -> dict[str, str]:
    """Parse the values of ``--env``.

    Raises:
        LineError: a value is not of the form VARIABLE=VALUE.
    """
    if wrong := next((item for item in items if not item.partition("=")[0].isidentifier() or "=" not in item), ""):
        raise LineError(f"--env takes VARIABLE=VALUE, not {wrong!r}")
    return dict(item.split("=", 1) for item in items)


def sizes(option: str, items: list[str]) -> dict[str, int]:
    """Parse the values of an option that takes one or several DIM=N: ``gpus=4`` or ``hosts=0,gpus=3``.

    Raises:
        LineError: a value has another form.
    """
    found: dict[str, int] = {}
    for item in ",".join(items).split(",") if items else ():
        name, _, number = (part.strip() for part in item.partition("="))
        if not name.isidentifier() or not number.isdecimal() or name in found:
            raise LineError(f"{option} takes DIMENSION=NUMBER, each dimension once, not {item!r}")
        found[name] = int(number)
    return found


def chosen_job(name: str | None) -> ListedJob:
    """Return the job with this name, or the only job if there is no name.

    Raises:
        LaunchError: there is no such job, or there are several.
    """
    from monarch_kernel.launchers.base import LaunchError
    from monarch_kernel.launchers.listing import find_job, own_jobs

    if name is not None:
        return find_job(name)
    if len(own := own_jobs()) == 1:
        return own[0]
    listed = ", ".join(job.job for job in own)
    raise LaunchError(f"name the job, one of {listed}" if own else "there is no job; 'up' asks for hosts")


@contextlib.contextmanager
def hosts_of_line(options: argparse.Namespace) -> Generator[HostMesh]:
    """Yield the hosts of the mesh on the command line, by default of the job's first mesh. ``--kill`` ends the job
    after.

    Raises:
        LineError: the job has no such mesh.
        LaunchError: there is no such job, or a host is gone.
    """
    from monarch_kernel import actor
    from monarch_kernel.job import EngineJob

    job = EngineJob.find(chosen_job(options.job).job)
    try:
        meshes = job.meshes
        name = options.mesh or next(iter(meshes))
        if name not in meshes:
            raise LineError(f"job {job.job_id} has no mesh {name!r} (its meshes: {', '.join(meshes)})")
        # The calls of the command already report failed processes. The root's report would duplicate that.
        actor.unhandled_fault_hook = lambda _failure: None
        yield getattr(job.attached(keep=True), name)
    finally:
        if options.kill:
            job.kill()


def check_host(number: int, hosts: HostMesh) -> int:
    """Return the number of a host after checking that the mesh has it.

    Raises:
        LineError: the mesh has no such host.
    """
    if not 0 <= number < len(hosts):
        raise LineError(f"there is no host {number} in this mesh of {len(hosts)} (0 to {len(hosts) - 1})")
    return number
