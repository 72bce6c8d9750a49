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
from workspace_sync.store.cloning import Facts, probe
from workspace_sync.store.failures import explain
from workspace_sync.store.objects import Objects
from workspace_sync.store.records import StoreRecord, read_record, write_record
from workspace_sync.store.sources import Donor
from workspace_sync.store.tree import TreeFolder
from workspace_sync.store.workspace_folder import WorkspaceFolder

_RECORD = "store.state"
#: A link whose target tells this store from every other one: it is made at once, whole, or not at all.
_IDENTITY = "identity"
#: Objects that are younger may belong to a switch that is not noted yet (seconds).
_GRACE = 600.0
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class Store:
    """The store of this user on this host. Several processes may use it at once.

    Args:
        root: its folder; by default that of ``MONARCH_KERNEL_SYNC_FOLDER``, or ``~/.cache/monarch_kernel/sync``.

    Raises:
        StoreError: the folder cannot be made, belongs to another user, or was made by a newer version.
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
        """Write the record of a new store. Others may do so at the same time, as agents of hosts that share it."""
        own = f"{_RECORD}-{secrets.token_hex(8)}"
        write_record(self._root, own, StoreRecord())
        with explain(f"{self.path}/{_RECORD}"):
            os.rename(own, _RECORD, src_dir_fd=self._root.fd, dst_dir_fd=self._root.fd)

    def close(self) -> None:
        """Close its descriptors."""
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
                pass  # another process has just made it
            return os.readlink(_IDENTITY, dir_fd=self._root.fd)

    def private_folder(self, *names: str) -> PrivateFolder:
        """A folder of the store, made if it does not exist.

        Raises:
            StoreError: another user could change it.
        """
        try:
            return PrivateFolder.made(os.path.join(self.path, *names))
        except NotPrivateError as e:
            raise StoreError(f"{e} (MONARCH_KERNEL_SYNC_FOLDER names another folder)") from None

    def workspace(self, name: str) -> WorkspaceFolder:
        """The folder of a workspace, made if it does not exist.

        Raises:
            StoreError: it cannot be made, or the id is no name.
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
        """Return whether a workspace is here."""
        return os.path.lexists(os.path.join(self.path, "w", name))

    def workspaces(self) -> list[str]:
        """The ids of the workspaces that are here."""
        with explain(self.path), self.private_folder("w") as folder:
            return [each for each in folder.names() if _ID.fullmatch(each)]

    def is_empty(self) -> bool:
        """Return whether it has nothing that could be of use for a tree."""
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
        """The trees of all workspaces but one; their descriptors are added to ``trees``."""
        found: list[Donor] = []
        for name in self.workspaces():
            if name != but:
                found += self.workspace(name).slots.donors(None, (), trees, steady=False)
        return found

    def collect(self, limit: int | None = None, stopped: Callable[[], bool] = lambda: False) -> int:
        """Remove the oldest objects that nothing needs until the objects take at most ``limit`` bytes.

        What a generation of any workspace that is kept for a rollback needs stays, and so does what has become an
        object in the last ten minutes: a switch may be about to need it.

        Args:
            limit: in bytes; by default ``MONARCH_KERNEL_SYNC_KEEP``.
            stopped: asked often; true: stop soon.

        Returns:
            By how many bytes the rest exceeds the limit.
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
                    return total - limit  # what a damaged manifest needs is not known
                loose -= needed
            for digest in sorted(loose, key=lambda each: objects[each][0]):
                if total <= limit or stopped():
                    break
                self.objects.remove(digest)
                total -= objects[digest][1]
        return max(0, total - limit)
