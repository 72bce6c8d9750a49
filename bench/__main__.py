"""`python -m bench`: measure, print the tables, and store the figures as JSON."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path

from bench import report
from bench.metrics import GROUPS, LIMIT_GROUPS
from bench.run import SCRIPTS, measure
from bench.session import BenchSession

QUICK_PEERS = ["ours", "torchmonarch", "limit"]
QUICK_SCALE = 0.25


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure this project, its peers and the machine's limits on the same work. Each peer "
        "has an environment of its own under .bench/, made when first needed.",
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="one short round of ours, torchmonarch and the limits")
    parser.add_argument("--peers", help=f"comma-separated, of {', '.join(SCRIPTS)} (default: all)")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--deadline", type=float, default=300, help="seconds for one group of one peer (300)")
    parser.add_argument("--all", action="store_true", help="show every row, also the details")
    parser.add_argument("--json", type=Path, help="where the figures go (default: .bench/results/TIME.json)")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="add the figures of earlier runs (JSON)")
    parser.add_argument("--doc", type=Path, help="put the table into this page, between its marks for figures")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args(argv)
    args.peers = args.peers.split(",") if args.peers else QUICK_PEERS if args.quick else list(SCRIPTS)
    args.groups = args.groups or GROUPS
    args.rounds = args.rounds or (1 if args.quick else 3)
    for given, known in ((args.peers, SCRIPTS), (args.groups, GROUPS)):
        if unknown := [x for x in given if x not in known]:
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return args


def plan(peers: list[str], groups: list[str]) -> list[tuple[str, str]]:
    """Return the (group, peer) pairs of one round in order: the peers in turn, group by group."""
    order: list[tuple[str, str]] = []
    for group in groups:
        for peer in peers:
            for name in LIMIT_GROUPS[group] if peer == "limit" else [group]:
                if (name, peer) not in order:
                    order.append((name, peer))
    return order


def main(argv: list[str] | None = None) -> int:
    """Run the rounds; return the exit status."""
    args = arguments(argv)
    session = BenchSession(args.peers)

    def measured(item: tuple[str, str]) -> list[report.Result]:
        group, peer = item
        return measure(peer, session.pythons[peer], group, QUICK_SCALE if args.quick else 1.0, args.deadline)

    session.run(args.rounds, plan(list(session.pythons), args.groups), measured)
    about = session.about
    about |= {
        "when": datetime.date.today().strftime("%B %Y"),
        "versions": report.versions(session.results),
        "quick": args.quick,
    }
    target = session.keep(args.json)
    session.merge(args.merge)
    results = session.results
    peers = [p for p in SCRIPTS if p in args.peers or any(r["peer"] == p for r in results)]
    print("{cpu}, {cores} cores, {memory_gib} GiB, Linux {kernel}, Python {python}".format(**about))
    print(f"load {about['load_before']} before, {args.rounds} rounds, {about['seconds']} s")
    for peer, text in report.versions(results).items():
        print(f"{peer}: {text}")
    print()
    report.show(results, peers, args.all)
    if args.doc:
        report.write_into(args.doc, about, results, peers)
    print(f"figures: {os.path.relpath(target)}")
    return 1 if args.check and report.missed(report.medians(results)) else 0


if __name__ == "__main__":
    sys.exit(main())
