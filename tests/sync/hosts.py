"""Hosts of a sync: workers, each with a store of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.sync.trees import Snapshot, snapshot
from tests.workers import Team


class StoreHosts:
    """Workers with stores, and what is in these.

    Attributes:
        team: the workers.
        stores: their folders.
        mesh: the hosts, attached.
    """

    def __init__(self, members: Team, stores: list[Path]) -> None:
        self.team = members
        self.stores = stores
        self.mesh: Any = members.attach()

    def trees(self) -> list[Snapshot | None]:
        """What ranks would see on each host now, read in full; None: no tree."""
        return [current_tree(store) for store in self.stores]


def workspace_folder(store: Path) -> Path | None:
    """The folder of the only workspace in a store; None: there is none."""
    found = list(store.glob("w/*"))
    assert len(found) < 2, found
    return found[0] if found else None


def current_tree(store: Path) -> Snapshot | None:
    """What a store shows to ranks now, of its only workspace; None: no tree."""
    workspace = workspace_folder(store)
    if workspace is None or not os.path.lexists(workspace / "current"):
        return None
    return snapshot(f"{workspace}/current/tree")
