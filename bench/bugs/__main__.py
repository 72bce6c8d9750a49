"""`python -m bench.bugs`: how many commands and seconds it takes to find the rank and the line of six seeded bugs.

In a session, a driver types the commands that a user would type into the real tool, with the best use of each tool that
we know. The time runs from the first command (or from the bug, if no command is typed) until the answer; the time that
a user needs for reading and typing is not included. The driver also checks that the answer contains the guilty rank and
one of its lines: as a verdict (``named``), or among the output of all ranks (``by eye``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.bugs import monarchs, ours, pytorch
from bench.bugs.cases import BUGS, Case, Session, prepare
from bench.environments import python_for

BEGIN, END = "<!-- figures: written by python -m bench.bugs --doc -->", "<!-- end of figures -->"

Tool = Callable[[Case, Path], Session | None]
#: The debuggers, in the order of the table. Tools that need another run for their answer come last.
TOOLS: dict[str, Tool] = {
    "ours": lambda case, _: ours.typed(case),
    "ours (nothing typed)": lambda case, _: ours.waiting(case),
    "ours (joined)": lambda case, _: ours.joined(case),
    "torchmonarch": monarchs.typed,
    "py-spy": pytorch.spy,
    "torch.distributed.debug": pytorch.debug_page,
    "Flight Recorder": pytorch.flight_recorder,
    "PyTorch (run again)": lambda case, python: pytorch.detail(case, python) or pytorch.pdb(case, python),
}


def session(tool: str, bug: str, ranks: int, seed: int, python: Path, keep: Path | None = None) -> Session | None:
    """Run one tool on one bug, in a separate folder; return None if the tool has nothing for such a bug."""
    with tempfile.TemporaryDirectory(prefix="bug-") as folder:
        case = prepare(bug, Path(folder) / bug, ranks, seed)
        try:
            return TOOLS[tool](case, python)
        except (TimeoutError, OSError) as error:
            failed = Session(tool, case)
            failed.note = str(error)
            return failed
        finally:
            if keep is not None:
                shutil.copytree(case.folder, keep / f"{bug}-{tool.replace(' ', '-')}-{seed}", dirs_exist_ok=True)


def cell(sessions: list[Session]) -> str:
    """Render the table cell of one bug in one tool: the worst finding of all rounds, and the medians."""
    if not sessions:
        return "–"
    worst = min(sessions, key=lambda each: ("", "by eye", "named").index(each.found))
    commands = round(statistics.median(len(each.commands) for each in sessions))
    lines = round(statistics.median(each.output_lines for each in sessions))
    if not worst.found:
        return f"not found ({commands} typed)"
    seconds = statistics.median(each.seconds for each in sessions)
    return f"{worst.found}: {commands} typed, {seconds:.1f} s, {lines} lines"


def table(results: dict[tuple[str, str], list[Session]], bugs: list[str], tools: list[str]) -> str:
    """Render tools by bugs in Markdown, with the output of sessions that found nothing."""
    rows = [f"| | {' | '.join(bugs)} |", "|---" * (len(bugs) + 1) + "|"]
    rows += [f"| {tool} | {' | '.join(cell(results.get((tool, bug), [])) for bug in bugs)} |" for tool in tools]
    notes = [
        f"* {tool}, {bug}: {notes[0]}"
        for tool in tools
        for bug in bugs
        if (notes := [" ".join(each.note.split()) for each in results.get((tool, bug), []) if each.note])
    ]
    return "\n".join([*rows, "", *notes]) if notes else "\n".join(rows)


def replaced(text: str, begin: str, end: str, middle: str) -> str:
    """Replace the text between two markers of a page.

    Raises:
        ValueError: the page does not have these markers.
    """
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no place for this: put the lines {begin} and {end} into it")
    return f"{before}{begin}\n\n{middle}\n\n{end}{after}"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.bugs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bugs", nargs="*", metavar="BUG", help=f"which bugs ({', '.join(BUGS)}; default: all)")
    parser.add_argument("--tools", help=f"which tools, separated by commas ({', '.join(TOOLS)}; default: all)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks (8)")
    parser.add_argument("--seed", type=int, default=1, help="where the bugs are, of the first round (1)")
    parser.add_argument("--rounds", type=int, default=1, help="each with the bugs elsewhere (1)")
    parser.add_argument("--python", type=Path, help="of an environment with torchmonarch (default: one is made)")
    parser.add_argument("--json", type=Path, help="write everything into this file")
    parser.add_argument("--doc", type=Path, help="put the table into this page, between its marks")
    parser.add_argument("--keep", type=Path, help="keep the folders of the sessions, with all output, in this one")
    found = parser.parse_args(argv)
    found.bugs = found.bugs or list(BUGS)
    wanted = list(TOOLS) if found.tools is None else found.tools.split(",")
    found.tools = [tool for tool in TOOLS if tool in wanted]
    if unknown := [tool for tool in wanted if tool not in TOOLS]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(TOOLS)}")
    if unknown := [bug for bug in found.bugs if bug not in BUGS]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(BUGS)}")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line; see ``--help``."""
    args = arguments(argv)
    foreign = any(not tool.startswith("ours") for tool in args.tools)
    python = args.python or (python_for("torchmonarch") if foreign else Path(sys.executable))
    results: dict[tuple[str, str], list[Session]] = {}
    for seed in range(args.seed, args.seed + args.rounds):
        for bug in args.bugs:
            for tool in args.tools:
                found = session(tool, bug, args.ranks, seed, python, args.keep)
                if found is not None:
                    results.setdefault((tool, bug), []).append(found)
                    print(f"{bug:9} {tool:24} {cell([found])} {found.note}".rstrip(), flush=True)
    text = table(results, args.bugs, args.tools)
    print(f"\n{text}")
    if args.json:
        rows = [
            {
                "tool": tool,
                "bug": bug,
                "ranks": each.case.ranks,
                "guilty": each.case.guilty,
                "commands": each.commands,
                "seconds": round(each.seconds, 3),
                "lines": each.output_lines,
                "found": each.found,
                "note": each.note,
                "session": each.transcript(10_000),
            }
            for (tool, bug), sessions in results.items()
            for each in sessions
        ]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.doc:
        args.doc.write_text(replaced(args.doc.read_text(), BEGIN, END, text))
    mine = [each for (tool, _), sessions in results.items() if tool.startswith("ours") for each in sessions]
    return 0 if all(each.found for each in mine) else 1


if __name__ == "__main__":
    sys.exit(main())
