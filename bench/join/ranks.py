"""``python -m bench.join.ranks NAME FIRST COUNT WORLD``: ranks of a job in one process, until its input ends.

Each rank has a separate listener, which announces it, identifies it and accepts the tools as in a separate process.
Ranks are distinguished by process, so each gets a different PID namespace.
"""

from __future__ import annotations

import sys

from monarch_kernel.engines.join import announcements
from monarch_kernel.engines.join.identity import RankIdentity
from monarch_kernel.engines.join.listener import JoinListener

#: Greater than the numbers of Linux's namespaces (32 bits).
_SPACES = 1 << 40


def main() -> None:
    """Announce the ranks, report it, and wait."""
    name, first, count, world = sys.argv[1], *map(int, sys.argv[2:])
    doors: list[JoinListener] = []
    try:
        for rank in range(first, first + count):
            announcements.pid_space = lambda rank=rank: _SPACES + rank
            doors.append(JoinListener(name, RankIdentity(rank, world, rank - first, "bench")))
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        for door in doors:
            door.close()


if __name__ == "__main__":
    main()
