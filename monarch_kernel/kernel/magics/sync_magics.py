"""`%mesh sync`: the notebook's folders and environment on all hosts of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments, mesh_option
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.sync_run import (
    autoreload_selection,
    forget_on,
    hosts_named,
    show_receipt,
    shown_progress,
    sync_errors,
)
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from monarch_kernel.actor import HostMesh, ProcMesh
    from workspace_sync.model.report import SyncReport
    from workspace_sync.model.workspace import Workspace
    from workspace_sync.reload.client import How

_WAYS: tuple[How, ...] = ("reload", "respawn", "restart")
#: Options of which a line has at most one.
_APART = (
    *(("dry_run", other) for other in ("rollback", "watch", "unwatch", *_WAYS)),
    *(("forget", other) for other in ("verify", "rollback", "watch", "unwatch", *_WAYS)),
    *(("rollback", other) for other in ("verify", "watch", "unwatch", "env")),
    *(("unwatch", other) for other in ("watch", "verify", "env", *_WAYS)),
    *(("reload", "respawn"), ("reload", "restart"), ("respawn", "restart"), ("verify", "watch")),
)


class SyncMagics(Subcommands):
    """Syncing folders and environments."""

    @magic_arguments("mesh sync")
    @argument("dirs", nargs="*", metavar="DIR", help="folders (default: as last time; at first the notebook's folder)")
    @argument("--env", action="store_true", help="also the environment that this kernel runs in")
    @argument("--with-python", action="store_true", help="... with the Python that it was made from, if it is a venv")
    @argument("--from-lock", metavar="FILE", help="... of which hosts make what they can, from their package caches")
    @argument("--links", choices=["refuse", "follow", "keep"], help="links that lead out of the folders")
    @argument("-n", "--dry-run", action="store_true", help="only show what would be sent and deleted")
    @argument("--verify", action="store_true", help="hash all files on the hosts; damaged ones are sent again")
    @argument("--rollback", nargs="?", type=int, const=1, metavar="N", help="go back to the tree before (or N trees)")
    @argument("--reload", action="store_true", help="reload changed modules in ranks and live actors, in place")
    @argument("--respawn", action="store_true", help="... or create the actors again, from their checkpoints")
    @argument("--restart", action="store_true", help="... or replace the ranks, and their actors with them")
    @argument("--forget", action="store_true", help="remove the folders and what is known of them from the hosts")
    @argument("--kept", action="store_true", help="... with the files that ranks have made, for good")
    @argument("--watch", action="store_true", help="sync and reload now and at every save")
    @argument("--unwatch", action="store_true", help="no longer do so")
    @mesh_option("the mesh, or a variable with hosts (default: the mesh in use, or this host)")
    def sync(self, found: Arguments) -> SyncReport | None:
        """Give all hosts of a mesh the notebook's folders as they are now; ranks started later run in them."""
        _check_choices(found)
        notebook = self._notebook
        if found.unwatch:
            self.say(notebook.workspaces.unwatch() or "Nothing is being watched.")
            return None
        workspace = notebook.workspaces.chosen(
            found.magic, found.dirs, found.env, found.links, found.with_python, found.from_lock
        )
        hosts = hosts_named(self._session, notebook.shell.user_ns, found.on, found.magic)
        how: How | None = next((way for way in _WAYS if getattr(found, way)), None)
        if found.watch:
            notebook.workspaces.watch(notebook, hosts, workspace, how or "reload")
            return None
        if found.forget:
            forget_on(notebook, found.magic, hosts, workspace, kept=found.kept, dry_run=found.dry_run)
            return None
        if found.dry_run:
            return self._look(found, hosts, workspace)
        return self._sync(found, hosts, workspace, how)

    def _look(self, found: Arguments, hosts: HostMesh | ProcMesh, workspace: Workspace) -> SyncReport:
        """What a sync would do, or with `--verify` what is damaged."""
        from workspace_sync import sync, verify

        with sync_errors(found.magic, self.say), shown_progress(self._notebook, self.say) as progress:
            if found.verify:
                return verify(hosts, workspace, progress=progress)
            return sync(hosts, workspace, env=workspace.env, dry_run=True, progress=progress)

    def _sync(
        self, found: Arguments, hosts: HostMesh | ProcMesh, workspace: Workspace, how: How | None
    ) -> SyncReport | None:
        from workspace_sync.reload import ModuleSelection, sync_live

        notebook = self._notebook
        selection = ModuleSelection()
        mode = autoreload_selection(notebook.shell)
        if how is None and mode is not None and mode.mode != "off":
            how, selection = "reload", mode
        with sync_errors(found.magic, self.say), shown_progress(notebook, self.say) as progress:
            live = sync_live(
                hosts,
                workspace,
                how=how,
                selection=selection,
                verify=found.verify,
                rollback=found.rollback or False,
                progress=progress,
            )
        notebook.workspaces.last = workspace
        return show_receipt(live, self.say)


def _check_choices(found: Arguments) -> None:
    """Raise UsageError if options contradict each other."""
    if found.rollback is not None and found.rollback < 1:
        raise usage_error(found.magic, f"--rollback takes a number of trees of at least 1, not {found.rollback}")
    for choices in _APART:
        given = [f"--{name.replace('_', '-')}" for name in choices if getattr(found, name)]
        if len(given) > 1:
            raise usage_error(found.magic, f"give either {given[0]} or {given[1]}, not both")
    if found.with_python and not found.env:
        raise usage_error(found.magic, "--with-python is about the Python of the environment: give --env, too")
    if found.from_lock and not found.env:
        raise usage_error(found.magic, "--from-lock is about making the environment: give --env, too")
    if found.kept and not found.forget:
        raise usage_error(found.magic, "--kept is about files of ranks in a workspace that goes: give --forget, too")
    if found.unwatch and found.dirs:
        raise usage_error(found.magic, "--unwatch takes no folders: at most one workspace is watched")
