"""A log file that only grows. Lines are appended whole, and the file is recreated after log rotation."""

from __future__ import annotations

import errno
import os
import stat
import threading

from monarch_kernel.protocol.private_files import NotPrivateError, user_name


class AppendOnlyFile:
    """A file of mode 0600 to which lines are appended. It is thread-safe.

    Args:
        path: the path of the file, which is created if it is missing. A link is not followed. An existing file must
            belong to this user and be inaccessible to others.

    Raises:
        NotPrivateError: it belongs to another user, or others may access it.
        OSError: it cannot be opened for appending.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = _open(path)

    def append(self, line: str) -> None:
        """Append a line. Does nothing after ``close``.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            if self._fd >= 0:
                self._follow()
                os.write(self._fd, f"{line}\n".encode("utf-8", "replace"))  # one write, so that lines do not mix

    def close(self) -> None:
        """Close the file. Closing it again has no effect."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _follow(self) -> None:
        """Continue in a new file if this one was moved away, as by log rotation."""
        try:
            same = os.path.samestat(os.fstat(self._fd), os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            same = False
        if not same:
            fd = _open(self._path)
            os.close(self._fd)
            self._fd = fd


def _open(path: str) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        if about.st_uid != os.geteuid():
            raise NotPrivateError(f"{path} belongs to {user_name(about.st_uid)}, so nothing is written to it")
        if about.st_mode & 0o077:
            raise NotPrivateError(
                f"other users may read or write {path} (mode {stat.S_IMODE(about.st_mode):o}): run chmod 600, or name "
                "another file"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd
