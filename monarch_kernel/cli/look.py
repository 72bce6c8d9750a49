"""``monarch-kernel look``: inspect running processes from outside, whoever started them.

Exit codes are those of ``monarch_kernel.cli.lines``.
"""

from __future__ import annotations

import argparse
import json
import sys

from monarch_kernel.cli.lines import add_json


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
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
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
