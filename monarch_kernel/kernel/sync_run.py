"""Syncs that a cell waits for: their hosts and folders, and their progress in the cell."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.display import display

from monarch_kernel.actor import HostMesh, ProcMesh
from monarch_kernel.display.tables import table_text
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.output.formatters import HostTree
from monarch_kernel.kernel.progress import shown_line
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.launchers.host_request import nearest
from monarch_kernel.meshes import name_ranks, parse_ranks
from monarch_kernel.workers import placement_of
from workspace_sync.receipt import forgotten_table, kept_text, names, progress_line

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from monarch_kernel.kernel.notebook import Notebook
    from workspace_sync.model.sync_report import SyncProgress, SyncReport
    from workspace_sync.model.workspace import Links, Workspace
    from workspace_sync.reload.client import How
    from workspace_sync.reload.file_events import SyncEvent, Watcher
    from workspace_sync.reload.live import LiveReport
    from workspace_sync.reload.refresh_report import ModuleSelection
    from workspace_sync.transfer.messages import HostState


#: Called with each text for the user; `print` if a cell runs the sync.
Say = Callable[[str], object]

#: The time for a running sync to finish when its watch ends (seconds).
END_TIMEOUT = 2.0


class Workspaces:
    """The workspaces that the cells of a notebook have synced.

    Attributes:
        last: the workspace of the last sync; None before the first.
    """

    def __init__(self) -> None:
        self.last: Workspace | None = None
        self._watcher: Watcher | None = None
        self._line: SyncEventLine | None = None

    def chosen(
        self,
        command: str,
        dirs: Sequence[str],
        env: bool,
        links: Links | None,
        with_python: bool = False,
        lock: str | None = None,
    ) -> Workspace:
        """Return the workspace for a line: its folders, else those of the last sync, else the notebook's folder.

        Args:
            command: the command, for errors.
            dirs: folders.
            env: include the environment of this kernel. Once synced, it stays part of the workspace.
            links: how to treat links that lead out of the workspace.
            with_python: include the Python from which the environment was created.
            lock: the lock file of the environment; hosts install from it what they can.

        Raises:
            UsageError: a folder does not exist, or the folders cannot be combined.
        """
        from workspace_sync.model.workspace import CondaEnvironment, Workspace

        last = self.last
        try:
            active = CondaEnvironment(with_python=with_python, lock=lock) if env else None
            if active is not None:
                active.conda_prefix  # noqa: B018  # raises if there is none
            if not dirs and last is not None:
                return Workspace(last.dirs, active or last.env, links=links or last.links)
            return Workspace(list(dirs) or ["."], active, links=links or "refuse")
        except (OSError, ValueError) as error:
            raise usage_error(command, str(error)) from None

    def forgotten(self, workspace: Workspace) -> str:
        """Stop watching a workspace that was removed from hosts. Return a line; empty if it was not watched."""
        if self.last is None or self.last.id != workspace.id:
            return ""
        ended = self.unwatch()
        self.last = None
        return ended

    # -- the watch ------------------------------------------------------------------------------

    def watch(self, notebook: Notebook, hosts: HostMesh | ProcMesh, workspace: Workspace, how: How) -> None:
        """Sync at every save from now on, and show the last event in one line of the running cell."""
        from workspace_sync.reload.file_events import watch
        from workspace_sync.reload.refresh_report import ModuleSelection

        self.unwatch()
        self.last = workspace
        line = self._line = SyncEventLine(notebook)
        self._watcher = watch(
            hosts,
            workspace,
            on_event=line.on_event,
            how=how,
            selection=lambda: autoreload_selection(notebook.shell) or ModuleSelection(),
        )
        self._watcher.wait_ready()

    def unwatch(self) -> str:
        """End the watch, if there is one. Return a line for the user; empty if there was none."""
        watcher, self._watcher = self._watcher, None
        if watcher is None or self._line is None:
            return ""
        watcher.stop(END_TIMEOUT)
        return f"no longer watched: {', '.join(map(str, self.last.roots() if self.last else ()))}"


class SyncEventLine:
    """The line of a watch, updated in the cell that started it.

    Args:
        notebook: the notebook of that cell.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._router = notebook.router
        self._output = notebook.progress_output()

    def on_event(self, event: SyncEvent) -> None:
        """Show an event. Called on the watcher's thread."""
        output = self._output
        if output is None:
            return
        said = f"{time.strftime('%H:%M:%S')} {event.text}"
        if output.live:
            if output.notice(said):
                self._router.touch(output)
        elif event.kind != "synced":  # a terminal cannot replace a line, and the user may be typing
            output.show_text("stderr", f"{said}\n")


def autoreload_selection(shell: InteractiveShell) -> ModuleSelection | None:
    """Return the mode of `%autoreload` in this kernel, for ranks; None if that extension is not loaded."""
    from workspace_sync.reload.refresh_report import selection_of

    magics = shell.magics_manager.registry.get("AutoreloadMagics")
    if magics is None:
        return None
    state = magics._reloader
    mode = "off" if not state.enabled else "all" if state.check_all else "explicit"
    return selection_of(mode, state.modules, state.skip_modules)


def hosts_named(
    session: MeshSession, variables: dict[str, object], name: str | None, command: str
) -> HostMesh | ProcMesh:
    """Return the mesh whose hosts a line refers to.

    Args:
        session: the notebook's meshes.
        variables: the notebook's variables; one of them may be a mesh of hosts.
        name: a mesh or a variable; None: the mesh in use, or this host if no mesh is up.
        command: the command, for errors.

    Raises:
        UsageError: there is no such mesh.
    """
    meshes = session.proc_meshes()
    if name is None and not meshes:
        return tool_runtime().this_host()
    if name is None or name in meshes:
        return session.find(name, command)
    value = variables.get(name)
    if isinstance(value, HostMesh | ProcMesh):
        return value
    known = [*meshes, *(each for each, held in variables.items() if isinstance(held, HostMesh))]
    there = f"there are {', '.join(known)}" if known else "no mesh is up"
    raise usage_error(command, f"there is no mesh {name!r}{nearest(name, known)}; {there}")


def host_trees(notebook: Notebook, mesh: ProcMesh, timeout: float) -> list[HostTree]:
    """Return the synced trees of a mesh's hosts; empty if there was no sync or hosts do not answer."""
    if "sync" not in tool_runtime().OFFERS or tool_runtime().is_joined(mesh) or not any(placement_of(mesh)):
        return []
    from workspace_sync import SyncError, status
    from workspace_sync.sources import ENVIRONMENT, TREE

    answers: queue.SimpleQueue[list[HostState]] = queue.SimpleQueue()

    def ask() -> None:
        with suppress(UsageError, SyncError):  # a folder no longer exists
            answers.put(status(mesh, notebook.workspaces.chosen("%mesh status", (), False, None)))

    threading.Thread(target=ask, name="monarch-host-trees", daemon=True).start()
    try:
        states = answers.get(timeout=timeout)
    except queue.Empty:
        return []
    now = time.time()
    found: list[HostTree] = []
    for state in states:
        digests = {part: about.digest.hex() for part, about in state.parts.items()}
        since = next((each.time for each in state.generations if each.number == state.generation), now)
        earlier = sum(each.number != state.generation for each in state.generations)
        tree, environment = digests.get(TREE, ""), digests.get(ENVIRONMENT, "")
        kept = kept_text(state.kept_files, state.kept_bytes)
        found.append(
            HostTree(
                state.host,
                tree,
                environment,
                max(0.0, now - since),
                earlier,
                state.repair,
                state.left,
                f"{kept} kept in {state.path}/kept" if kept else "",
            )
        )
    return found


def older_modules(mesh: ProcMesh, timeout: float) -> dict[int, list[str]]:
    """Return the outdated modules of the ranks that answer in time: their hosts have newer versions."""
    from workspace_sync.reload.client import stale_modules

    found: dict[int, list[str]] = {}
    for module in stale_modules(mesh, timeout=timeout):
        for rank in parse_ranks(module.ranks, mesh.extent):
            found.setdefault(rank, []).append(module.name)
    return found


def sync_to(notebook: Notebook, command: str, hosts: HostMesh | ProcMesh, say: Say = print) -> SyncReport:
    """Sync the notebook's workspace to some hosts.

    Raises:
        UsageError: a host stays on its old tree.
    """
    from workspace_sync import sync

    workspace = notebook.workspaces.chosen(command, (), False, None)
    with sync_errors(command, say), shown_progress(notebook, say) as progress:
        report = sync(hosts, workspace, env=workspace.env, progress=progress)
    notebook.workspaces.last = workspace
    return report


def forget_on(
    notebook: Notebook,
    command: str,
    hosts: HostMesh | ProcMesh,
    workspace: Workspace,
    *,
    kept: bool,
    dry_run: bool,
) -> None:
    """Remove a workspace from some hosts, and print what was removed and what is kept.

    Raises:
        UsageError: processes use it, or a host cannot remove it.
    """
    from workspace_sync import forget

    with sync_errors(command):
        found = forget(hosts, workspace, kept=kept, dry_run=dry_run)
    print(table_text(forgotten_table(found, "%mesh sync --forget --kept")))
    if not dry_run and (ended := notebook.workspaces.forgotten(workspace)):
        print(ended)


@contextmanager
def sync_errors(command: str, say: Say = print) -> Generator[None]:
    """Show the report of a sync that failed on some hosts, and raise its error as a sentence."""
    from workspace_sync.model.errors import SyncError

    try:
        yield
    except SyncError as error:
        # The report of one host would repeat the error.
        shown = say is print and len(getattr(error.report, "hosts", ())) > 1
        if shown:
            display(error.report)
        raise usage_error(command, error.headline if shown else str(error)) from None


def show_receipt(live: LiveReport, say: Say = print) -> SyncReport:
    """Report changes that ranks do not pick up. Return the report, for the cell to show."""
    for each in live.refreshed:
        if each.respawned:
            restored = f", from their checkpoints: {names(each.restored)}" if each.restored else ""
            say(f"mesh {each.mesh}: created again: {names(each.respawned)}{restored}")
        if each.how == "restart" and (restarted := [rank.rank for rank in each.ranks if not rank.error]):
            say(f"mesh {each.mesh}: restarted: {name_ranks(restarted, limit=6)}")
        for why, ranks in each.errors.items():
            say(f"mesh {each.mesh}: {name_ranks(ranks, limit=6)} left alone: {why}")
    return live.sync


@contextmanager
def shown_progress(notebook: Notebook, say: Say = print) -> Generator[Callable[[SyncProgress], None]]:
    """Show the progress of a sync in the running cell, if the sync takes long and the cell waits for it."""
    with shown_line(notebook, "sync: asking the hosts what they have", say is print) as tell:

        def show(progress: SyncProgress) -> None:
            if progress.note:
                say(progress.note)
            else:
                tell(progress_line(progress))

        yield show
