"""``monarch-kernel debug|look|report|stragglers``: debug and inspect processes that run, or have left records.

Exit codes are those of ``monarch_kernel.cli.lines``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from monarch_kernel.cli.lines import WRONG_LINE, add_json

if TYPE_CHECKING:
    from monarch_kernel.introspection import Controller


# ``monarch-kernel debug [PID]``: open the debugger's console of a running controller in this terminal.


def add_debug_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel debug``."""
    parser.add_argument("pid", nargs="?", type=int, metavar="PID", help="the process to debug, if there are several")
    parser.add_argument("--list", action="store_true", help="list the processes with meshes, then exit")
    parser.add_argument(
        "-c",
        "--command",
        action="append",
        default=[],
        metavar="COMMAND",
        help="execute this command, then exit; repeatable",
    )
    parser.description = (
        "Opens the debugger's console of a kernel or script of yours that runs on this machine, even if it was never "
        "debugged before. help lists the commands."
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from monarch_kernel.introspection import ask_console, controllers

    found = controllers()
    if options.list:
        print(listed(found) if found else "No process of yours has meshes on this machine.")
        return 0
    try:
        chosen = choose(found, options.pid)
        sock = ask_console(chosen)
    except (LookupError, ConnectionError) as error:
        print(f"monarch-kernel debug: {error.args[0]}", file=sys.stderr)
        return 1
    from monarch_kernel.debugger.terminal.client import TerminalClient

    terminal = TerminalClient(sock, chosen)
    try:
        return terminal.execute(options.command) if options.command else terminal.talk()
    finally:
        terminal.close()


def choose(found: Sequence[Controller], pid: int | None) -> Controller:
    """Return the controller to debug.

    Raises:
        LookupError: there is no such controller, or there are several and no PID was given. The message lists them.
    """
    if pid is not None:
        for controller in found:
            if controller.pid == pid:
                return controller
        others = (
            f"; these processes have:\n{listed(found)}" if found else ", and none of your other processes has meshes"
        )
        raise LookupError(f"process {pid} has no meshes or belongs to another user{others}")
    if not found:
        raise LookupError("none of your processes on this machine has meshes")
    if len(found) > 1:
        raise LookupError(f"several processes have meshes; pass the PID of one:\n{listed(found)}")
    return found[0]


def listed(found: Iterable[Controller]) -> str:
    """Return the controllers as text, one per line."""
    return "\n".join(f"  {controller.pid:>7}  {controller.program[:100]}" for controller in found)


# ``monarch-kernel stragglers``: find the ranks that reach collectives late, from recorded files.


def add_stragglers_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel stragglers``."""
    parser.description = (
        "Finds the ranks that reach collectives late, from a file written by '%%mesh stragglers --save', or from "
        "traces of torch.profiler, one for each rank."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="files written by --save or torch.profiler (also .gz)")
    parser.add_argument(
        "--last", type=int, default=100, metavar="N", help="use the latest N collectives of each line (100)"
    )
    parser.add_argument("--each", action="store_true", help="also list the arrivals at the latest collectives")
    add_json(parser)
    parser.set_defaults(run=_run_stragglers)


def _run_stragglers(options: argparse.Namespace) -> int:
    from monarch_kernel.debugger.controller.stragglers import RecordsError, report_of

    if options.last < 1:
        print(f"monarch-kernel stragglers: --last must be at least 1, not {options.last}", file=sys.stderr)
        return WRONG_LINE
    try:
        report = report_of(options.files, options.last, each=options.each)
    except (RecordsError, OSError) as error:
        print(f"monarch-kernel stragglers: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report.asdict()) if options.json else report.text())
    return 0


# ``monarch-kernel report``: write the current state of all ranks of a job, and why it hangs, to files.

#: The time limit of a report on a hanging job (seconds). A rank starts this report, and no user can interrupt
#: it.
REPORT_LIMIT = 180


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
    parser.set_defaults(run=_run_report)


def _run_report(options: argparse.Namespace) -> int:
    if options.lock >= 0:
        signal.alarm(REPORT_LIMIT)
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
            report = collect(options.job, REQUESTED, *_machines_of(options))
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


def _machines_of(options: argparse.Namespace) -> tuple[dict[str, list[str]], str]:
    """Return the commands that reach other machines, and the address of a gateway."""
    from monarch_kernel import environment
    from monarch_kernel.engines.join.remote_machine import RELAY
    from monarch_kernel.launchers.relay_commands import relay_commands

    meet = environment.JOIN_MEET
    commands = relay_commands(RELAY, options.hosts, options.hostfile, options.slurm, options.python)
    return commands, meet.get() if options.meet is None else meet.parse(options.meet)


# ``monarch-kernel look``: inspect running processes from outside, whoever started them.


def add_look_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel look``."""
    parser.description = (
        "Inspects your running processes from outside, without changing them: their stacks, merged over all "
        "ranks, and the rank that they seem to wait for."
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--pids", metavar="123,456", help="processes of this machine")
    which.add_argument(
        "--torchrun", nargs="?", type=int, const=0, metavar="PID", help="the workers of torchrun (its only job here)"
    )
    which.add_argument("--slurm", metavar="JOB", help="the ranks of a Slurm job, on all its nodes")
    parser.add_argument("--native", action="store_true", help="include frames of native code")
    parser.add_argument("--all-threads", action="store_true", help="include threads without user code")
    parser.add_argument(
        "--apart", type=float, default=1.0, metavar="SECONDS", help="the time between the two readings (1)"
    )
    parser.add_argument("--this-node", action="store_true", help=argparse.SUPPRESS)  # what --slurm runs on each node
    add_json(parser)
    parser.set_defaults(run=_run_look)


def _run_look(options: argparse.Namespace) -> int:
    from monarch_kernel.debugger.outside import slurm
    from monarch_kernel.debugger.outside.outside_report import LookRequest, look
    from monarch_kernel.debugger.outside.processes import OutsideError

    try:
        if options.this_node and options.slurm:
            sys.stdout.buffer.write(slurm.read_this_node(options.slurm, native=options.native, apart=options.apart))
            return 0
        found = look(
            LookRequest(
                options.pids,
                options.torchrun,
                options.slurm,
                options.native,
                options.all_threads,
                apart=options.apart,
            )
        )
    except OutsideError as error:
        print(f"monarch-kernel look: {error.args[0]}", file=sys.stderr)
        return 1
    print(json.dumps(found.asdict()) if options.json else found.text(colours=sys.stdout.isatty()))
    return 0
