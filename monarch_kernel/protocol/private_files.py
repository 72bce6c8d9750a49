"""Private folders that only this user can use, and the check that this package has created a folder.

Sockets, logs and descriptions are kept in folders of mode 0700. Such a folder is opened component by component, each
relative to the descriptor of its parent, so no other user can redirect the path or replace a part of it between a
check and a use. Files in the folder are opened relative to its descriptor.

Each folder that this package creates has a file ``lock``. Its text states the folder's purpose, and the processes that
use the folder hold a lock on it. Only a process that holds that lock removes a folder, and only file by file: files
that this package does not write are kept, and then the folder is kept, too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import BinaryIO

LOCK = "lock"
_ABOUT = "This folder belongs to monarch_kernel"
_LINKS = 40
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
#: Larger than any description that this package writes (bytes).
_LARGEST = 1 << 20


class NotPrivateError(PermissionError):
    """Other users can access a folder, file or socket. The message names its owner and a remedy."""


class NotOursError(OSError):
    """This package did not create the folder, and therefore changes nothing in it."""


def user_name(uid: int) -> str:
    """Return the name of a user, for messages."""
    import pwd  # only messages need it

    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"the user with uid {uid}"


# -- opening a path -------------------------------------------------------------------------------


def open_way(path: str) -> int:
    """Open a folder (``O_PATH``) whose path no other user can change. Return the descriptor.

    As with OpenSSH's ``StrictModes``, each folder of the path must belong to this user or to root, and only they may
    write to it, unless it has the sticky bit. Symbolic links in the path must also belong to this user or to root.

    Raises:
        NotPrivateError: another user can change the path.
        OSError: there is no such folder.
    """
    fd = os.open("/", _WAY)
    at = "/"
    links = 0
    todo = _reversed(os.path.abspath(path))
    try:
        while todo:
            name = todo.pop()
            whole = os.path.join(at, name)
            try:
                below = os.open(name, _STEP, dir_fd=fd)
            except OSError as e:
                raise type(e)(e.errno, e.strerror, whole) from None
            about = os.fstat(below)
            if not stat.S_ISLNK(about.st_mode):
                os.close(fd)
                fd, at = below, whole
                _check_way(at, about)
                continue
            target = os.readlink("", dir_fd=below)
            os.close(below)
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if about.st_uid not in (0, os.geteuid()):
                raise NotPrivateError(f"{whole} is a link of {user_name(about.st_uid)}, so it is not followed")
            todo += _reversed(target)
            if target.startswith("/"):
                os.close(fd)
                fd, at = os.open("/", _WAY), "/"
    except BaseException:
        os.close(fd)
        raise
    return fd


_WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def _reversed(path: str) -> list[str]:
    """Split a path into its components, in reverse order."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _check_way(path: str, about: os.stat_result) -> None:
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if about.st_uid not in (0, os.geteuid()) and not _is_unmapped_root(about.st_uid):
        raise NotPrivateError(f"{path} belongs to {user_name(about.st_uid)}, which could replace its content")
    others = stat.S_IWOTH if about.st_gid == os.getegid() == os.geteuid() else stat.S_IWOTH | stat.S_IWGRP
    if about.st_mode & others and not about.st_mode & stat.S_ISVTX:
        raise NotPrivateError(
            f"other users may write to {path} (mode {stat.S_IMODE(about.st_mode):o}), and could replace what is in it: "
            "take that away (chmod go-w), or use a folder that only you can write to"
        )


def _is_unmapped_root(uid: int) -> bool:
    """Detect the machine's root, seen from a container whose user namespace does not map its uid."""
    if uid == 0:
        return False
    try:
        with open("/proc/sys/kernel/overflowuid", "rb") as file:
            if int(file.read()) != uid:
                return False
        with open("/proc/self/uid_map", "rb") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
    except (OSError, ValueError):
        return False
    return not any(first <= uid < first + count for first, _, count in ranges)


def temporary_folder(longest: int) -> str:
    """Find the folder for temporary files: the first that is writable and that no other user can change.

    Args:
        longest: the longest path allowed (bytes), because the path of a Unix socket has at most 107.

    Raises:
        NotPrivateError: other users could replace this user's files in it.
    """
    why: list[str] = []
    for path in temporary_folders(longest):
        try:
            os.close(open_way(path))
        except OSError as e:
            why.append(str(e))
            continue
        if os.access(path, os.W_OK | os.X_OK):
            return path
        why.append(f"{path} is not writable")
    raise NotPrivateError(f"no temporary folder is safe to use: {'; '.join(why)}; name one of your own in TMPDIR")


def temporary_folders(longest: int) -> list[str]:
    """List the candidates for temporary folders: that of ``TMPDIR``, and those of the system.

    In a container, ``/tmp`` is often a world-writable volume without the sticky bit.
    """
    found = dict.fromkeys((*_usual_folder(), *_TEMPORARY))
    return [path for path in found if len(os.fsencode(path)) <= longest]


def _usual_folder() -> list[str]:
    """Find the folder that ``tempfile`` uses or would choose, if there is one.

    Importing that module takes longer than everything else that a process does before it has its folder.
    """
    chosen = getattr(sys.modules.get("tempfile"), "tempdir", None)
    if chosen:
        return [os.path.abspath(os.fsdecode(chosen))]
    named = [os.path.abspath(path) for name in ("TMPDIR", "TEMP", "TMP") if (path := os.environ.get(name))]
    usable = filter(_takes_files, (*named, *_TEMPORARY))
    return [path for path in (next(usable, None),) if path]


def _takes_files(path: str) -> bool:
    """Try whether a file with content can be written in a folder. The disk may be full."""
    file = os.path.join(path, f"monarch-{os.urandom(8).hex()}")
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        return os.write(fd, b"\0") == 1
    except OSError:
        return False
    finally:
        os.close(fd)
        os.unlink(file)


# -- folders of this user -----------------------------------------------------------------------


class PrivateFolder:
    """A folder of this user that no other user can use, held open by its descriptor. Close it after use.

    Args:
        path: its path, for messages and for its sockets, which are addressed by path.
        fd: a descriptor of the folder.
        parent: a descriptor of its parent folder. The object takes over both.
    """

    def __init__(self, path: str, fd: int, parent: int) -> None:
        self.path = path
        self.fd = fd
        self._parent = parent
        #: The descriptor that holds the lock; -1: this process does not hold it.
        self.lock_fd = -1

    @classmethod
    def open(cls, path: str, *, visible: bool = False) -> PrivateFolder:
        """Open an existing folder.

        Args:
            visible: whether other users may read it, as long as they cannot write to it.

        Raises:
            FileNotFoundError: the folder does not exist.
            NotPrivateError: it belongs to another user, is open to others, is a link, or could be replaced by others.
        """
        path = os.path.abspath(path)
        parent = open_way(os.path.dirname(path))
        try:
            return cls(path, _open_own(path, parent, 0o022 if visible else 0o077), parent)
        except BaseException:
            os.close(parent)
            raise

    @classmethod
    def make(cls, path: str) -> PrivateFolder:
        """Create a folder of mode 0700.

        Raises:
            FileExistsError: the name exists.
            NotPrivateError: other users could replace it.
        """
        path = os.path.abspath(path)
        parent = open_way(os.path.dirname(path))
        try:
            os.mkdir(os.path.basename(path), 0o700, dir_fd=parent)
            return cls(path, _open_own(path, parent, 0o077), parent)
        except BaseException:
            os.close(parent)
            raise

    @classmethod
    def made(cls, path: str) -> PrivateFolder:
        """Open a folder of mode 0700, created with those above it that do not exist.

        Raises:
            NotPrivateError: other users can access or replace it.
        """
        missing: list[str] = []
        at = path
        while not os.path.lexists(at):
            missing.append(at)
            at = os.path.dirname(at)
        for each in reversed(missing):
            try:
                cls.make(each).close()
            except FileExistsError:
                pass  # another process has just created it
        return cls.open(path)

    def names(self) -> list[str]:
        """List the names in the folder, sorted."""
        return sorted(os.listdir(self.fd))

    def open_file(self, name: str, flags: int) -> int:
        """Open a regular file of this user in the folder, without following a link.

        Raises:
            NotPrivateError: the name is not such a file.
        """
        path = os.path.join(self.path, name)
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except OSError as e:
            raise type(e)(e.errno, e.strerror, path) from None
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            os.close(fd)
            raise NotPrivateError(f"{path} is not a regular file of yours")
        return fd

    def read(self, name: str) -> bytes:
        """Read a small file in the folder."""
        with os.fdopen(self.open_file(name, os.O_RDONLY), "rb") as file:
            return file.read(_LARGEST)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file in the folder atomically."""
        new = name + NEW
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with os.fdopen(self.open_file(new, flags), "wb") as file:
                file.write(data)
            os.rename(new, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError as e:
            raise type(e)(e.errno, e.strerror, os.path.join(self.path, name)) from None

    # -- ownership and removal -----------------------------------------------------------------------

    def claim(self, what: str) -> None:
        """Mark this new folder as this package's, in use by this process and all that inherit ``lock_fd``.

        Raises:
            OSError: the folder is not writable; it is then removed again, and this object is closed.
        """
        new = LOCK + NEW
        try:
            # Lock the file before it gets its name, so that no process finds it unlocked.
            fd = self.open_file(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.write(fd, _about(what))
                os.rename(new, LOCK, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            except BaseException:
                os.close(fd)
                raise
        except OSError as e:
            self.discard(new)
            self._rmdir()
            self.close()
            raise type(e)(e.errno, e.strerror, self.path) from None
        self.lock_fd = fd

    def hold(self, lock_fd: int, what: str) -> None:
        """Share a lock that another process has passed on; the caller keeps its descriptor.

        Raises:
            NotOursError: the descriptor is not this folder's lock.
        """
        self._check_lock(lock_fd, what)
        self.lock_fd = os.dup(lock_fd)

    def take(self, what: str) -> bool:
        """Take the lock if no live process holds it. Return whether it was free.

        Raises:
            NotOursError: this package did not create the folder for that purpose.
        """
        try:
            fd = self.open_file(LOCK, os.O_RDWR)
        except OSError as e:
            raise NotOursError(f"{self.path} is no {what} of monarch_kernel: it has no file {LOCK!r} of yours") from e
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not _is_about(fd, what):
                    raise self._not_ours(what) from None
                return False
            self._check_lock(fd, what)
            self.lock_fd, fd = fd, -1
            return True
        finally:
            if fd >= 0:
                os.close(fd)

    def _check_lock(self, fd: int, what: str) -> None:
        """Raise unless the descriptor is this folder's lock and its text identifies the folder as this package's."""
        held = os.fstat(fd)
        try:
            found = os.stat(LOCK, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            found = None
        if found is None or (held.st_dev, held.st_ino) != (found.st_dev, found.st_ino) or not _is_about(fd, what):
            raise self._not_ours(what)

    def _not_ours(self, what: str) -> NotOursError:
        return NotOursError(f"{self.path} is no {what} of monarch_kernel: its file {LOCK!r} does not say so")

    def remove(self, files: Iterable[str]) -> list[str]:
        """Remove the folder, whose lock this process holds, and the files in it with these names.

        Args:
            files: names; a leading ``*`` matches anything, and one ``/`` selects a subfolder.

        Returns:
            The names of other files. If there are any, they are kept, and so are the folder and its lock.
        """
        assert self.lock_fd >= 0, "only a folder whose lock is held is removed"
        patterns = [*files, LOCK + NEW]
        left = [name for name in self._clear("", patterns) if name != LOCK]
        if not left:
            self.discard(LOCK)
            self._rmdir()
        return left

    def _clear(self, inside: str, patterns: list[str]) -> list[str]:
        """Remove the files that match the patterns. Return the remaining names."""
        left: list[str] = []
        for name in self.names():
            whole = inside + name
            is_file = any(_fits(whole, pattern) for pattern in patterns)
            is_folder = any(pattern.startswith(f"{whole}/") for pattern in patterns)
            gone = (is_file and self.discard(name)) or (is_folder and self._clear_within(name, patterns, left))
            if not gone:
                left.append(whole)
        return left

    def _clear_within(self, name: str, patterns: list[str], left: list[str]) -> bool:
        """Remove a subfolder and its files with ``_clear``. Return whether it is gone."""
        path = os.path.join(self.path, name)
        try:
            below = PrivateFolder(path, _open_own(path, self.fd, 0o077), os.dup(self.fd))
        except OSError:
            return False
        with below:
            left += below._clear(f"{name}/", patterns)
            return below._rmdir()

    def discard(self, name: str) -> bool:
        """Remove a file or socket of this user. Return whether it is gone."""
        return _unlink(name, self.fd, (stat.S_IFREG, stat.S_IFSOCK))

    def _rmdir(self) -> bool:
        try:
            os.rmdir(os.path.basename(self.path), dir_fd=self._parent)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptors, which releases the lock unless other processes also hold it."""
        for fd in (self.fd, self._parent, self.lock_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._parent = self.lock_fd = -1

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: The suffix of a file's name while it is written.
NEW = ".new"


def _open_own(path: str, parent: int, closed_to: int) -> int:
    """Open the last component of a path, a folder of this user."""
    name = os.path.basename(path)
    try:
        about = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError as e:
        raise type(e)(e.errno, e.strerror, path) from None
    if about.st_uid != os.geteuid():
        kind = "is a link of" if stat.S_ISLNK(about.st_mode) else "belongs to"
        raise NotPrivateError(f"{path} {kind} {user_name(about.st_uid)}, so it is not used: name another folder")
    if not stat.S_ISDIR(about.st_mode):
        kind = "a link: name the folder itself" if stat.S_ISLNK(about.st_mode) else "not a folder"
        raise NotPrivateError(f"{path} is {kind}")
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    about = os.fstat(fd)
    if about.st_uid != os.geteuid() or about.st_mode & closed_to:
        os.close(fd)
        raise NotPrivateError(
            f"{path} is open to other users (mode {stat.S_IMODE(about.st_mode):o}), so it is not used: "
            "run chmod 700 if it is yours alone, or name another folder"
        )
    return fd


def _about(what: str) -> bytes:
    return f"{_ABOUT} ({what}). It goes when the last process that holds a lock on this file has ended.\n".encode()


def _is_about(fd: int, what: str) -> bool:
    wanted = f"{_ABOUT} ({what})".encode()
    return os.pread(fd, len(wanted), 0) == wanted


def _fits(name: str, pattern: str) -> bool:
    folder, _, last = pattern.rpartition("/")
    inside, _, name = name.rpartition("/")
    return folder == inside and (name.endswith(last[1:]) if last.startswith("*") else name == last)


def _unlink(name: str, folder: int, kinds: tuple[int, ...], inode: tuple[int, int] | None = None) -> bool:
    try:
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_IFMT(about.st_mode) not in kinds or about.st_uid != os.geteuid():
            return False
        if inode is not None and inode != (about.st_dev, about.st_ino):
            return False
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


# -- single files -----------------------------------------------------------------------------------


def remove_socket(path: str, inode: tuple[int, int] | None = None) -> bool:
    """Remove a socket of this user. Return whether it is gone. Anything else with that name is kept.

    Args:
        inode: device and inode number of the socket, if another socket may have its name now.
    """
    try:
        folder = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return not os.path.lexists(path)
    try:
        return _unlink(os.path.basename(path), folder, (stat.S_IFSOCK,), inode)
    finally:
        os.close(folder)


def remove_torch_memory(pid: int, folder: str = "/dev/shm") -> None:
    """Remove shared memory that torch uses for reference counts of GPU memory, left by a process of this user."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # a system without it
        return
    for name in os.listdir(fd):
        if name.startswith(f"torch_{pid}_"):
            _unlink(name, fd, (stat.S_IFREG,))
    os.close(fd)


def read_own_file(path: str, limit: int = _LARGEST) -> bytes:
    """Read a regular file that belongs to this user and that no other user can write to.

    Raises:
        FileNotFoundError: the file does not exist.
        NotPrivateError: another user has written it, or could have written it.
        OSError: it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise NotPrivateError(f"{path} is a link, and is not followed: name the file itself") from None
        if e.errno == errno.EACCES and (uid := os.lstat(path).st_uid) != os.geteuid():
            raise NotPrivateError(f"{path} belongs to {user_name(uid)}, so it is not read") from None
        raise
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if about.st_uid != os.geteuid():
            raise NotPrivateError(f"{path} belongs to {user_name(about.st_uid)}, so it is not read")
        if not stat.S_ISREG(about.st_mode):
            raise NotPrivateError(f"{path} is not a regular file")
        if about.st_mode & 0o022:
            raise NotPrivateError(
                f"other users may write to {path} (mode {stat.S_IMODE(about.st_mode):o}), so it is not read: if what "
                "is in it is yours, run chmod 600"
            )
        return file.read(limit)


def write_own_file(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file atomically; a link of that name is replaced, not followed.

    Raises:
        OSError: the file cannot be written.
    """
    with written_whole(path, mode) as file:
        file.write(data)


def write_beside(path: str, data: bytes, mode: int = 0o600) -> str:
    """Write a temporary file next to a path, for the caller to rename or link to it. Return its name.

    Raises:
        OSError: it cannot be written; it is then removed again.
    """
    with _new_file(path, mode) as (new, file):
        file.write(data)
    return new


@contextmanager
def written_whole(path: str, mode: int | None = 0o600) -> Generator[BinaryIO]:
    """Write a file that gets its name only when it is complete. A link of that name is replaced, not followed.

    Until then it has a name that no other process can create first, so other users may have write access to the folder.

    Args:
        mode: the mode of the file; None: determined by the umask.

    Raises:
        OSError: the file cannot be written.
    """
    with _new_file(path, mode) as (new, file):
        yield file
    try:
        os.rename(new, path)
    except BaseException:
        os.unlink(new)
        raise


@contextmanager
def _new_file(path: str, mode: int | None) -> Generator[tuple[str, BinaryIO]]:
    """Yield a new file next to a path, with its name. The file is removed after an error."""
    new = f"{path}.{os.urandom(8).hex()}{NEW}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(new, flags, 0o600 if mode is not None else 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)  # a umask may have removed the owner's own permissions
            yield new, file
            file.flush()
            os.fsync(fd)
    except BaseException:
        os.unlink(new)
        raise


# A log file that only grows. Lines are appended whole, and the file is recreated after log rotation.


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
        self._fd = _open_for_appending(path)

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
            fd = _open_for_appending(self._path)
            os.close(self._fd)
            self._fd = fd


def _open_for_appending(path: str) -> int:
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
