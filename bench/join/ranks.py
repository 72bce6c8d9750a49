"""``python -m bench.join.ranks NAME FIRST COUNT WORLD``: so many ranks of a job in this process, until its input ends.

Each has a door of its own, which announces it, tells who it is and lets the tools in as in a process of its own. Ranks
are told apart by process, so each has another space of process ids.
"""

from __future__ import annotations

import sys

from monarch_kernel.engines.join import announcements
from monarch_kernel.engines.join.identity import RankIdentity
from monarch_kernel.engines.join.listener import JoinListener

#: Greater than the spaces that Linux numbers (32 bits).
_SPACES = 1 << 40


def main() -> None:
    """Announce the ranks, say so, and wait."""
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
