"""Run a peer's script with the commands of a Slurm of this machine: ``python -m bench.launch.within COMMAND``.

Peers have separate environments, which lack the packages to create such a Slurm.
"""

from __future__ import annotations

import subprocess
import sys

from bench.launch.hosts import engine
from tests.launchers.slurm import running


def main() -> int:
    """Run the command; return its exit status."""
    with engine(running):
        return subprocess.run(sys.argv[1:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
