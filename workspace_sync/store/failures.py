"""Convert errors of the file system to errors of the store, with path, cause, and remedy."""

from __future__ import annotations

import errno
import os

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
    """Convert an error of the file system, with its path and the remedy."""
    advice = _ADVICE.get(e.errno or 0)
    why = e.strerror or str(e)
    return StoreError(f"{path}: {why}" + (f" ({advice})" if advice else ""))


class ExplainedErrors:
    """Context manager of ``explain``. Entered for each file, so it is not a generator."""

    __slots__ = ("_below", "_path")

    def __init__(self, path: str | bytes, below: bytes) -> None:
        self._path = path
        self._below = below

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, e: BaseException | None, trace: object) -> None:
        if isinstance(e, OSError) and not isinstance(e, InterruptedError):  # work that was cancelled
            whole = printable(os.fsencode(self._path))
            raise explained(e, f"{whole}/{printable(self._below)}" if self._below else whole) from e


def explain(path: str | bytes, below: bytes = b"") -> ExplainedErrors:
    """Convert errors of the file system to ``StoreError``.

    Args:
        path: the folder or file that the block works on.
        below: a path within it.
    """
    return ExplainedErrors(path, below)
