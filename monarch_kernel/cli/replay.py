"""``monarch-kernel replay``: run one rank's captured training step again, in this process alone.

Exit codes: 0, bit-equal; 1, not equal, or the step cannot be replayed; 2, the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from monarch_kernel.cli.lines import WRONG_LINE, add_json

if TYPE_CHECKING:
    from types import TracebackType

    from monarch_kernel.numerics.replay import RankCapture, ReplayReport


def add_replay_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel replay``."""
    parser.usage = "monarch-kernel replay CAPTURE [--rank N | --all] [--debug] [--json] [-- train.py ARGUMENT ...]"
    parser.description = (
        "Runs a training script until its first step, which is the captured one: with the captured weights, batch and "
        "random generators, and collectives that are answered from the capture. Compares losses and gradients bit by "
        "bit. Debuggers and breakpoint() work in the script."
    )
    _add_options(parser)
    parser.add_argument("capture", metavar="CAPTURE", help="the name of a capture, or its folder")
    parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="-- SCRIPT ARGUMENT ...",
        help="the script to run (default: the captured program's)",
    )
    parser.set_defaults(run=_run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    # None where they are missing, because options after the name of the capture are parsed separately
    which.add_argument(
        "--rank", type=int, metavar="N", default=argparse.SUPPRESS, help="the rank (default: the only one)"
    )
    which.add_argument(
        "--all", action="store_true", default=argparse.SUPPRESS, help="all captured ranks, one after the other"
    )
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="open pdb where the script raises"
    )
    add_json(parser)


def _run(options: argparse.Namespace) -> int:
    words: list[str] = options.rest
    at = words.index("--") if "--" in words else len(words)
    later = argparse.ArgumentParser(prog="monarch-kernel replay")
    _add_options(later)
    before = options.json
    later.parse_args(words[:at], options)
    options.json = options.json or before
    if hasattr(options, "rank") and hasattr(options, "all"):
        return _wrong("--rank and --all exclude each other")

    from monarch_kernel.numerics.capture import CaptureError
    from monarch_kernel.numerics.replay import RankCapture, ReplayError, captured_ranks, find_folder

    try:
        folder = find_folder(options.capture)
        ranks = captured_ranks(folder) if hasattr(options, "all") else [getattr(options, "rank", None)]
        captures = [RankCapture.open(folder, rank) for rank in ranks]
        program = words[at + 1 :] or _captured_program(captures[0])
        reports = [_replay(each, program, debug=hasattr(options, "debug")) for each in captures]
    except (CaptureError, ReplayError, FileNotFoundError) as error:
        print(f"monarch-kernel replay: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([report.asdict() for report in reports]))
    else:
        print("\n".join(report.text() for report in reports))
    return 0 if all(report.equal for report in reports) else 1


def _wrong(text: str) -> int:
    print(f"monarch-kernel replay: {text}", file=sys.stderr)
    return WRONG_LINE


def _captured_program(capture: RankCapture) -> list[str]:
    """Return the script and the arguments of the captured program."""
    from monarch_kernel.numerics.capture import CaptureError

    program = capture.description["program"]
    script = program.get("script")
    if script is None or not os.path.isfile(script):
        known = f"its script {script} is not on this machine" if script else "it was no script"
        raise CaptureError(f"the captured program is unknown here: {known}; name one after --, such as -- train.py")
    return [script, *program["arguments"]]


def _replay(capture: RankCapture, program: list[str], *, debug: bool) -> ReplayReport:
    from monarch_kernel.numerics.replay import replay_script

    return replay_script(capture, program[0], program[1:], on_error=_debug if debug else _show)


def _show(error: BaseException) -> None:
    """Print the traceback of the script, without the frames that run it."""
    import traceback

    traceback.print_exception(type(error), error, _inside(error))


def _debug(error: BaseException) -> None:
    import pdb

    _show(error)
    pdb.post_mortem(_inside(error))


def _inside(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    return trace or error.__traceback__
