"""No core dumps of processes that hold a key: it would be in the dump, in a file or with the machine's crash reporter.

* A worker that listens at ``tcp://`` gives them up for good, soft limit and hard.
* A controller runs user code, so it only lowers its soft limit, when it reads a key; a program that wants a dump all
  the same can raise it. What this package starts from there gets the user's limit, and so do the user's ranks: they
  hold no key.

The limit is 1 and not 0: the kernel hands dumps to a program (``|`` in ``core_pattern``) whatever the limit is, except
at 1. ``PR_SET_DUMPABLE`` would do the same, but makes all of ``/proc/PID`` root's: py-spy, debuggers and the
user's own tools could not look into the process any more.
"""

from __future__ import annotations

import resource
from collections.abc import Generator
from contextlib import contextmanager

_NONE = 1
#: The user's soft limit, once this process has lowered its own.
_users: int | None = None


def give_up(for_good: bool) -> None:
    """Have no core dumps of this process.

    Args:
        for_good: lower the hard limit, too, which all that this process starts inherits.
    """
    global _users
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if _users is None:
        _users = soft
    none = min(_NONE, hard) if hard != resource.RLIM_INFINITY else _NONE
    resource.setrlimit(resource.RLIMIT_CORE, (none, none if for_good else hard))


@contextmanager
def users_limit() -> Generator[None]:
    """Within this, a process that is started inherits the limit that the user has set."""
    if _users is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (_users, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
