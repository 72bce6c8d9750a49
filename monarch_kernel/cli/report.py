"""``monarch-kernel report``: what all ranks of a job do now, and why it makes no progress, as files.

Exit codes are those of ``monarch_kernel.cli.lines``.
"""

from __future__ import annotations

import argparse
import sys

from monarch_kernel.cli.lines import add_json


def add_report_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel report``."""
    parser.description = (
        "Writes what all ranks of a job do now, and why it makes no progress: text, HTML, and JSON for "
        "monarch_kernel.debug.load. The job's ranks were prepared (monarch_kernel.join), and are not stopped."
    )
    parser.add_argument("job", metavar="JOB", help="its name, as %%mesh jobs lists it")
    parser.add_argument("--out", default="", metavar="FOLDER", help="where the files go (JOB-reports)")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from monarch_kernel.debugger.reports.collect import collect
    from monarch_kernel.debugger.reports.files import ReportError, default_folder, save
    from monarch_kernel.engines.join.announcements import JoinError

    try:
        report = collect(options.job)
        paths = save(report, options.out or default_folder(options.job))
    except (JoinError, OSError, ReportError) as error:
        print(f"monarch-kernel report: {error}", file=sys.stderr)
        return 1
    if options.json:
        import json

        print(json.dumps(report.asdict()))
    else:
        print(report.text(colours=sys.stdout.isatty()))
    print(f"written: {', '.join(paths)}", file=sys.stderr)
    return 0
