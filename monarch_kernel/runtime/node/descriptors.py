"""How many descriptors a process may have open.

A host agent has three descriptors for each rank, a fork server one, and each end of a conversation one. The usual soft
limit of 1,024 would end a mesh at some 250 ranks, though the hard limit is far higher nearly everywhere.

* The processes that run no user code (agents, workers, fork servers) raise their soft limit to the hard one when they
  start.
* A process that runs user code (a controller, a rank) has the limit of the user's shell, as ``select`` and programs
  that close every descriptor up to the limit expect it. Only when it comes near the limit, where it would fail soon,
  does it raise its own.
* What a process forks has the user's limit again. Programs that a controller or a rank starts with ``subprocess`` after
  it has come near the limit inherit the raised one; Python has no place where that could be put right.
"""

from __future__ import annotations

import os
import resource
import sys

#: No limit is raised further: some programs walk over every number below it.
CEILING = 1 << 20

#: The user's soft limit, while that of this process is another one.
_users: int | None = None
_registered = False


def _soft_and_hard() -> tuple[int, int]:
    soft, hard = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, hard


def _near_limit() -> int:
    return _soft_and_hard()[0] * 3 // 4


#: A descriptor from this number on says that the limit is near.
near = _near_limit()


def users_limit() -> int:
    """The soft limit that the user's shell gave this process."""
    return _soft_and_hard()[0] if _users is None else _users


def raise_limit(users: int = 0) -> bool:
    """Have as many descriptors as the system allows this process.

    Args:
        users: the limit for what is forked from here (0: that of this process so far).

    Returns:
        Whether the process has more now than before.
    """
    global _users, _registered, near
    soft, hard = _soft_and_hard()
    near = sys.maxsize
    target = min(hard, CEILING)
    if _users is None:
        _users = users or soft
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_restore)
    return target > soft and _set(target)


def _set(limit: int) -> bool:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (OSError, ValueError):  # forbidden in this sandbox: it goes on with what it has
        return False
    return True


def _restore() -> None:
    """In a fork: the user's limit."""
    global _users, near
    if _users is None:
        return
    users, _users = _users, None
    if users < _soft_and_hard()[0]:
        _set(users)
    near = _near_limit()
