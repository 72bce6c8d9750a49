"""`%mesh sync`: the notebook's folders and environment on all hosts of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from monarch_kernel.kernel.magics.arguments import Arguments, mesh_option
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.sync_run import hosts_named, shown_progress
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from workspace_sync.model.report import SyncReport

_ONE_OF = ("dry_run", "rollback", "watch", "unwatch")
_WAYS = ("reload", "respawn", "restart")


class SyncMagics(Subcommands):
    """Syncing folders and environments."""

    @magic_arguments("mesh sync")
    @argument("dirs", nargs="*", metavar="DIR", help="folders (default: as last time; at first the notebook's folder)")
    @argument("--env", action="store_true", help="also the environment that this kernel runs in")
    @argument("--links", choices=["refuse", "follow", "keep"], help="links that lead out of the folders")
    @argument("-n", "--dry-run", action="store_true", help="only show what would be sent and deleted")
    @argument("--verify", action="store_true", help="hash all files on the hosts; damaged ones are sent again")
    @argument("--rollback", nargs="?", type=int, const=1, metavar="N", help="go back to the tree before (or N trees)")
    @mesh_option("the mesh, or a variable with hosts (default: the mesh in use, or this host)")
    def sync(self, found: Arguments) -> SyncReport | None:
        """Give all hosts of a mesh the notebook's folders as they are now; ranks started later run in them."""
        from workspace_sync import sync, verify
        from workspace_sync.model.errors import SyncError

        _check_choices(found)
        notebook = self._notebook
        workspace = notebook.workspaces.chosen(found.magic, found.dirs, found.env, found.links)
        hosts = hosts_named(self._session, notebook.shell.user_ns, found.on, found.magic)
        try:
            with shown_progress(notebook) as progress:
                if found.verify and found.dry_run:
                    report = verify(hosts, workspace, progress=progress)
                else:
                    report = sync(
                        hosts,
                        workspace,
                        env=workspace.env,
                        dry_run=found.dry_run,
                        verify=found.verify,
                        rollback=found.rollback or False,
                        progress=progress,
                    )
        except SyncError as error:
            if error.report is not None:
                display(error.report)
            raise usage_error(found.magic, str(error)) from None
        if not found.dry_run:
            notebook.workspaces.last = workspace
        return report


def _check_choices(found: Arguments) -> None:
    """Raise UsageError if options contradict each other."""
    if found.rollback is not None and found.rollback < 1:
        raise usage_error(found.magic, f"--rollback takes a number of trees of at least 1, not {found.rollback}")
    for choices in (("dry_run", "rollback"), ("verify", "rollback")):
        given = [f"--{name.replace('_', '-')}" for name in choices if getattr(found, name)]
        if len(given) > 1:
            raise usage_error(found.magic, f"give either {given[0]} or {given[1]}, not both")
