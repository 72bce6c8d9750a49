"""``python -m bench.sync``: syncs of a workspace, beside rsync and torchmonarch's own, on the same trees."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench import report
from bench.environments import STATE
from bench.run import adopt_orphans, end_leftovers
from bench.session import machine
from bench.sync.phases import CABLE, Bench
from bench.sync.rows import MONARCH, OURS, ROWS, RSYNC

PEERS = [OURS, RSYNC, MONARCH]
PHASES = ("whole", "some", "inside", "first1", "first4", "cable1", "cable4", "more", "environment", "kills")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.sync", description=__doc__)
    parser.add_argument("phases", nargs="*", metavar="PHASE", help=f"of {', '.join(PHASES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="trees of a fiftieth, fewer hosts, one round")
    parser.add_argument("--rounds", type=int, help="default 5, with --quick 1")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated (default: all)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir(), "sync-bench"),
        help="where trees are made, kept for the next run, and copied to (60 GB; default: in TMPDIR)",
    )
    parser.add_argument("--json", type=Path, help="where the figures go (default: .bench/results/sync-TIME.json)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args(argv)
    args.peers = args.peers.split(",")
    args.phases = args.phases or list(PHASES)
    args.rounds = args.rounds or (1 if args.quick else 5)
    for given, known in ((args.peers, PEERS), (args.phases, PHASES)):
        if unknown := [x for x in given if x not in known]:
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return args


def shown(bench: Bench) -> Table:
    """Return one row for each measured metric."""
    found = report.medians(bench.results)
    table = Table(box=box.MARKDOWN)
    table.add_column("what", no_wrap=True)
    for name in (*PEERS, f"ours / {RSYNC}", f"ours / {MONARCH}", "bar"):
        table.add_column(name, justify="right", no_wrap=True)
    sizes = {
        "files": bench.large.spec.files,
        "gb": bench.large.spec.size / 1e9,
        "some": bench.some.spec.files,
        "few": bench.few.spec.files,
        "some_gb": bench.some.spec.size / 1e9,
        "big": bench.big.spec.size / 1e6,
        "several": bench.several,
        "many": bench.many,
        "kills": next((str(r["kills"]) for r in bench.results if "kills" in r), ""),
    }
    for row in ROWS:
        values = {peer: found.get((peer, row.metric)) for peer in PEERS}
        if all(value is None for value in values.values()):
            continue
        ours = values[OURS]
        table.add_row(
            row.label.format(**sizes),
            *(report.number(values[peer]) for peer in PEERS),
            *(report.number(report.over(ours, values[peer])) for peer in (RSYNC, MONARCH)),
            row.verdict(ours, values[RSYNC]),
        )
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the phases; return the exit status."""
    args = arguments(argv)
    args.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    began = time.monotonic()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    about = machine()
    bench = Bench(args.folder.resolve(), args.rounds, args.quick, args.peers)
    run = {
        "whole": lambda: bench.whole(bench.large, ""),
        "some": lambda: bench.whole(bench.some, "some_"),
        "inside": bench.inside,
        "first1": lambda: bench.first(1),
        "first4": lambda: bench.first(4),
        "cable1": lambda: bench.first(1, CABLE),
        "cable4": lambda: bench.first(4, CABLE),
        "more": bench.more,
        "environment": bench.environment,
        "kills": bench.kills,
    }
    try:
        for phase in args.phases:
            run[phase]()
    finally:
        end_leftovers()
        bench.clear()
        about |= {"load_after": round(os.getloadavg()[0], 2), "seconds": round(time.monotonic() - began)}
        target = args.json or STATE / "results" / f"sync-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"machine": about, "results": bench.results}, indent=1) + "\n")
    console = Console(width=None if Console().is_terminal else 240, highlight=False, emoji=False, markup=False)
    console.print(shown(bench))
    for line in report.notes(bench.results):
        console.print(f"note: {line}", soft_wrap=True)
    console.print(
        "note: all read from a warm page cache and write without fsync; rsync and torchmonarch are timed until the "
        "copy is there, ours until ranks have imported it; medians of "
        f"{args.rounds} rounds in turns, load {about['load_before']} before and {about['load_after']} after",
        soft_wrap=True,
    )
    missed = [row.metric for row in ROWS if "MISS" in row.verdict(*_compared(bench, row.metric))]
    return 1 if args.check and missed else 0


def _compared(bench: Bench, metric: str) -> tuple[float | None, float | None]:
    found = report.medians(bench.results)
    return found.get((OURS, metric)), found.get((RSYNC, metric))


if __name__ == "__main__":
    sys.exit(main())
