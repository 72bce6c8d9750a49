"""Store of one user on one host: a private folder with objects, and a folder for each workspace."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable

from monarch_kernel.environment import SYNC_KEEP
from monarch_kernel.private_files import NotPrivateError, PrivateFolder
from workspace_sync.model.errors import StoreError
from workspace_sync.model.workspace import sync_folder
from workspace_sync.store.objects import Facts, Objects, probe
from workspace_sync.store.records import StoreRecord, explain, read_record, write_record
from workspace_sync.store.sources import Donor
from workspace_sync.store.tree import TreeFolder
from workspace_sync.store.workspace_folder import WorkspaceFolder

_RECORD = "store.state"
#: A link whose target distinguishes this store from every other one. Creating a link is atomic.
_IDENTITY = "identity"
#: Younger objects may belong to a switch that is not recorded yet (seconds).
_GRACE = 600.0
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class Store:
    """The store of this user on this host. Several processes may use it at once.

    Args:
        root: its folder; by default that of ``MONARCH_KERNEL_SYNC_FOLDER``, or ``~/.cache/monarch_kernel/sync``.

    Raises:
        StoreError: the folder cannot be created, belongs to another user, or was created by a newer version.
    """

    def __init__(self, root: str | None = None) -> None:
        self.path = sync_folder(root)
        with explain(self.path):
            self._root = self.private_folder()
            self.objects = Objects(self.private_folder("objects"))
        try:
            read_record(self._root, _RECORD, StoreRecord)
        except FileNotFoundError:
            self._note_version()
        self._facts: Facts | None = None
        self._folders: dict[str, WorkspaceFolder] = {}
        self._forgotten: list[WorkspaceFolder] = []
        self._opening = threading.Lock()  # two objects of one workspace would not know of each other's locks

    def _note_version(self) -> None:
        """Write the record of a new store. Agents of other hosts that share the store may do so at the same time."""
        own = f"{_RECORD}-{secrets.token_hex(8)}"
        write_record(self._root, own, StoreRecord())
        with explain(f"{self.path}/{_RECORD}"):
            os.rename(own, _RECORD, src_dir_fd=self._root.fd, dst_dir_fd=self._root.fd)

    def close(self) -> None:
        """Close the descriptors."""
        for folder in (*self._folders.values(), *self._forgotten):
            folder.close()
        self._forgotten.clear()
        self._folders.clear()
        self.objects.close()
        self._root.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def identity(self) -> str:
        """Return the unique name of this store, also for hosts that share its file system."""
        with explain(self.path):
            try:
                return os.readlink(_IDENTITY, dir_fd=self._root.fd)
            except FileNotFoundError:
                pass
            try:
                os.symlink(secrets.token_hex(16), _IDENTITY, dir_fd=self._root.fd)
            except FileExistsError:
                pass  # another process has just created it
            return os.readlink(_IDENTITY, dir_fd=self._root.fd)

    def private_folder(self, *names: str) -> PrivateFolder:
        """Return a folder of the store, created if it does not exist.

        Raises:
            StoreError: another user could change it.
        """
        try:
            return PrivateFolder.made(os.path.join(self.path, *names))
        except NotPrivateError as e:
            raise StoreError(f"{e} (MONARCH_KERNEL_SYNC_FOLDER names another folder)") from None

    def workspace(self, name: str) -> WorkspaceFolder:
        """Return the folder of a workspace, created if it does not exist.

        Raises:
            StoreError: it cannot be created, or the id is not a valid name.
        """
        if _ID.fullmatch(name) is None:
            raise StoreError(f"{name!r} is no id of a workspace")
        with self._opening:
            folder = self._folders.get(name)
            if folder is not None and not folder.is_there():
                self._forgotten.append(self._folders.pop(name))  # threads may still use its descriptors
                folder = None
            if folder is None:
                folder = self._folders[name] = WorkspaceFolder(self, name)
            return folder

    def has(self, name: str) -> bool:
        """Return whether a workspace is in the store."""
        return os.path.lexists(os.path.join(self.path, "w", name))

    def workspaces(self) -> list[str]:
        """Return the ids of the workspaces in the store."""
        with explain(self.path), self.private_folder("w") as folder:
            return [each for each in folder.names() if _ID.fullmatch(each)]

    def is_empty(self) -> bool:
        """Return whether the store has no content that could be used for a tree."""
        return not self.objects.has_any() and not any(self.workspace(name).slots.names() for name in self.workspaces())

    def facts(self) -> Facts:
        """Probe the capabilities of the file system."""
        with explain(self.path):
            self._facts = probe(self._root.fd)
        return self._facts

    def probed(self) -> Facts:
        """Return the capabilities of the file system, probed at first use."""
        return self._facts or self.facts()

    def donors(self, but: str, trees: list[TreeFolder]) -> list[Donor]:
        """Return the trees of all workspaces but one; their descriptors are added to ``trees``."""
        found: list[Donor] = []
        for name in self.workspaces():
            if name != but:
                found += self.workspace(name).slots.donors(None, (), trees, steady=False)
        return found

    def collect(self, limit: int | None = None, stopped: Callable[[], bool] = lambda: False) -> int:
        """Remove the oldest unneeded objects until the objects take at most ``limit`` bytes.

        Content that kept generations of any workspace need is not removed. Objects of the last ten minutes are not
        removed either, because a switch may be about to need them.

        Args:
            limit: in bytes; by default ``MONARCH_KERNEL_SYNC_KEEP``.
            stopped: polled often; true: stop soon.

        Returns:
            The number of bytes by which the rest exceeds the limit.
        """
        limit = SYNC_KEEP.get() if limit is None else limit
        recent = time.time() - _GRACE
        with explain(self.objects.path):
            self.objects.remove_unfinished()
            objects = {digest: (about.st_ctime, about.st_size) for digest, about in self.objects.all()}
            total = sum(size for _, size in objects.values())
            if total <= limit:
                return 0
            loose = {digest for digest, (since, _) in objects.items() if since < recent}
            for name in self.workspaces():
                if stopped():
                    return 0
                needed = self.workspace(name).needed(loose)
                if needed is None:
                    return total - limit  # the content that a damaged manifest needs is unknown
                loose -= needed
            for digest in sorted(loose, key=lambda each: objects[each][0]):
                if total <= limit or stopped():
                    break
                self.objects.remove(digest)
                total -= objects[digest][1]
        return max(0, total - limit)
