"""``python -m bench.tensors``: measure in turn, print the table, and keep the figures as JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich import box
from rich.table import Table

from bench import report
from bench.run import run_script
from bench.session import BenchSession
from bench.tensors.rows import MONARCH, OURS, ROWS, SPMD

PEERS = [OURS, MONARCH, SPMD]
GROUPS = {
    "engine": [OURS, MONARCH],
    "dtensor": [OURS, SPMD],
    "allreduce": [OURS, SPMD],
    "death": [OURS],
    "heal": [OURS],
}
SCRIPTS = {"engine": "engine", "dtensor": "dtensors", "allreduce": "dtensors", "death": "failures", "heal": "failures"}
#: Groups that run with one number of ranks only: the all-reduce has a gigabyte on each.
RANKS = {"allreduce": 4, "death": 4, "heal": 4}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tensors", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="one short round, with 1 and 4 ranks")
    parser.add_argument("--ranks", help="comma-separated (default: 1,4,8; all but engine and dtensor have 4)")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated (default: all)")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--deadline", type=float, default=300, help="seconds for one group of one peer (300)")
    parser.add_argument("--json", type=Path, help="where the figures go (default: .bench/results/tensors-TIME.json)")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="add the figures of earlier runs (JSON)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args(argv)
    args.peers = args.peers.split(",")
    args.groups = args.groups or list(GROUPS)
    args.rounds = args.rounds or (1 if args.quick else 3)
    for given, known in ((args.peers, PEERS), (args.groups, list(GROUPS))):
        if unknown := [x for x in given if x not in known]:
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    try:
        args.ranks = [int(n) for n in (args.ranks or ("1,4" if args.quick else "1,4,8")).split(",")]
    except ValueError:
        parser.error(f"--ranks {args.ranks}: not numbers with commas between them")
    return args


def command(peer: str, python: Path, group: str, ranks: int) -> list[str]:
    """Return the command that runs one group of a peer with this many ranks."""
    if peer == SPMD:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [str(python), "-m", *torchrun, "-m", "bench.tensors.spmd", group]
    return [str(python), "-m", f"bench.tensors.{SCRIPTS[group]}", group, str(ranks)]


def plan(groups: list[str], ranks: list[int], peers: list[str]) -> list[tuple[str, int, str]]:
    """Return the (group, ranks, peer) items of one round in order: the peers in turn."""
    return [
        (group, n, peer)
        for group in groups
        for n in ([RANKS[group]] if group in RANKS else ranks)
        for peer in GROUPS[group]
        if peer in peers
    ]


def counts(found: report.Medians) -> list[int]:
    """Return the numbers of ranks that have measurements."""
    return sorted({int(metric.partition("@")[2]) for _, metric in found})


def shown(found: report.Medians) -> Table:
    """Return one row for each metric and number of ranks."""
    table = Table(box=box.MARKDOWN)
    table.add_column("what", no_wrap=True)
    for name in ("ranks", *PEERS, "ratio", "bar"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in ROWS:
        for n in counts(found):
            values = [found.get((peer, f"{row.metric}@{n}")) for peer in PEERS]
            if all(value is None for value in values):
                continue
            ours, theirs = values[0], found.get((row.beside, f"{row.metric}@{n}"))
            ratio = report.number(report.over(ours, theirs))
            bar = row.verdict(n, lambda peer, metric, n=n: found.get((peer, f"{metric}@{n}")))
            table.add_row(row.label, str(n), *map(report.number, values), ratio, bar)
    return table


def missed(found: report.Medians) -> list[str]:
    """Return the lines in which a bar was missed."""
    return [
        f"{row.label.strip()}, {n} ranks"
        for row in ROWS
        for n in counts(found)
        if "MISS" in row.verdict(n, lambda peer, metric, n=n: found.get((peer, f"{metric}@{n}")))
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the rounds; return the exit status."""
    args = arguments(argv)
    session = BenchSession(args.peers)

    def measured(item: tuple[str, int, str]) -> list[report.Result]:
        group, ranks, peer = item
        line = command(peer, session.pythons[peer], group, ranks)
        return run_script(peer, line, f"tensors-{group}-{ranks}", 0.25 if args.quick else 1.0, args.deadline)

    try:
        session.run(args.rounds, plan(args.groups, args.ranks, list(session.pythons)), measured)
    finally:
        target = session.keep(args.json, "tensors-")
    session.merge(args.merge)
    found = report.medians(session.results)
    report.printed(shown(found), session.results, session.about, target)
    return 1 if args.check and missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
