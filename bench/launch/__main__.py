"""``python -m bench.launch``: measure in turn, print the table, and keep the figures as JSON.

How long hosts take from Slurm and by ssh, beside the engines' own start and beside Dask and Ray on the same Slurm; the
replacement of a lost node; a message between hosts; and a controller's own start. Slurm and sshd are real ones of this
machine, which only root can run; what cannot run is a note below the table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich import box
from rich.table import Table

from bench import report
from bench.launch.rows import DASK, LIMIT, OURS, RAY, ROWS
from bench.run import run_script
from bench.session import BenchSession

PEERS = [OURS, LIMIT, DASK, RAY]
GROUPS = {
    "start": [OURS],
    "slurm": [OURS, LIMIT, DASK, RAY],
    "replace": [OURS],
    "ssh8": [OURS, LIMIT],
    "ssh64": [OURS, LIMIT],
    "message": [OURS, LIMIT],
}
#: Omitted in a quick run: 64 workers take longer than everything else together.
LONG = ("ssh64",)
SCRIPTS = {
    "start": "controller",
    "slurm": "slurm",
    "replace": "slurm",
    "ssh8": "ssh",
    "ssh64": "ssh",
    "message": "ssh",
}
#: Peers with separate environments, which run inside a Slurm that is created for them.
CLUSTERS = {DASK: "dask_cluster", RAY: "ray_cluster"}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.launch", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"one short round, without {', '.join(LONG)}")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated (default: all)")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--deadline", type=float, default=300, help="seconds for one group of one peer (300)")
    parser.add_argument("--json", type=Path, help="where the figures go (default: .bench/results/launch-TIME.json)")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="add the figures of earlier runs (JSON)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args(argv)
    args.peers = args.peers.split(",")
    args.groups = args.groups or [group for group in GROUPS if not (args.quick and group in LONG)]
    args.rounds = args.rounds or (1 if args.quick else 3)
    for given, known in ((args.peers, PEERS), (args.groups, list(GROUPS))):
        if unknown := [x for x in given if x not in known]:
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return args


def plan(groups: list[str], peers: list[str]) -> list[tuple[str, str]]:
    """Return the (group, peer) pairs of one round in order: the peers in turn."""
    return [(group, peer) for group in groups for peer in GROUPS[group] if peer in peers]


def command(peer: str, python: Path, group: str) -> list[str]:
    """Return the command that runs one group of a peer."""
    if peer in CLUSTERS:
        inside = [sys.executable, "-m", "bench.launch.within"]
        return [*inside, str(python), "-m", f"bench.launch.{CLUSTERS[peer]}", group]
    return [str(python), "-m", f"bench.launch.{SCRIPTS[group]}", group]


def shown(found: report.Medians) -> Table:
    """Return one line for each measured row."""
    table = Table(box=box.MARKDOWN)
    table.add_column("what", no_wrap=True)
    for name in (*PEERS, "bar"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in ROWS:
        values = {peer: found.get((peer, row.metric)) for peer in PEERS}
        if any(value is not None for value in values.values()):
            bar = row.verdict(values[OURS], values[LIMIT])
            table.add_row(row.label, *map(report.number, values.values()), bar)
    return table


def missed(found: report.Medians) -> list[str]:
    """Return the rows in which a bar was missed."""
    return [
        row.label.strip()
        for row in ROWS
        if "MISS" in row.verdict(found.get((OURS, row.metric)), found.get((LIMIT, row.metric)))
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the rounds; return the exit status."""
    args = arguments(argv)
    session = BenchSession(args.peers)

    def measured(item: tuple[str, str]) -> list[report.Result]:
        group, peer = item
        scale = 0.25 if args.quick else 1.0
        return run_script(peer, command(peer, session.pythons[peer], group), f"launch-{group}", scale, args.deadline)

    try:
        session.run(args.rounds, plan(args.groups, list(session.pythons)), measured)
    finally:
        target = session.keep(args.json, "launch-")
    session.merge(args.merge)
    found = report.medians(session.results)
    report.printed(shown(found), session.results, session.about, target)
    return 1 if args.check and missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
