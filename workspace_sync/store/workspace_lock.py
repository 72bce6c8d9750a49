"""Lock of a workspace on one host: one staging at a time among all processes that use the store."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.errors import WorkspaceBusyError
from workspace_sync.store.failures import explain
from workspace_sync.store.tree import Descriptor

_LOCK = "lock"
_WAITING = "waiting"
#: The owner of the lock while older trees are updated. It releases the lock when another process waits for it.
_TIDYING = "this host, which tidies up after a sync"
#: The longest time that it may take to do so (seconds): its thread has a low priority.
_YIELDS = 60.0


class WorkspaceLock:
    """Two files of the workspace's folder: the owner holds ``lock``, waiting processes share ``waiting``.

    Both are kernel locks (``flock``), which are released when their process ends.

    Args:
        folder: of the workspace.
    """

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._holders = 0

    @property
    def held(self) -> bool:
        """Whether some thread of this process holds the lock through this object."""
        return self._holders > 0

    @contextmanager
    def hold(self, owner: str, wait: float) -> Generator[None]:
        """Hold the lock.

        Args:
            owner: a description of the holder, for messages to other clients.
            wait: the longest wait for it (seconds). Low-priority work is waited for until it releases the lock.

        Raises:
            WorkspaceBusyError: another client, which the message names, holds it, or the workspace was forgotten
                meanwhile.
            StoreError: the lock cannot be written.
        """
        with explain(f"{self._folder.path}/{_LOCK}"):
            fd = self._open(_LOCK)
        with Descriptor(fd):
            self._wait(fd, wait)
            if not self._is_there(fd):
                raise self._forgotten()
            with suppress(OSError):  # on a full disk, the lock is valid without the name
                os.ftruncate(fd, 0)
                os.pwrite(fd, owner.encode()[:1000], 0)
            self._holders += 1
            try:
                yield
            finally:
                self._holders -= 1

    @contextmanager
    def tidy(self) -> Generator[None]:
        """Hold the lock for low-priority work, whose caller checks ``is_awaited`` often.

        Raises:
            WorkspaceBusyError: another process holds it.
        """
        with self.hold(_TIDYING, 0):
            yield

    def is_awaited(self) -> bool:
        """Return whether another process or thread waits for the lock."""
        return _is_held(lambda: self._open(_WAITING))

    def is_free(self) -> bool:
        """Return whether the lock is free."""
        return not _is_held(lambda: self._folder.open_file(_LOCK, os.O_RDONLY))

    def remove(self) -> None:
        """Remove the files of the held lock: waiting processes find that the workspace is forgotten."""
        for name in (_WAITING, _LOCK):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder.fd)

    def _wait(self, fd: int, wait: float) -> None:
        began = time.monotonic()
        waiting = -1
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    other = os.pread(fd, 1000, 0).decode("utf-8", "replace").strip() or "another client"
                patience = _YIELDS if other == _TIDYING and wait else wait
                if time.monotonic() - began >= patience:
                    raise WorkspaceBusyError(
                        f"{self._folder.path} is being synced by {other}: wait until that has ended, and sync again"
                    )
                if waiting < 0:
                    waiting = self._announce()
                time.sleep(0.01)
        finally:
            if waiting >= 0:
                os.close(waiting)

    def _announce(self) -> int:
        """Announce a waiter; -1: unknown until the query of another process has completed."""
        try:
            fd = self._open(_WAITING)
        except OSError:
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return -1
        return fd

    def _open(self, name: str) -> int:
        try:
            return self._folder.open_file(name, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            raise self._forgotten() from None

    def _is_there(self, fd: int) -> bool:
        """Return whether the acquired lock still belongs to the workspace."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(_LOCK, dir_fd=self._folder.fd, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _forgotten(self) -> WorkspaceBusyError:
        return WorkspaceBusyError(f"{self._folder.path} is being forgotten by another client: sync again")


def _is_held(opened: Callable[[], int]) -> bool:
    """Return whether any process has a lock on a file; False if the file cannot be opened."""
    try:
        fd = opened()
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
