"""`python -m bench`: measure, print the tables, and keep the figures as JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

from bench import report
from bench.environments import STATE, EnvironmentFailed, python_for
from bench.metrics import GROUPS, LIMIT_GROUPS
from bench.run import SCRIPTS, adopt_orphans, end_leftovers, measure

QUICK_PEERS = ["ours", "torchmonarch", "limit"]
QUICK_SCALE = 0.25


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
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


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = next(
        (x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x),
        platform.processor(),
    )
    memory = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def plan(peers: list[str], groups: list[str]) -> list[tuple[str, str]]:
    """(group, peer) in the order of one round: the peers in turn, group by group."""
    order: list[tuple[str, str]] = []
    for group in groups:
        for peer in peers:
            for name in LIMIT_GROUPS[group] if peer == "limit" else [group]:
                if (name, peer) not in order:
                    order.append((name, peer))
    return order


def progress(text: str) -> None:
    """One line on a terminal that is written over; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the rounds; the exit status."""
    args = arguments(argv)
    start = time.monotonic()
    adopt_orphans()
    # Ended from outside, it still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    about = machine()
    results: list[report.Result] = []
    pythons: dict[str, Path] = {}
    for peer in args.peers:
        try:
            pythons[peer] = python_for(peer)
        except EnvironmentFailed as error:
            results.append({"peer": peer, "metric": "group:install", "value": None, "note": str(error)})
    order = plan(list(pythons), args.groups)
    try:
        for n in range(args.rounds):
            for i, (group, peer) in enumerate(order):
                progress(f"round {n + 1} of {args.rounds}, {i + 1} of {len(order)}: {group} of {peer}")
                scale = QUICK_SCALE if args.quick else 1.0
                results += [{**r, "round": n} for r in measure(peer, pythons[peer], group, scale, args.deadline)]
    finally:
        end_leftovers()
        progress("")
    took = round(time.monotonic() - start)

    about |= {
        "when": datetime.date.today().strftime("%B %Y"),
        "versions": report.versions(results),
        "rounds": args.rounds,
        "quick": args.quick,
        "seconds": took,
    }
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    target = args.json or STATE / "results" / f"{now}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")

    for earlier in args.merge:
        results += json.loads(earlier.read_text())["results"]
    peers = [p for p in SCRIPTS if p in args.peers or any(r["peer"] == p for r in results)]
    print("{cpu}, {cores} cores, {memory_gib} GiB, Linux {kernel}, Python {python}".format(**about))
    print(f"load {about['load_before']} before, {args.rounds} rounds, {took} s")
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
