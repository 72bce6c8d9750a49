"""Read and write the files that determine which keys are trusted. Only this user or root may be able to change them.

Their folders are not checked. Another user with write access to a folder can remove a file, or replace it by one that
also belongs to this user or root; without a list no key is accepted.
"""

from __future__ import annotations

import grp
import os
import stat

from monarch_kernel.protocol.private_files import user_name, write_beside, write_own_file

#: Larger than any of these files; limits the read of a wrong file (bytes).
LARGEST = 4 << 20


class KeyFileError(ValueError):
    """There is no usable key file or allow-list. The message names the file, the cause and a remedy."""


class KeyFileExistsError(KeyFileError):
    """The key file already exists."""


def expanded(path: str | os.PathLike[str]) -> str:
    """Replace ``~`` in a path.

    Raises:
        KeyFileError: there is no such user, or this user has no home folder.
    """
    named = os.fspath(path)
    found = os.path.expanduser(named)
    if found.startswith("~") and not os.path.lexists(found):
        raise KeyFileError(f"there is no home folder for the {named.split('/')[0]} in {named}: name the whole path")
    return found


def open_guarded(path: str, what: str, secret: bool, flags: int = os.O_RDONLY) -> int:
    """Open a file, and check that no other user can change it (or read it, if it is a secret).

    Returns:
        A descriptor, for the caller to close.

    Raises:
        FileNotFoundError: the file does not exist.
        KeyFileError: the file cannot be read, or others may use it.
    """
    try:
        # Open first and check the descriptor afterwards: it is the same file then. Opening a pipe must not block.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise KeyFileError(f"cannot read the {what} {path}: {e.strerror}") from e
    try:
        _check(fd, path, what, secret)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(fd: int, path: str, what: str, secret: bool) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"the {what} {path} is not a regular file")
    open_to_others = found.st_mode & (0o077 if secret else 0o022)
    if open_to_others and not _is_mounted_secret(found):
        allowed = "use" if secret else "write to"
        mode = "600" if secret else "go-w"
        raise KeyFileError(f"others than its owner may {allowed} the {what} {path}: run 'chmod {mode} {path}'")
    if found.st_uid not in (os.geteuid(), 0):
        raise KeyFileError(
            f"the {what} {path} belongs to {user_name(found.st_uid)}, which could change "
            "the keys that this process trusts: use a copy that is yours"
        )


def _is_mounted_secret(found: os.stat_result) -> bool:
    """Return whether the file belongs to root and is otherwise readable only by an unnamed group of this process.

    A Secret that Kubernetes mounts into a Pod with ``fsGroup`` is such a file: the group exists only for this Pod.
    """
    if found.st_uid != 0 or found.st_mode & 0o037 or found.st_gid not in {os.getegid(), *os.getgroups()}:
        return False
    try:
        grp.getgrgid(found.st_gid)
    except KeyError:
        return True
    return False


def read_guarded(path: str, what: str, secret: bool) -> bytes:
    """Read a whole file with the checks of ``open_guarded``.

    Raises: see ``open_guarded``.
    """
    fd = open_guarded(path, what, secret)
    with open(fd, "rb") as file:
        try:
            return file.read(LARGEST)
        except OSError as e:
            raise KeyFileError(f"cannot read the {what} {path}: {e.strerror}") from e


def write_new(path: str, data: bytes) -> None:
    """Write a new file of mode 0600 atomically.

    Raises:
        FileExistsError: the file already exists.
        OSError: it cannot be written.
    """
    beside = write_beside(path, data)
    try:
        os.link(beside, path)
    finally:
        os.unlink(beside)


def replace(path: str, data: bytes, mode: int) -> None:
    """Replace a file atomically: a reader gets the old or the new content. A link is kept and its target replaced.

    Raises:
        OSError: it cannot be written.
    """
    write_own_file(os.path.realpath(path), data, mode)
