"""Progress and receipt of a sync, as plain data; the terminal and the kernel render them."""

from __future__ import annotations

import msgspec


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
        digest: of its tree now (hex); empty if it has none.
        switched: whether it has a new tree.
        files: files that were made.
        received: bytes that arrived.
        reused: bytes that the host had.
        moved: paths that ranks had made, and that moved along.
        error: why it stays on the old tree; empty if all went well.
        seconds: from the first request until it had switched.
        path: the folder of the workspace on it; ranks see ``path/current/tree``.
        generation: the number of its trees, for a rollback.
        deleted: paths that go, or would go in a dry run.
        lacks: bytes that it lacks, and would get (only in a dry run).
        problems: damaged content that was found on it.
        kept: what ranks had made where the new tree has something else, and where it is now.
        environment: the digest of its environment (hex); empty if it has none.
        shares: the host whose store it uses, as by a common home folder, and that made the tree for both; or empty.
        notes: what a sync that was interrupted had left, or what else was not in order, and what was done with it.
        made: bytes of the environment that it made itself, from a lock file.
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
        generations: how many trees a rollback could go to, the current one among them.
        files: how many files its trees had.
        bytes: of these. Their content stays among the store's old content for a while (``collect``).
        kept_files: files that ranks have made, and that stay in ``path/kept``.
        kept_bytes: of these.
        removed: whether anything was removed, as in a dry run nothing is.
        shares: the host whose store it uses, as by a common home folder; or empty.
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
    """A module that ranks have imported in an older version.

    Attributes:
        name: of the module.
        ranks: which ranks, in the notation of rank sets.
        state: "stale", "reloaded", or why it cannot be reloaded.
        failed: its source has an error, which ``state`` tells.
    """

    name: str
    ranks: str
    state: str = "stale"
    failed: bool = False


class SyncReport(msgspec.Struct):
    """The receipt of one sync.

    Attributes:
        workspace: its id.
        digest: of the tree at the client (hex).
        files: files at the client.
        bytes: their bytes.
        hashed: bytes that had to be read and hashed.
        sent: bytes that the client sent.
        hosts: one entry a host.
        stale: modules that ranks have imported in an older version.
        phases: seconds by phase.
        seconds: of everything.
        dry_run: nothing was changed.
        environment: the digest of the environment at the client (hex); empty if none was synced.
        notes: what a person should know of the environment.
        back: the digest of the tree that a rollback went to (hex); empty if it was none.
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
        """The hosts that stay on their old tree."""
        return [host for host in self.hosts if host.error]


class SyncProgress(msgspec.Struct, frozen=True):
    """A moment of a sync.

    Attributes:
        phase: "scan", "plan", "send", "stage" or "switch".
        done: bytes read, or received by all hosts together; 0 where bytes say nothing.
        total: all that will be; 0: not known.
        hosts_done: hosts that are through with this phase.
        hosts: all hosts.
        note: a sentence to be shown and kept, such as what a large first sync is about to send; mostly empty.
    """

    phase: str
    done: int = 0
    total: int = 0
    hosts_done: int = 0
    hosts: int = 0
    note: str = ""
