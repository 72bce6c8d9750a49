"""Sync, and reload running ranks: they are queried before the switch and notified after it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec

from monarch_kernel.actor import ProcMesh
from monarch_kernel.introspection import each_host
from monarch_kernel.meshes import format_ranks, list_proc_meshes, name_ranks
from workspace_sync.model.errors import SyncError
from workspace_sync.model.sync_report import StaleModule, SyncReport, on_synced, trees
from workspace_sync.model.workspace import CondaEnvironment, Workspace
from workspace_sync.receipt import sync_line
from workspace_sync.reload.client import How, When, ask_all, folders_of, refresh, stale_in
from workspace_sync.reload.refresh_report import EVERY, FAILED, KEPT, RELOADED, ModuleSelection, Refreshed
from workspace_sync.session import Folders, Show, SyncClient, workspace_of

if TYPE_CHECKING:
    from monarch_kernel.actor import HostMesh


Pairs = list[tuple[str, str]]
#: Meshes whose receipts have mentioned that they run outside the tree. This is mentioned once, and at each rollback.
_told: WeakSet[ProcMesh] = WeakSet()

#: The longest time that the switch waits for ranks to report their imports (seconds). A rank that reports later
#: compares its imports with the files of the new tree.
_CONTACT = 2.0
#: The time limit for ranks to enter a new tree (seconds).
_ENTER = 10.0


class LiveReport(msgspec.Struct):
    """The result of a sync, and of the reload in running ranks.

    Attributes:
        sync: the receipt.
        refreshed: one entry for each mesh whose ranks had anything to follow.
    """

    sync: SyncReport
    refreshed: list[Refreshed] = []

    def modules(self, *states: str) -> list[str]:
        """Return the names of modules that have one of these states on any rank."""
        names = {name for each in self.refreshed for name, _, _ in each.modules(*states)}
        return sorted(names)

    @property
    def problems(self) -> list[str]:
        """The changes that ranks do not follow, a line for each reason."""
        lines: list[str] = []
        for each in self.refreshed:
            lines += [reason for _, _, reason in each.modules(FAILED, KEPT)]
            lines += [f"mesh {each.mesh}, {name_ranks(ranks)}: {why}" for why, ranks in each.errors.items()]
        return list(dict.fromkeys(lines))

    @property
    def line(self) -> str:
        """Render the whole report in one line."""
        hosts = [host for host in self.sync.hosts if host.switched]
        changed = max((host.files + len(host.deleted) for host in hosts), default=0)
        parts: list[str] = []
        if hosts:
            parts.append(f"synced {changed} file{'s' * (changed != 1)} to {len(hosts)} host{'s' * (len(hosts) != 1)}")
        reloaded = self.modules(RELOADED)
        if reloaded:
            parts.append(f"reloaded {', '.join(reloaded)}")
        return f"{', '.join(parts) or 'nothing has changed'} ({self.sync.seconds:.2f} s)"


def sync(
    hosts: HostMesh | ProcMesh,
    workspace: Folders = ".",
    *,
    env: CondaEnvironment | None = None,
    dry_run: bool = False,
    verify: bool = False,
    rollback: bool | int = False,
    progress: Show | None = None,
) -> SyncReport:
    """Give every host of a mesh the current content of the workspace.

    Each host either gets the new tree or keeps the old one; hosts switch after all have staged. Ranks spawned
    afterwards start in the tree. Running ranks enter it, and keep their loaded modules; ``stale`` of the receipt names
    these. The function blocks: in a coroutine, use ``await asyncio.to_thread(sync, ...)``.

    Args:
        hosts: a mesh of hosts, procs or actors, or a slice of one.
        workspace: the content to sync: a ``Workspace``, or one or several folders.
        env: the environment to sync instead of the workspace's own.
        dry_run: only report the content that would be sent and deleted.
        verify: first hash all files on the hosts; damaged ones are sent again.
        rollback: go back one tree, or this many trees, instead of syncing.
        progress: called a few times a second, on the calling thread.

    Raises:
        SyncError: hosts keep their old tree; the message names them, and ``report`` has the details. Its subclasses:
            ``WorkspaceBusyError``, ``StoreError``, ``TamperedError``, ``IncompatibleError``.
        ScanError: the folders cannot be read, or keep changing; nothing was changed anywhere.
        TypeError: ``hosts`` is not a mesh.
    """
    found = workspace_of(workspace, env)
    if dry_run and not rollback:
        return SyncClient(hosts, found, progress).sync(dry_run=True, verify=verify)
    return sync_live(hosts, found, how=None, verify=verify, rollback=rollback, progress=progress).sync


def rollback(
    hosts: HostMesh | ProcMesh,
    workspace: Folders = ".",
    *,
    steps: int = 1,
    tree: str = "",
    progress: Show | None = None,
) -> SyncReport:
    """Go back to an earlier tree, which the hosts still have. The client's folders are not read.

    Args:
        hosts, workspace, progress: as for ``sync``.
        steps: the number of trees to go back. Trees that ranks could not import do not count.
        tree: alternatively, the beginning of a tree's digest (as in the output of ``status``).

    Raises:
        SyncError: hosts no longer have such a tree; they keep the current one.
    """
    return sync_live(hosts, workspace_of(workspace), how=None, rollback=steps, tree=tree, progress=progress).sync


def sync_live(
    hosts: HostMesh | ProcMesh,
    workspace: Workspace,
    *,
    how: How | None = "reload",
    selection: ModuleSelection = EVERY,
    when: When = "idle",
    wait: float = 5.0,
    verify: bool = False,
    rollback: bool | int = False,
    tree: str = "",
    progress: Show | None = None,
) -> LiveReport:
    """Sync a workspace, start new ranks in it, and make running ranks follow.

    If ranks cannot import a module of a tree, this is recorded on the hosts: rollbacks skip the tree unless it is
    named.

    Args:
        hosts, workspace, verify, rollback, progress: as for ``workspace_sync.sync``.
        tree: as for ``rollback``.
        how: as for ``refresh``, if there are stale modules; None: only name them in the receipt.
        selection, when, wait: as for ``refresh``.

    Raises:
        SyncError, ScanError: as for ``sync``. Ranks of hosts that have switched follow before the error is raised.
    """
    asked = ask_all("watch", ((procs, _folders(procs, workspace)) for procs in meshes_on(hosts)))
    client = SyncClient(hosts, workspace, progress, before_switch=lambda: asked(_CONTACT))
    try:
        back = bool(rollback or tree)
        report = client.rollback(int(rollback), tree) if back else client.sync(dry_run=False, verify=verify)
    except SyncError as e:
        report = e.report
        if isinstance(report, SyncReport) and any(host.switched for host in report.hosts):
            _follow(LiveReport(report), hosts, workspace, how, selection, when, wait)
            _announce(hosts, report)
        raise
    live = _follow(LiveReport(report), hosts, workspace, how, selection, when, wait)
    failed = [reason for each in live.refreshed for _, state, reason in each.modules() if state == FAILED]
    if report.digest and (failed or (live.modules(RELOADED) and client.is_condemned(report.digest))):
        client.condemn(report.digest, failed[0] if failed else "")
    _announce(hosts, report)
    return live


def _announce(hosts: HostMesh | ProcMesh, report: SyncReport) -> None:
    """Notify views of the current trees of hosts."""
    switched = {host.host: (host.digest, host.environment) for host in report.hosts if host.switched}
    trees.update((host.key, switched[host.name]) for host in each_host(hosts) if host.name in switched)
    on_synced.notify()


def _follow(
    live: LiveReport,
    hosts: HostMesh | ProcMesh,
    workspace: Workspace,
    how: How | None,
    selection: ModuleSelection,
    when: When,
    wait: float,
) -> LiveReport:
    """Make running ranks follow a sync, and add their modules to its receipt."""
    stale = live.sync.stale
    meshes = [(procs, _folders(procs, workspace)) for procs in meshes_on(hosts)]
    entered = iter(() if how == "reload" else ask_all("enter", meshes)(_ENTER))
    for procs, pairs in meshes:
        if how == "reload":
            done = refresh(procs, how, folders=pairs, selection=selection, when=when, wait=wait)
        else:
            done = next(entered)
        outside = _outside(done, live.sync)
        if how != "restart" and (live.sync.back or procs not in _told):
            live.sync.notes += outside
        if outside:
            _told.add(procs)
        if how is None:
            stale += stale_in(done)
            live.sync.notes += [
                f"{name_ranks(ranks)} of mesh {done.mesh} cannot be told: {why}"
                for why, ranks in done.errors.items()
                if not why.startswith("it is dead")
            ]
            continue
        if how != "reload":
            if not (done.modules() or (how == "restart" and outside)):
                continue  # actors and ranks that have nothing to follow continue unchanged
            done = refresh(procs, how, folders=pairs, selection=selection, when=when, wait=wait)
        if how == "restart" or any(rank.modules or rank.error for rank in done.ranks):
            live.refreshed.append(done)
            stale += [
                StaleModule(name, format_ranks(ranks), reason or state, state == FAILED)
                for (name, state, reason), ranks in sorted(done.modules().items())
            ]
    return live


def _outside(met: Refreshed, report: SyncReport) -> list[str]:
    """Describe the ranks that a first sync or a rollback does not affect, as they started before there was a tree."""
    ranks: dict[str, list[int]] = {}
    for rank in met.ranks:
        if rank.outside:
            ranks.setdefault(rank.outside, []).append(rank.rank)
    return [
        f"{name_ranks(there)} of mesh {met.mesh} do not run this tree: they started before the first sync, in "
        f"{folder} of their host itself; {sync_line(report)} --restart restarts them in the tree"
        for folder, there in ranks.items()
    ]


def meshes_on(hosts: HostMesh | ProcMesh) -> list[ProcMesh]:
    """Return the proc meshes of this process that have ranks on some of these hosts."""
    keys = {host.key for host in each_host(hosts)}
    found: list[ProcMesh] = []
    for procs in list_proc_meshes():
        if not keys.isdisjoint(host.key for host in each_host(procs)):
            found.append(procs)
    return found


def _folders(procs: ProcMesh, workspace: Workspace) -> Pairs:
    """Return the workspace's folders on hosts, and in place, for ranks that started in them before any sync."""
    roots = workspace.roots()
    placed = [(here, there) for here, there in folders_of(procs) if here in roots]
    return placed or [(here, here) for here in roots]


async def sync_workspace(mesh: Any, workspace: Workspace, conda: bool, auto_reload: bool) -> SyncReport:
    """See ``HostMesh.sync_workspace``."""
    if not isinstance(workspace, Workspace):
        raise TypeError(f"sync_workspace() takes a Workspace, as in Workspace(dirs=['.']), not {workspace!r}")
    env = (workspace.env or CondaEnvironment()) if conda else None
    wanted = Workspace(workspace.dirs, env, links=workspace.links)
    live = await asyncio.to_thread(sync_live, mesh, wanted, how="reload" if auto_reload else None)
    return live.sync
