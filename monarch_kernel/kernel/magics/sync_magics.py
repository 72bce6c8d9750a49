"""`%mesh sync`: sync the notebook's folders and environment to all hosts of a mesh."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.display.tables import table_text
from monarch_kernel.kernel.magics.arguments import Arguments, Subcommands, mesh_option
from monarch_kernel.kernel.sync_run import (
    autoreload_selection,
    forget_on,
    hosts_named,
    show_receipt,
    shown_progress,
    sync_errors,
)
from monarch_kernel.kernel.usage_errors import usage_error
from workspace_sync.receipt import trees_table

if TYPE_CHECKING:
    from monarch_kernel.actor import HostMesh, ProcMesh
    from workspace_sync.model.sync_report import SyncReport
    from workspace_sync.model.workspace import Workspace
    from workspace_sync.reload.client import How

_DIGEST = re.compile("[0-9a-f]{4,64}")
_WAYS: tuple[How, ...] = ("reload", "respawn", "restart")
#: Mutually exclusive options.
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
    @argument("--rollback", nargs="?", type=int, const=1, metavar="N", help="the tree before (or N trees), and reload")
    @argument("--to", metavar="TREE", help="... or to this one of the trees that --list shows")
    @argument("--list", action="store_true", help="... or only show the trees that hosts have: with times and changes")
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
        if found.list:
            return self._trees(found, hosts, workspace)
        how: How | None = next((way for way in _WAYS if getattr(found, way)), None)
        if found.rollback is not None:
            how = how or "reload"  # hosts that keep the old tree are useless while ranks run the other one
        if found.watch:
            notebook.workspaces.watch(notebook, hosts, workspace, how or "reload")
            return None
        if found.forget:
            forget_on(notebook, found.magic, hosts, workspace, kept=found.kept, dry_run=found.dry_run)
            return None
        if found.dry_run:
            return self._look(found, hosts, workspace)
        return self._sync(found, hosts, workspace, how)

    def _trees(self, found: Arguments, hosts: HostMesh | ProcMesh, workspace: Workspace) -> None:
        """Show the trees that hosts can roll back to."""
        from workspace_sync import status

        with sync_errors(found.magic, self.say):
            states = status(hosts, workspace)
        if any(state.generations for state in states):
            print(table_text(trees_table(states, time.time())))
        else:
            self.say("These hosts have no tree of these folders: nothing was synced yet.")

    def _look(self, found: Arguments, hosts: HostMesh | ProcMesh, workspace: Workspace) -> SyncReport:
        """Show the effect of a sync, or with `--verify` what is damaged."""
        from workspace_sync import sync, verify

        with sync_errors(found.magic, self.say), shown_progress(self._notebook, self.say) as progress:
            if found.verify:
                return verify(hosts, workspace, progress=progress)
            return sync(hosts, workspace, env=workspace.env, dry_run=True, progress=progress)

    def _sync(
        self, found: Arguments, hosts: HostMesh | ProcMesh, workspace: Workspace, how: How | None
    ) -> SyncReport | None:
        from workspace_sync.reload.live import sync_live
        from workspace_sync.reload.refresh_report import ModuleSelection

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
                tree=found.to or "",
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
    for name in ("to", "list"):
        if getattr(found, name) and found.rollback is None:
            raise usage_error(found.magic, f"--{name} goes with --rollback")
    if found.to and found.list:
        raise usage_error(found.magic, "give either --to or --list, not both")
    if found.to and not _DIGEST.fullmatch(found.to):
        raise usage_error(found.magic, f"--to takes a tree as --rollback --list shows it, not {found.to!r}")
    if found.with_python and not found.env:
        raise usage_error(found.magic, "--with-python is about the Python of the environment: give --env, too")
    if found.from_lock and not found.env:
        raise usage_error(found.magic, "--from-lock is about making the environment: give --env, too")
    if found.kept and not found.forget:
        raise usage_error(found.magic, "--kept is about files of ranks in a workspace that goes: give --forget, too")
    if found.unwatch and found.dirs:
        raise usage_error(found.magic, "--unwatch takes no folders: at most one workspace is watched")
