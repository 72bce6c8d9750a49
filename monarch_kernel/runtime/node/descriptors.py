"""Manage the limits on open descriptors.

A host agent needs three descriptors for each rank, a fork server one, and each end of a link one. The usual soft limit
of 1,024 would limit a mesh to about 250 ranks, although the hard limit is far higher on nearly all systems.

* Processes that run no user code (agents, workers, fork servers) raise their soft limit to the hard one when they
  start.
* A process that runs user code (a controller, a rank) keeps the limit of the user's shell, because ``select`` and
  programs that close every descriptor up to the limit expect it. It raises its limit only when it comes near it and
  would soon fail.
* A fork of such a process gets the user's limit back. Programs that a controller or a rank starts with ``subprocess``
  after that raise inherit the raised limit; Python has no hook to restore it there.
"""

from __future__ import annotations

import os
import resource
import sys

#: The highest limit set here: some programs iterate over every number below the limit.
CEILING = 1 << 20

#: The user's soft limit, while this process has another one.
_users: int | None = None
_registered = False


def _soft_and_hard() -> tuple[int, int]:
    soft, hard = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, hard


def _near_limit() -> int:
    return _soft_and_hard()[0] * 3 // 4


#: A descriptor of this number or higher means that the limit is near.
near = _near_limit()


def limit() -> int:
    """Return the soft limit of this process now."""
    return _soft_and_hard()[0]


def users_limit() -> int:
    """Return the soft limit that the user's shell gave this process."""
    return _soft_and_hard()[0] if _users is None else _users


def raise_limit(users: int = 0) -> bool:
    """Raise the limit of this process as far as the system allows.

    Args:
        users: the limit for forks of this process (0: its limit so far).

    Returns:
        Whether the limit is higher than before.
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
    except (OSError, ValueError):  # a sandbox forbids it: keep the old limit
        return False
    return True


def _restore() -> None:
    """Restore the user's limit in a forked child."""
    global _users, near
    if _users is None:
        return
    users, _users = _users, None
    if users < _soft_and_hard()[0]:
        _set(users)
    near = _near_limit()
