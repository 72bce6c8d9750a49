"""``python -m tests.sync.chaos``: as many kills as one likes."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import tests.sync.chaos
from tests.sync.chaos.engine import chaos


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sync.chaos",
        description=tests.sync.chaos.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--hosts", type=int, default=2)
    found = parser.parse_args()
    print(f"seed {found.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mk-sync-") as folder:
        report = chaos(found.seed, found.kills, Path(folder), found.hosts)
    print(report, flush=True)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
