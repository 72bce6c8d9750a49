"""Hosts of a sync: workers, each with a store of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monarch_kernel.private_files import PrivateFolder
from tests.sync.trees import Snapshot, snapshot
from tests.workers import Team, team
from workspace_sync.store.records import SlotRecord, read_record
from workspace_sync.store.store import Store

#: What the folder of a workspace has, and the name of an object.
NAMES = {"current", "generations", "kept", "lock", "manifests", "slots", "waiting"}
OBJECT = re.compile(r"[0-9a-f]{62}")


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


class StandingHosts:
    """Workers that the tests of a file share, each with a folder that is empty when a test begins.

    Attributes:
        folders: of the workers: their stores, or their homes.
    """

    def __init__(self, members: Team, folders: list[Path]) -> None:
        self.folders = folders
        self._members = members

    @contextmanager
    def lent(self, tmp_path: Path) -> Iterator[Callable[[int], Team]]:
        """Lend so many workers to a test; what is in their folders afterwards is kept in the test's.

        Raises:
            AssertionError: Something of the test still runs on a worker, or a worker has ended.
        """
        used: list[Team] = []

        def lend(count: int) -> Team:
            assert count <= len(self.folders), f"the file has {len(self.folders)} workers: give it another STANDING"
            used.append(self._members.first(count))
            return used[-1]

        try:
            yield lend
        finally:
            for part in used:
                part.detach()
                for worker, folder in zip(part, self.folders, strict=False):
                    assert worker.process.poll() is None, f"the test has ended {worker.name}, which others need"
                    worker.wait_idle()
                    if folder.exists():
                        folder.rename(tmp_path / f"of-{worker.name}")


@contextmanager
def standing_hosts(root: Path, count: int, **variables: str) -> Iterator[StandingHosts]:
    """So many workers over TCP, with folders below a root.

    Args:
        variables: of their environment; ``{folder}`` in a value is the worker's folder.
    """
    with team("tcp") as members:
        folders = [root / f"host{n}" for n in range(count)]
        for folder in folders:
            members.start(env={name: value.format(folder=folder) for name, value in variables.items()})
        yield StandingHosts(members, folders)


def workspace_folder(store: Path) -> Path | None:
    """The folder of the only workspace in a store; None: there is none."""
    found = list(store.glob("w/*"))
    assert len(found) < 2, found
    return found[0] if found else None


def current_folder(store: Path) -> Path:
    """What ``current`` of the only workspace leads to."""
    workspace = workspace_folder(store)
    assert workspace is not None
    return (workspace / "current").resolve(strict=True)


def current_tree(store: Path) -> Snapshot | None:
    """What a store shows to ranks now, of its only workspace; None: no tree."""
    workspace = workspace_folder(store)
    if workspace is None or not os.path.lexists(workspace / "current"):
        return None
    return snapshot(f"{workspace}/current/tree")


def leftovers(store: Path) -> list[str]:
    """What is in a store that no sync may leave there: staged trees, and unknown names.

    A slot that was following the current tree when its agent ended is none of these.
    """
    if not store.exists():
        return []
    left: list[str] = []
    following: set[bytes] = set()
    with Store(str(store)) as opened:
        for name in opened.workspaces():
            state = opened.workspace(name).state()
            following |= set(state.digests.values())
            left += filter(None, [state.repair, state.left])
    for folder in store.glob("w/*"):
        left += [f"{folder}/{name}" for name in sorted(set(os.listdir(folder)) - NAMES)]
        with PrivateFolder.open(str(folder / "slots")) as slots:
            for record in (folder / "slots").glob("*.state"):
                target = read_record(slots, record.name, SlotRecord).target
                if target and target not in following:
                    left.append(f"{record} is being changed to {target.hex()[:12]}")
    left += [str(path) for path in store.glob("objects/*/*") if OBJECT.fullmatch(path.name) is None]
    return left
