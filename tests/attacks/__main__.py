"""``python -m tests.attacks``: every attack on one worker, by the ten thousand."""

from __future__ import annotations

import argparse
import resource
import sys

import tests.attacks
from monarch_kernel import actor as public
from monarch_kernel.actor import shutdown_context
from tests.attacks.storm import storm
from tests.workers import PATIENCE, team

COUNTS = {
    "silent": 10_000,
    "garbage": 98_503,
    "null mechanism": 107_598,
    "giant lengths": 58_654,
    "wrong hello": 32_623,
    "random headers": 3_000,
    "junk": 5_000,
    "typed": 1_000,
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks",
        description=tests.attacks.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", type=float, default=1.0, help="of the counts (default: 1)")
    parser.add_argument("--only", choices=COUNTS, action="append", help="these attacks; again for more")
    parser.add_argument("--log", action="store_true", help="print the worker's log")
    found = parser.parse_args()
    public.unhandled_fault_hook = lambda _failure: None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    with team("tcp") as members:
        worker = members.start()
        counts = {kind: max(1, round(COUNTS[kind] * found.part)) for kind in found.only or COUNTS}
        report = storm(members, counts, lambda line: print(line, flush=True))
        print(report, flush=True)
        if found.log:
            print(worker.log())
        shutdown_context().get(PATIENCE)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
