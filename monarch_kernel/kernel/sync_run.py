"""Syncs that a cell waits for: which hosts and folders they are about, and their progress in the cell."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from monarch_kernel.actor import HostMesh, ProcMesh, this_host
from monarch_kernel.kernel.output.sync_tables import progress_line
from monarch_kernel.kernel.progress import QUIET
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.kernel.usage_errors import nearest, usage_error

if TYPE_CHECKING:
    from monarch_kernel.kernel.notebook import Notebook
    from workspace_sync.model.progress import SyncProgress
    from workspace_sync.model.report import SyncReport
    from workspace_sync.model.workspace import Links, Workspace


class Workspaces:
    """What the cells of a notebook have synced.

    Attributes:
        last: the workspace of the last sync; None before the first.
    """

    def __init__(self) -> None:
        self.last: Workspace | None = None

    def chosen(self, command: str, dirs: Sequence[str], env: bool, links: Links | None) -> Workspace:
        """The workspace that a line names: its folders; else those of the last sync, or else the notebook's folder.

        Args:
            command: for errors.
            dirs: folders.
            env: with the environment of this kernel. Once synced, it stays part of the workspace.
            links: what becomes of links that lead out of the workspace.

        Raises:
            UsageError: a folder does not exist, or the folders do not go together.
        """
        from workspace_sync.model.workspace import CondaEnvironment, Workspace

        last = self.last
        try:
            active = CondaEnvironment() if env else None
            if active is not None:
                active.conda_prefix  # noqa: B018  # raises if there is none
            if not dirs and last is not None:
                return Workspace(last.dirs, active or last.env, links=links or last.links)
            return Workspace(list(dirs) or ["."], active, links=links or "refuse")
        except (OSError, ValueError) as error:
            raise usage_error(command, str(error)) from None


def hosts_named(session: MeshSession, variables: dict[str, Any], name: str | None, command: str) -> HostMesh | ProcMesh:
    """The mesh whose hosts a line means.

    Args:
        session: the notebook's meshes.
        variables: the notebook's variables; one of them may be a mesh of hosts.
        name: a mesh or a variable; None: the mesh in use, or this host if no mesh is up.
        command: for errors.

    Raises:
        UsageError: there is no such mesh.
    """
    meshes = session.proc_meshes()
    if name is None and not meshes:
        return this_host()
    if name is None or name in meshes:
        return session.find(name, command)
    value = variables.get(name)
    if isinstance(value, HostMesh | ProcMesh):
        return value
    known = [*meshes, *(each for each, held in variables.items() if isinstance(held, HostMesh))]
    there = f"there are {', '.join(known)}" if known else "no mesh is up"
    raise usage_error(command, f"there is no mesh {name!r}{nearest(name, known)}; {there}")


def sync_to(notebook: Notebook, command: str, hosts: HostMesh | ProcMesh) -> SyncReport:
    """Sync the notebook's workspace to some hosts.

    Raises:
        UsageError: a host stays on its old tree.
    """
    from workspace_sync import sync
    from workspace_sync.model.errors import SyncError

    workspace = notebook.workspaces.chosen(command, (), False, None)
    try:
        with shown_progress(notebook) as progress:
            report = sync(hosts, workspace, env=workspace.env, progress=progress)
    except SyncError as error:
        raise usage_error(command, str(error)) from None
    notebook.workspaces.last = workspace
    return report


@contextmanager
def shown_progress(notebook: Notebook) -> Generator[Callable[[SyncProgress], None]]:
    """Show the progress of a sync in the running cell, if it takes long."""
    output = notebook.progress_output()
    began = time.monotonic()

    def show(progress: SyncProgress) -> None:
        if progress.note:
            print(progress.note)
        elif output is not None and time.monotonic() - began >= QUIET and output.progress(progress_line(progress)):
            notebook.router.touch(output)

    try:
        yield show
    finally:
        if output is not None and output.progress(""):
            output.show()
