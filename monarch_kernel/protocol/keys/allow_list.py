"""Allow-lists: the keys that a process trusts besides its own, one public line each, like ``authorized_keys``.

A list is read again when it changes. An added key is trusted at once. A removed key is revoked once the file has not
changed for a moment, because an editor may empty a file before it writes it. This uses the modification time of the
file and not the time of the check, because days may pass between two checks. A list with an error has no effect: the
previous list stays in force, and the log reports the error. If the file is removed, no key is listed.
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

#: How long a list must be unchanged before a removed key is revoked (seconds).
SETTLE = 0.3

_WHAT = "allow-list"
_Stamp = tuple[int, int, int, int]


class AllowList:
    """The keys on a list, updated when its file changes.

    Args:
        path: the file.
        required: whether the file must exist at the start.

    Raises:
        KeyFileError: the list is required and missing, others may write to it, or it has an error.
    """

    def __init__(self, path: str, required: bool) -> None:
        self.path = path
        #: The allowed keys, by certificate.
        self.keys: dict[bytes, Public] = {}
        self._stamp: _Stamp | None = None  # the file's last known stamp; None: it does not exist
        self._pending: dict[bytes, Public] | None = None  # the file's current keys, while it may be changing
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
        """Check the file. Return whether the allowed keys have changed."""
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
        found = _keys_in(self.path, text)
        if stamp != self._stamp:
            self._stamp, self._changed_at = stamp, now - self._age(stamp)
        elif found != self._pending:  # a change may not change the stamp, so the file is read while it may be changing
            self._changed_at = now
        self._pending = found
        self.keys = self.keys | found
        self._complaint = ""

    def _age(self, stamp: _Stamp | None) -> float:
        """Compute the time since the file was changed or removed (seconds).

        A date in the future comes from another clock, and does not count as a change just now.
        """
        changed = stamp[0] / 1e9 if stamp is not None else _removed_at(self.path)
        return abs(time.time() - changed)

    def _read(self) -> tuple[_Stamp, str]:
        """Read the file's stamp and text."""
        fd = open_guarded(self.path, _WHAT, secret=False)  # open it each time: over NFS, only that finds a new version
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            stamp = found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino
            settled = stamp == self._stamp and self._pending is None
            return stamp, "" if settled else file.read(LARGEST).decode("utf-8", "replace")

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.error("%s; the previous list stays in force", text)


def _removed_at(path: str) -> float:
    """Find the latest time at which a file can have been removed: the date of its nearest existing folder."""
    folder = os.path.dirname(os.path.abspath(path))
    while folder != "/":
        with contextlib.suppress(OSError):
            return os.stat(folder).st_ctime
        folder = os.path.dirname(folder)
    return 0.0


def _keys_in(path: str, text: str) -> dict[bytes, Public]:
    return {key.certificate: key for _, key in parse_list(path, text) if key is not None}


def parse_list(path: str, text: str) -> Iterator[tuple[str, Public | None]]:
    """Yield the lines of a list, each with its key, or None for a comment or an empty line.

    Raises:
        KeyFileError: a line is invalid; the message has the line.
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
    """Read the keys on a list, in its order.

    Raises:
        KeyFileError: the list cannot be read, others may write to it, or it has an error.
    """
    try:
        text = read_guarded(path, _WHAT, secret=False).decode("utf-8", "replace")
    except FileNotFoundError:
        raise KeyFileError(f"there is no allow-list {path}") from None
    return [key for _, key in parse_list(path, text) if key is not None]


def add_key(path: str, key: Public) -> bool:
    """Add a key to a list, which is created if it does not exist.

    Returns:
        False if the list has it already.

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
    """Remove keys from a list, and leave a comment for each.

    Args:
        which: their name, or the start of a fingerprint (8 digits or more).

    Returns:
        The removed keys.

    Raises:
        KeyFileError: the list cannot be used, or no key matches.
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
    """Yield the lines of a list, locked against other writers. Changes are written at the end of the context."""
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
    """Open and lock the list. A write replaces the file, so a lock on an old version is released and taken again."""
    while True:
        if create:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        fd = open_guarded(path, _WHAT, secret=False, flags=os.O_RDWR)  # over NFS, a lock needs write access
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
