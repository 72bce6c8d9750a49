"""Disable core dumps of processes that hold a key, because a dump would contain the key.

* A worker that listens at ``tcp://`` lowers both its soft and its hard limit.
* A controller runs user code, so it lowers only its soft limit, when it reads a key; a program that needs a dump can
  raise it again. The processes that this package starts from a controller, including ranks, get the user's limit: they
  hold no key.

The limit is 1 and not 0: the kernel pipes dumps to a program (``|`` in ``core_pattern``) at any limit except 1.
``PR_SET_DUMPABLE`` would also disable dumps, but it makes root the owner of ``/proc/PID``, so that py-spy, debuggers
and the user's own tools could no longer inspect the process.
"""

from __future__ import annotations

import resource
from collections.abc import Generator
from contextlib import contextmanager

_NONE = 1
#: The user's soft limit, once this process has lowered its own.
_users: int | None = None


def give_up(for_good: bool) -> None:
    """Disable core dumps of this process.

    Args:
        for_good: also lower the hard limit, which child processes inherit.
    """
    global _users
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if _users is None:
        _users = soft
    none = min(_NONE, hard) if hard != resource.RLIM_INFINITY else _NONE
    resource.setrlimit(resource.RLIMIT_CORE, (none, none if for_good else hard))


@contextmanager
def users_limit() -> Generator[None]:
    """Return a context in which new child processes inherit the user's limit."""
    if _users is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (_users, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
