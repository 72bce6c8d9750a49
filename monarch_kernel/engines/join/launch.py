"""``python -m monarch_kernel.join``: prepare this process for joining, and run a script or module in it."""

from __future__ import annotations

import argparse
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence

from monarch_kernel import environment
from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.engines.join.holding import USUAL
from monarch_kernel.engines.join.identity import identity
from monarch_kernel.engines.join.listener import prepare
from monarch_kernel.engines.join.own_ranks import prepare_own_ranks

HOLD = "--hold-on-error"
_LOCAL_RANK = ("--local_rank=", "--local-rank=")
_WITH_VALUE = ("--name", "--on-hang", "--hang-after", "--reports", "--meet")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        argv: the arguments; by default those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m monarch_kernel.join",
        usage="%(prog)s [--name NAME] [--hold-on-error[=SECONDS]] "
        "[--on-hang {dump,hold} [--hang-after SECONDS] [--reports FOLDER]] [--meet HOST:PORT] "
        "(SCRIPT | -m MODULE) [ARGS ...]",
        description="Let notebooks join this process while it runs a script.",
    )
    parser.add_argument("--name", default="", help="of the job; by default MONARCH_KERNEL_JOIN, or the script's")
    parser.add_argument(
        HOLD,
        type=float,
        metavar="SECONDS",
        help=f"keep a program that raises, until a notebook has looked, for at most so long ({USUAL:g} s)",
    )
    parser.add_argument(
        "--on-hang",
        choices=["dump", "hold"],
        help="write a report when the job makes no progress; hold: and keep programs that fail later, too",
    )
    parser.add_argument("--hang-after", type=float, metavar="SECONDS", help="how long it makes none until then (300)")
    parser.add_argument("--reports", metavar="FOLDER", help="for these reports (NAME-reports)")
    parser.add_argument("--meet", metavar="HOST:PORT", help="where notebooks of other machines find it (docs/join.md)")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    parser.add_argument("program", help="the script, or with -m the module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    words = list(sys.argv[1:] if argv is None else argv)
    # deepspeed and torch.distributed.launch insert this before the arguments; it belongs to the program.
    told = [words.pop(0)] if words and words[0].startswith(_LOCAL_RANK) else []
    at = 0
    while at < len(words) and words[at].startswith("-"):
        # Without a value, the option takes its default: the next word is another option, or the program.
        words[at] = f"{HOLD}={USUAL}" if words[at] == HOLD else words[at]
        at += 2 if words[at] in _WITH_VALUE else 1
    found = parser.parse_args(words)
    sys.argv = [found.program, *told, *found.args]
    try:
        announced = prepare(
            found.name,
            hold_on_error=found.hold_on_error,
            on_hang=found.on_hang,
            hang_after=found.hang_after,
            reports=found.reports,
            meet=found.meet,
        )
    except (JoinError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if announced is not None and identity().rank < 0:
        prepare_own_ranks(
            {
                environment.JOIN.name: announced.name,
                environment.JOIN_HOLD.name: found.hold_on_error,
                environment.JOIN_ON_HANG.name: found.on_hang,
                environment.JOIN_HANG_AFTER.name: found.hang_after,
                environment.JOIN_REPORTS.name: found.reports,
                environment.JOIN_MEET.name: found.meet,
            }
        )
    if found.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(found.program, run_name="__main__", alter_sys=True)
    else:
        _run_script(found.program)


def _run_script(path: str) -> None:
    """Run a script in a new ``__main__`` module, which stays: cells of notebooks run there, too."""
    main_module = types.ModuleType("__main__")
    main_module.__file__ = path
    try:
        with io.open_code(os.path.abspath(path)) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        print(f"can't open file {path!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.modules["__main__"] = main_module
    exec(code, vars(main_module))
