"""``monarch-kernel report``: what all ranks of a job do now, and why it makes no progress, as files.

Exit codes are those of ``monarch_kernel.cli.lines``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time

from monarch_kernel.cli.lines import add_json

#: How long the report on a job that hangs may take (seconds); whoever it hangs on is not there to end it.
LIMIT = 180


def add_report_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel report``."""
    parser.description = (
        "Writes what all ranks of a job do now, and why it makes no progress: text, HTML, and JSON for "
        "monarch_kernel.debug.load. The job's ranks were prepared (monarch_kernel.join), and are not stopped."
    )
    parser.add_argument("job", metavar="JOB", help="its name, as %%mesh jobs lists it")
    parser.add_argument("--out", default="", metavar="FOLDER", help="where the files go (JOB-reports)")
    parser.add_argument(
        "--post", action="store_true", help="also post it to the webhook that MONARCH_KERNEL_JOIN_WEBHOOK names"
    )
    parser.add_argument("--hosts", default="", metavar="HOST,...", help="also of its ranks on these, by ssh")
    parser.add_argument("--hostfile", default="", metavar="FILE", help="the same for the hosts in a file")
    parser.add_argument(
        "--slurm", default="", metavar="JOBID", help="the same for the nodes of a job of Slurm, by srun"
    )
    parser.add_argument("--python", default="", metavar="PATH", help="the interpreter there (the path of this one)")
    parser.add_argument(
        "--meet", metavar="HOST:PORT", help="and of those at this meeting point (MONARCH_KERNEL_JOIN_MEET)"
    )
    add_json(parser)
    # What a rank says that makes no progress, and the descriptor of the lock that it has passed on.
    parser.add_argument("--hang-after", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--waits", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=int, default=-1, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.lock >= 0:
        signal.alarm(LIMIT)
    from monarch_kernel.debugger.reports.collect import REQUESTED, collect, collect_hang, hang_reason
    from monarch_kernel.debugger.reports.files import ReportError, default_folder, save, write
    from monarch_kernel.debugger.reports.webhook import posted
    from monarch_kernel.engines.join.announcements import JoinError
    from monarch_kernel.launchers.base import LaunchError

    try:
        if options.hang_after:
            reason = hang_reason(options.job, options.hang_after, options.waits)
            if not reason:
                return 0
            report = collect_hang(options.job, reason)
        else:
            report = collect(options.job, REQUESTED, *_machines(options))
        paths = save(report, options.out or default_folder(options.job))
        if options.lock >= 0:
            os.pwrite(options.lock, f"{time.time():<20}".encode(), 0)  # ranks see that there is a report on this hang
        wrong = posted(report, paths) if options.post or options.lock >= 0 else ""
        if wrong:
            report.notes = (*report.notes, wrong)
            write(report, paths)
    except (JoinError, LaunchError, OSError, ReportError, ValueError) as error:
        print(f"monarch-kernel report: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report.asdict()) if options.json else report.text(colours=sys.stdout.isatty()))
    print(f"written: {', '.join(paths)}", *([wrong] if wrong else ()), sep="\n", file=sys.stderr)
    return 1 if wrong else 0


def _machines(options: argparse.Namespace) -> tuple[dict[str, list[str]], str]:
    """The commands that reach other machines, and a meeting point."""
    from monarch_kernel import environment
    from monarch_kernel.engines.join.remote_machine import RELAY
    from monarch_kernel.launchers.relay_commands import relay_commands

    meet = environment.JOIN_MEET
    commands = relay_commands(RELAY, options.hosts, options.hostfile, options.slurm, options.python)
    return commands, meet.get() if options.meet is None else meet.parse(options.meet)
