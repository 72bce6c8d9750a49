"""``monarch-kernel stragglers``: find the ranks that reach collectives late, from recorded files.

Exit codes are those of ``monarch_kernel.cli.lines``.
"""

from __future__ import annotations

import argparse
import json
import sys

from monarch_kernel.cli.lines import WRONG_LINE, add_json


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
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
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
