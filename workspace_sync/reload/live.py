"""A sync that ranks which run already follow: they are told before the switch and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from monarch_kernel.actor import ProcMesh
from monarch_kernel.introspection import each_host
from monarch_kernel.meshes import format_ranks, list_proc_meshes
from workspace_sync.model.progress import SyncProgress
from workspace_sync.model.report import StaleModule, SyncReport
from workspace_sync.model.workspace import Workspace
from workspace_sync.reload.client import How, When, contact, enter, folders_of, refresh, stale_modules
from workspace_sync.reload.report import FAILED, KEPT, RELOADED, Refreshed
from workspace_sync.reload.selection import EVERY, ModuleSelection
from workspace_sync.session import sync

Pairs = list[tuple[str, str]]


class LiveReport(msgspec.Struct):
    """A sync, and what became of ranks that run already.

    Attributes:
        sync: the receipt.
        refreshed: one entry for each mesh whose ranks had anything to follow.
    """

    sync: SyncReport
    refreshed: list[Refreshed] = []

    def modules(self, *states: str) -> list[str]:
        """The names of modules in these states, on whichever rank."""
        names = {name for each in self.refreshed for name, _, _ in each.modules(*states)}
        return sorted(names)

    @property
    def problems(self) -> list[str]:
        """What ranks do not follow and why, a line for each reason."""
        lines: list[str] = []
        for each in self.refreshed:
            lines += [reason for _, _, reason in each.modules(FAILED, KEPT)]
            lines += [f"mesh {each.mesh}, ranks {ranks}: {why}" for why, ranks in each.errors.items()]
        return list(dict.fromkeys(lines))

    @property
    def line(self) -> str:
        """All of it, in a line."""
        hosts = [host for host in self.sync.hosts if host.switched]
        changed = max((host.files + len(host.deleted) for host in hosts), default=0)
        parts: list[str] = []
        if hosts:
            parts.append(f"synced {changed} file{'s' * (changed != 1)} to {len(hosts)} host{'s' * (len(hosts) != 1)}")
        reloaded = self.modules(RELOADED)
        if reloaded:
            parts.append(f"reloaded {', '.join(reloaded)}")
        return f"{', '.join(parts) or 'nothing has changed'} ({self.sync.seconds:.2f} s)"


def sync_live(
    hosts: Any,
    workspace: Workspace,
    *,
    how: How | None = "reload",
    selection: ModuleSelection = EVERY,
    when: When = "idle",
    wait: float = 5.0,
    verify: bool = False,
    rollback: bool | int = False,
    progress: Callable[[SyncProgress], None] | None = None,
) -> LiveReport:
    """Sync a workspace, have ranks start in it from now on, and have those that run already follow.

    Args:
        hosts, workspace, verify, rollback, progress: as for ``workspace_sync.sync``.
        how: as for ``refresh``, where there are stale modules; None: these are only named, in the receipt.
        selection, when, wait: as for ``refresh``.

    Raises:
        SyncError, ScanError: as ``sync`` does; ranks of hosts that have switched follow at the next sync.
    """
    for procs in meshes_on(hosts):
        contact(procs, _folders(procs, workspace))
    report = sync(hosts, workspace, env=workspace.env, verify=verify, rollback=rollback, progress=progress)
    live = LiveReport(report)
    for procs in meshes_on(hosts):
        pairs = _folders(procs, workspace)
        if how != "reload":
            enter(procs, pairs)
            stale = stale_modules(procs, folders=pairs)
            if how is None or not stale:  # actors and ranks that have nothing to follow go on
                report.stale += stale
                continue
        done = refresh(procs, how, folders=pairs, selection=selection, when=when, wait=wait)
        if any(rank.modules or rank.error for rank in done.ranks):
            live.refreshed.append(done)
            report.stale += [
                StaleModule(name, format_ranks(ranks), reason or state)
                for (name, state, reason), ranks in sorted(done.modules().items())
            ]
    return live


def meshes_on(hosts: Any) -> list[ProcMesh]:
    """The proc meshes of this process that have ranks on some of these hosts."""
    keys = {host.key for host in each_host(hosts)}
    found: list[ProcMesh] = []
    for procs in list_proc_meshes():
        if not keys.isdisjoint(host.key for host in each_host(procs)):
            found.append(procs)
    return found


def _folders(procs: ProcMesh, workspace: Workspace) -> Pairs:
    """The folders of the workspace as hosts have them, and in place, for ranks that began in them before any sync."""
    roots = workspace.roots()
    placed = [(here, there) for here, there in folders_of(procs) if here in roots]
    return placed or [(here, here) for here in roots]
