"""``python -m tests.chaos``: chaos for as long as one likes."""

from __future__ import annotations

import argparse
import sys
import time

import tests.chaos
from monarch_kernel import actor as public
from monarch_kernel.actor import shutdown_context
from tests.chaos.engine import Chaos
from tests.chaos.hosts import several_hosts
from tests.chaos.load import DEADLINE
from tests.chaos.namespaces import several_namespaces


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=tests.chaos.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--hosts", type=int, default=0, help="on so many workers, and a spare one (default: this host)")
    parser.add_argument("--namespaces", action="store_true", help="those hosts are network namespaces; needs root")
    parser.add_argument("--ranks", type=int, help="on each host (4 on this one, 2 on workers)")
    found = parser.parse_args()
    public.unhandled_fault_hook = lambda _failure: None
    print(f"seed {found.seed}", flush=True)
    if found.hosts:
        place = several_namespaces if found.namespaces else several_hosts
        with place(found.seed, found.minutes, found.hosts, found.ranks or 2) as chaos:
            report = chaos.run()
            print(report, flush=True)
    else:
        report = Chaos(found.seed, found.minutes, found.ranks or 4).run()
        print(report, flush=True)
        shutdown_context().get(DEADLINE)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
