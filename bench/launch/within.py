"""Run a peer's script where Slurm's commands find a Slurm of this machine: ``python -m bench.launch.within COMMAND``.

Peers have environments of their own, which lack what makes one.
"""

from __future__ import annotations

import subprocess
import sys

from bench.launch.hosts import engine
from tests.launchers.slurm import running


def main() -> int:
    """The exit status of the command."""
    with engine(running):
        return subprocess.run(sys.argv[1:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
