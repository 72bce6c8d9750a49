"""What one user has of all workspaces on one host: a private folder with objects, and a folder for each workspace."""

from __future__ import annotations

import os
import re

from monarch_kernel.environment import SYNC_FOLDER
from monarch_kernel.private_files import NotPrivateError, PrivateFolder
from workspace_sync.model.errors import StoreError
from workspace_sync.store.cloning import Facts, probe
from workspace_sync.store.failures import explain
from workspace_sync.store.objects import Objects
from workspace_sync.store.slot_change import Donor
from workspace_sync.store.tree import Tree
from workspace_sync.store.workspace_folder import WorkspaceFolder

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class Store:
    """The store of this user on this host. Several processes may use it at once.

    Args:
        root: its folder; by default that of ``MONARCH_KERNEL_SYNC_FOLDER``, or ``~/.cache/monarch_kernel/sync``.

    Raises:
        StoreError: the folder cannot be made, belongs to another user, or was made by a newer version.
    """

    def __init__(self, root: str | None = None) -> None:
        self.path = os.path.abspath(root or SYNC_FOLDER.get() or os.path.expanduser("~/.cache/monarch_kernel/sync"))
        with explain(self.path):
            self._root = self.private_folder()
            self.objects = Objects(self.private_folder("objects"))
        self._facts: Facts | None = None
        self._folders: dict[str, WorkspaceFolder] = {}

    def close(self) -> None:
        """Close its descriptors."""
        for folder in self._folders.values():
            folder.close()
        self._folders.clear()
        self.objects.close()
        self._root.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def private_folder(self, *names: str) -> PrivateFolder:
        """A folder of the store, made if it does not exist.

        Raises:
            StoreError: another user could change it.
        """
        path = os.path.join(self.path, *names)
        missing: list[str] = []
        while not os.path.lexists(path):
            missing.append(path)
            path = os.path.dirname(path)
        try:
            for each in reversed(missing):
                try:
                    PrivateFolder.make(each).close()
                except FileExistsError:
                    pass  # another process has just made it
            return PrivateFolder.open(os.path.join(self.path, *names))
        except NotPrivateError as e:
            raise StoreError(f"{e} (MONARCH_KERNEL_SYNC_FOLDER names another folder)") from None

    def workspace(self, name: str) -> WorkspaceFolder:
        """The folder of a workspace, made if it does not exist.

        Raises:
            StoreError: it cannot be made, or the id is no name.
        """
        if _ID.fullmatch(name) is None:
            raise StoreError(f"{name!r} is no id of a workspace")
        folder = self._folders.get(name)
        if folder is None:
            folder = self._folders[name] = WorkspaceFolder(self, name)
        return folder

    def workspaces(self) -> list[str]:
        """The ids of the workspaces that are here."""
        with explain(self.path), self.private_folder("w") as folder:
            return [each for each in folder.names() if _ID.fullmatch(each)]

    def facts(self) -> Facts:
        """What the file system offers, as it is now."""
        with explain(self.path):
            self._facts = probe(self._root.fd)
        return self._facts

    def probed(self) -> Facts:
        """What the file system offers, as it was found before."""
        return self._facts or self.facts()

    def donors(self, but: str, trees: list[Tree]) -> list[Donor]:
        """The trees of all workspaces but one; their descriptors are added to ``trees``."""
        found: list[Donor] = []
        for name in self.workspaces():
            if name != but:
                found += self.workspace(name).donors(trees)
        return found
