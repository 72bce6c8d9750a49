"""``monarch-kernel report``: write the current state of all ranks of a job, and why it hangs, to files.

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

#: The time limit of a report on a hanging job (seconds). A rank starts this report, and no user can interrupt
#: it.
LIMIT = 180


def add_report_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel report``."""
    parser.description = (
        "Writes the current state of all ranks of a job, and why it hangs, as text, HTML, and JSON for "
        "monarch_kernel.debug.load. The ranks must be prepared (monarch_kernel.join); they are not stopped."
    )
    parser.add_argument("job", metavar="JOB", help="name of the job, as listed by %%mesh jobs")
    parser.add_argument("--out", default="", metavar="FOLDER", help="output folder (JOB-reports)")
    parser.add_argument(
        "--post", action="store_true", help="also post the report to the webhook in MONARCH_KERNEL_JOIN_WEBHOOK"
    )
    parser.add_argument("--hosts", default="", metavar="HOST,...", help="include its ranks on these hosts, by ssh")
    parser.add_argument("--hostfile", default="", metavar="FILE", help="include its ranks on the hosts in this file")
    parser.add_argument(
        "--slurm", default="", metavar="JOBID", help="include its ranks on the nodes of this Slurm job, by srun"
    )
    parser.add_argument(
        "--python", default="", metavar="PATH", help="the interpreter on these hosts (default: the path of this one)"
    )
    parser.add_argument(
        "--meet", metavar="HOST:PORT", help="include its ranks at this meeting point (MONARCH_KERNEL_JOIN_MEET)"
    )
    add_json(parser)
    # Set by a rank that makes no progress: its reason, and the descriptor of the lock that it hands over.
    parser.add_argument("--hang-after", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--waits", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=int, default=-1, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.lock >= 0:
        signal.alarm(LIMIT)
    from monarch_kernel.debugger.reports.collect import REQUESTED, collect, collect_hang, hang_reason
    from monarch_kernel.debugger.reports.job_report import ReportError, default_folder, posted, save, write
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
            os.pwrite(options.lock, f"{time.time():<20}".encode(), 0)  # tells ranks that the hang has been reported
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
    """Return the commands that reach other machines, and the address of a gateway."""
    from monarch_kernel import environment
    from monarch_kernel.engines.join.remote_machine import RELAY
    from monarch_kernel.launchers.relay_commands import relay_commands

    meet = environment.JOIN_MEET
    commands = relay_commands(RELAY, options.hosts, options.hostfile, options.slurm, options.python)
    return commands, meet.get() if options.meet is None else meet.parse(options.meet)
