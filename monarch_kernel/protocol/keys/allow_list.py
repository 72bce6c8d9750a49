"""Allow-lists: the keys that a process trusts beside its own, one public line each, like ``authorized_keys``.

A list is read again when it changes. A key that is added is trusted at once. A key that is gone is revoked once the
file has not changed for a moment, as an editor may empty a file before it writes it. A list with an error changes
nothing: the previous list stays in force, and the log says what is wrong. If the file is removed, no key is listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Generator, Iterator

from monarch_kernel.protocol.keys.guarded_files import LARGEST, KeyFileError, open_guarded, read_guarded, replace
from monarch_kernel.protocol.keys.identity import Public, parse_line

log = logging.getLogger(__name__)

#: How long a list must be still before a key that has gone from it is revoked (seconds).
SETTLE = 0.3

_WHAT = "allow-list"
_Stamp = tuple[int, int, int]


class AllowList:
    """The keys on a list, kept as the file is.

    Args:
        path: the file.
        required: it must be there at the beginning.

    Raises:
        KeyFileError: the list is missing though required, others may write to it, or it has an error.
    """

    def __init__(self, path: str, required: bool) -> None:
        self.path = path
        #: The allowed keys, by certificate.
        self.keys: dict[bytes, Public] = {}
        self._stamp: _Stamp | None = None  # of the file as it was last seen; None: it is not there
        self._pending: dict[bytes, Public] | None = None  # as the file is now, while it may be changing
        self._changed_at = 0.0
        self._complaint = ""
        try:
            self._stamp, text = self._read()
        except FileNotFoundError:
            if required:
                raise KeyFileError(
                    f"there is no allow-list {path}: make it with 'monarch-kernel keys add {path} PUBLIC_LINE'"
                ) from None
        else:
            self.keys = self._pending = _keys_in(path, text)

    def refresh(self) -> bool:
        """Look at the file; whether other keys are allowed than before."""
        before, now = self.keys, time.monotonic()
        try:
            self._look(now)
        except (KeyFileError, OSError) as e:
            self._complain(str(e))
        if self._pending is not None and now - self._changed_at >= SETTLE:
            self.keys, self._pending = self._pending, None
        return self.keys != before

    def _look(self, now: float) -> None:
        try:
            stamp, text = self._read()
        except FileNotFoundError:
            stamp, text = None, ""
        if stamp == self._stamp and self._pending is None:
            return
        if stamp != self._stamp:
            self._stamp, self._changed_at = stamp, now
        # While the file may be changing it is read each time, as a change may leave the stamp as it is.
        found = _keys_in(self.path, text)
        if found != self._pending:
            self._changed_at = now
        self._pending = found
        self.keys = self.keys | found
        self._complaint = ""

    def _read(self) -> tuple[_Stamp, str]:
        """The file's stamp, and what it says."""
        fd = open_guarded(
            self.path, _WHAT, secret=False
        )  # opened each time: over NFS, that is what finds a new version
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            stamp = found.st_mtime_ns, found.st_size, found.st_ino
            settled = stamp == self._stamp and self._pending is None
            return stamp, "" if settled else file.read(LARGEST).decode("utf-8", "replace")

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.error("%s; the previous list stays in force", text)


def _keys_in(path: str, text: str) -> dict[bytes, Public]:
    return {key.certificate: key for _, key in parse_list(path, text) if key is not None}


def parse_list(path: str, text: str) -> Iterator[tuple[str, Public | None]]:
    """The lines of a list, each with its key, or None for a comment and an empty line.

    Raises:
        KeyFileError: a line is none of these; names it.
    """
    if text and not text.endswith("\n"):
        raise KeyFileError(f"the allow-list {path} ends in the middle of a line: end it with a newline")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            yield line, None
            continue
        try:
            yield line, parse_line(line)
        except ValueError as e:
            raise KeyFileError(f"the allow-list {path}, line {number}: {e}") from None


# -- changing ---------------------------------------------------------------------------------------


def read_list(path: str) -> list[Public]:
    """The keys on a list, in its order.

    Raises:
        KeyFileError: it cannot be read, others may write to it, or it has an error.
    """
    try:
        text = read_guarded(path, _WHAT, secret=False).decode("utf-8", "replace")
    except FileNotFoundError:
        raise KeyFileError(f"there is no allow-list {path}") from None
    return [key for _, key in parse_list(path, text) if key is not None]


def add_key(path: str, key: Public) -> bool:
    """Put a key on a list, which is made if it is not there.

    Returns:
        False if it stands there already.

    Raises:
        KeyFileError: the list cannot be used, or has another key of this name.
    """
    with _opened(path, create=True) as lines:
        for _, known in lines:
            if known is not None and known.certificate == key.certificate:
                return False
            if known is not None and known.name == key.name:
                raise KeyFileError(
                    f"{path} has another key of the name {key.name} ({known.fingerprint[:16]}): "
                    f"revoke that first ('monarch-kernel keys revoke {path} {known.fingerprint[:16]}'), or give --name"
                )
        lines.append((key.line, key))
    return True


def revoke_keys(path: str, which: str) -> list[Public]:
    """Take keys from a list, which keeps a comment about it.

    Args:
        which: their name, or the beginning of a fingerprint (8 digits or more).

    Returns:
        Those that were taken.

    Raises:
        KeyFileError: the list cannot be used, or no key or keys of several names answer to that.
    """
    with _opened(path, create=False) as lines:
        gone = [key for _, key in lines if key is not None and key.name == which]
        if not gone and len(which) >= 8:
            gone = [key for _, key in lines if key is not None and key.fingerprint.startswith(which.lower())]
        if not gone:
            names = ", ".join(key.name for _, key in lines if key is not None) or "none"
            raise KeyFileError(f"{path} has no key {which!r}; the keys on it: {names}")
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        lines[:] = [
            (f"# revoked {when}: {key.name} {key.fingerprint}", None)
            if key is not None and key in gone
            else (line, key)
            for line, key in lines
        ]
    return gone


@contextlib.contextmanager
def _opened(path: str, create: bool) -> Generator[list[tuple[str, Public | None]], None, None]:
    """The lines of a list, locked against other writers; changes are written at the end."""
    try:
        fd = _locked(path, create)
    except FileNotFoundError:
        raise KeyFileError(f"there is no allow-list {path}") from None
    except OSError as e:
        raise KeyFileError(f"cannot use the allow-list {path}: {e.strerror}") from e
    with open(fd, "rb") as file:
        text = file.read(LARGEST).decode("utf-8", "replace")
        lines = list(parse_list(path, text))
        yield lines
        changed = "".join(f"{line}\n" for line, _ in lines)
        if changed != text:
            try:
                replace(path, changed.encode(), os.fstat(fd).st_mode & 0o777)
            except OSError as e:
                raise KeyFileError(f"cannot write the allow-list {path}: {e.strerror}") from e


def _locked(path: str, create: bool) -> int:
    """The list, open and locked; it is replaced when it is written, so the lock may be that of an old version."""
    while True:
        if create:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        fd = open_guarded(path, _WHAT, secret=False, flags=os.O_RDWR)  # over NFS a lock needs that
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
