"""Errors of the file system as errors of the store: what cannot be stored, where, why, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager

from workspace_sync.model.errors import StoreError
from workspace_sync.model.manifest import printable

_ELSEWHERE = "name a folder elsewhere in MONARCH_KERNEL_SYNC_FOLDER"
_ADVICE = {
    errno.ENOSPC: f"the disk is full: free some space, or {_ELSEWHERE}",
    errno.EDQUOT: f"your quota is used up: free some space, or {_ELSEWHERE}",
    errno.EROFS: f"the file system is mounted read-only: {_ELSEWHERE}",
    errno.EACCES: f"this user may not write there: {_ELSEWHERE}",
    errno.EPERM: f"this user may not do that there: {_ELSEWHERE}",
    errno.ENAMETOOLONG: f"the name is too long for this file system: shorten it, ignore it, or {_ELSEWHERE}",
    errno.EIO: "the disk has failed: see the kernel's log (dmesg)",
    errno.EMFILE: "this process has too many open files: raise its limit (ulimit -n)",
}


def explained(e: OSError, path: str) -> StoreError:
    """An error of the file system, with the path and what to do."""
    advice = _ADVICE.get(e.errno or 0)
    why = e.strerror or str(e)
    return StoreError(f"{path}: {why}" + (f" ({advice})" if advice else ""))


@contextmanager
def explain(path: str | bytes, below: bytes = b"") -> Generator[None]:
    """Turn errors of the file system into ``StoreError``.

    Args:
        path: the folder or file that the block works on.
        below: a path within it.
    """
    try:
        yield
    except OSError as e:
        whole = printable(os.fsencode(path))
        raise explained(e, f"{whole}/{printable(below)}" if below else whole) from e
