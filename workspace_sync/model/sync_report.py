"""Progress and receipt of a sync, as plain data; the terminal and the kernel render them."""

from __future__ import annotations

import msgspec

from monarch_kernel.subscriptions import Subscribers

# Notify views of meshes about syncs. This module imports no other module of the package.

#: By the key of each host that this process has synced: the digests of its tree and environment (hex).
trees: dict[str, tuple[str, str]] = {}
#: Notified after a sync, once ``trees`` is updated, on the thread that synced.
on_synced: Subscribers[[]] = Subscribers("a callback on syncs")


class Phases(msgspec.Struct, array_like=True):
    """Seconds by phase: reading the folder, finding missing content, moving bytes, making trees, switching."""

    scan: float = 0.0
    plan: float = 0.0
    send: float = 0.0
    stage: float = 0.0
    switch: float = 0.0


class HostReport(msgspec.Struct, array_like=True):
    """Result of a sync on one host.

    Attributes:
        host: its name.
        digest: of its current tree (hex); empty if it has none.
        switched: whether it has a new tree.
        files: the number of created files.
        received: received bytes.
        reused: bytes that the host already had.
        moved: paths created by ranks that were moved to the new tree.
        error: why it keeps the old tree; empty on success.
        seconds: from the first request to the switch.
        path: the folder of the workspace on it; ranks see ``path/current/tree``.
        generation: the number of its current generation, for a rollback.
        deleted: paths that are deleted, or would be in a dry run.
        lacks: bytes that it lacks and would get (only in a dry run).
        problems: damaged content found on it.
        kept: paths created by ranks that conflict with the new tree, and their new locations.
        environment: the digest of its environment (hex); empty if it has none.
        shares: the host whose store it shares, for example in a common home folder, and which created the tree for
            both; else empty.
        notes: remains of an interrupted sync or other irregularities, and how they were handled.
        made: bytes of the environment that it created itself from a lock file.
    """

    host: str
    digest: str = ""
    switched: bool = False
    files: int = 0
    received: int = 0
    reused: int = 0
    moved: list[str] = []
    error: str = ""
    seconds: float = 0.0
    path: str = ""
    generation: int = 0
    deleted: list[str] = []
    lacks: int = 0
    problems: list[str] = []
    kept: list[str] = []
    environment: str = ""
    shares: str = ""
    notes: list[str] = []
    made: int = 0


class Forgotten(msgspec.Struct, array_like=True):
    """Content of a workspace on a host, and whether it was removed.

    Attributes:
        host: its name.
        path: the folder of the workspace on it.
        generations: the number of generations that a rollback could go to, including the current one.
        files: the number of files in its trees.
        bytes: their total size. Their content remains for a while in the store as old content (``collect``).
        kept_files: the number of files created by ranks, which remain in ``path/kept``.
        kept_bytes: their total size.
        removed: whether anything was removed; false in a dry run.
        shares: the host whose store it shares, for example in a common home folder; else empty.
    """

    host: str
    path: str
    generations: int = 0
    files: int = 0
    bytes: int = 0
    kept_files: int = 0
    kept_bytes: int = 0
    removed: bool = False
    shares: str = ""


class StaleModule(msgspec.Struct, array_like=True):
    """A module of which ranks have imported an older version.

    Attributes:
        name: of the module.
        ranks: which ranks, in the notation of rank sets.
        state: "stale", "reloaded", or why it cannot be reloaded.
        failed: its source has an error, which is in ``state``.
    """

    name: str
    ranks: str
    state: str = "stale"
    failed: bool = False


class SyncReport(msgspec.Struct):
    """The receipt of a sync.

    Attributes:
        workspace: its id.
        digest: of the tree at the client (hex).
        files: the number of files at the client.
        bytes: their total size.
        hashed: bytes that had to be read and hashed.
        sent: bytes that the client sent.
        hosts: one entry for each host.
        stale: modules of which ranks have imported an older version.
        phases: seconds by phase.
        seconds: the total time.
        dry_run: whether this was a dry run, which changes nothing.
        environment: the digest of the environment at the client (hex); empty if none was synced.
        notes: sentences for the user about the environment.
        back: the digest of the tree that a rollback went to (hex); empty if this was no rollback.
    """

    workspace: str
    digest: str = ""
    files: int = 0
    bytes: int = 0
    hashed: int = 0
    sent: int = 0
    hosts: list[HostReport] = []
    stale: list[StaleModule] = []
    phases: Phases = msgspec.field(default_factory=Phases)
    seconds: float = 0.0
    dry_run: bool = False
    environment: str = ""
    notes: list[str] = []
    back: str = ""

    @property
    def failed(self) -> list[HostReport]:
        """The hosts that keep their old tree."""
        return [host for host in self.hosts if host.error]


class SyncProgress(msgspec.Struct, frozen=True):
    """Progress of a sync at one moment.

    Attributes:
        phase: "scan", "plan", "send", "stage" or "switch".
        done: bytes read, or received by all hosts together; 0 if the phase is not measured in bytes.
        total: the total number of these bytes; 0: unknown.
        hosts_done: the number of hosts that have completed this phase.
        hosts: the number of all hosts.
        note: a sentence that stays on display, such as the amount that a large first sync will send; usually empty.
    """

    phase: str
    done: int = 0
    total: int = 0
    hosts_done: int = 0
    hosts: int = 0
    note: str = ""
