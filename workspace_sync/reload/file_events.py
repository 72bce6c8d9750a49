"""Sync and reload at every save: a thread of the client watches the folders of a workspace."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec
import watchfiles

from workspace_sync.reload.client import How, When
from workspace_sync.reload.live import LiveReport, sync_live
from workspace_sync.reload.refresh_report import EVERY, ModuleSelection
from workspace_sync.scanning.rules import Rules, rules_around, rules_within
from workspace_sync.session import Folders, workspace_of

if TYPE_CHECKING:
    from monarch_kernel.actor import HostMesh, ProcMesh


log = logging.getLogger(__name__)

#: Changes closer together than this count as one (ms); the second number bounds the delay of each.
STEP, MOST_STEPS = 50, 1600
#: The interval at which a failed sync is retried without a change (seconds). It doubles each time.
RETRY = 5.0
#: The time limit for a git command that runs in the folders (seconds).
GIT_PATIENCE = 20.0
_LOOK = 200  # the interval of checks whether to stop (ms)


class SyncEvent(msgspec.Struct):
    """Event of a watcher.

    Attributes:
        kind: "synced", "failed" (reported once, until a sync succeeds or fails for another reason), or "stopped".
        text: one line; for a failure, a line for each reason.
        report: the receipt; None if there was no sync.
    """

    kind: Literal["synced", "failed", "stopped"]
    text: str
    report: LiveReport | None = None


class Watcher:
    """A thread that syncs at every change, until ``stop``. Created by ``watch``.

    Args:
        folders: the folders to watch.
        act: syncs; raises on failure.
        on_event: called with each event, on the watcher's thread.
    """

    def __init__(
        self, folders: list[str], act: Callable[[], LiveReport], on_event: Callable[[SyncEvent], object]
    ) -> None:
        self._folders = folders
        self._act = act
        self._on_event = on_event
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._said = ""
        self._ignored = Ignored(folders)
        self._thread = threading.Thread(target=self._run, name="workspace watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait for the end of the first sync, after which changes are noticed. Return whether it ended in time."""
        return self._ready.wait(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the thread ends. KeyboardInterrupt does not end it."""
        self._thread.join(timeout)

    def stop(self, timeout: float = 30.0) -> None:
        """Stop the thread; a sync in progress is completed."""
        self._stop.set()
        atexit.unregister(self.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        text = "it was stopped"
        try:
            self._watch()
        except Exception as e:
            log.debug("the watch ends", exc_info=True)
            text = f"{', '.join(self._folders)} cannot be watched any more: {type(e).__name__}: {e}"
        self._ready.set()
        self._tell(SyncEvent("stopped", text))

    def _watch(self) -> None:
        failures, again_at = 0, 0.0
        wanted = True  # at first, because there may be earlier changes
        # Changes while this loop is busy are in the next set.
        for found in watchfiles.watch(
            *self._folders,
            watch_filter=None,
            debounce=MOST_STEPS,
            step=STEP,
            stop_event=self._stop,
            rust_timeout=_LOOK,
            yield_on_timeout=True,
            raise_interrupt=False,
            ignore_permission_denied=True,
        ):
            if found and not wanted:
                wanted = self._ignored.any_counts({path for _, path in found})
            if self._stop.is_set():
                return
            if wanted or (failures and time.monotonic() >= again_at):
                wanted = False
                self._wait_for_git()
                failures = 0 if self._sync() else failures + 1
                again_at = time.monotonic() + RETRY * 2 ** min(failures, 6)
                self._ready.set()

    def _sync(self) -> bool:
        """Sync once; return whether no retry is needed."""
        try:
            report = self._act()
        except Exception as e:
            log.debug("a sync of the watch failed", exc_info=True)
            self._fail(str(e) or type(e).__name__, getattr(e, "report", None))
            return False
        problems = report.problems
        if problems:
            self._fail("\n".join(problems), report)
        elif report.refreshed or self._said or any(host.switched for host in report.sync.hosts):
            self._said = ""
            self._tell(SyncEvent("synced", report.line, report))
        return True

    def _fail(self, text: str, report: object) -> None:
        if text != self._said:
            self._said = text
            self._tell(SyncEvent("failed", text, report if isinstance(report, LiveReport) else None))

    def _tell(self, event: SyncEvent) -> None:
        try:
            self._on_event(event)
        except Exception:
            log.exception("an event of the watch could not be shown: %s", event.text)

    def _wait_for_git(self) -> None:
        """Wait for a checkout in progress, which counts as one change however long it takes."""
        locks = [os.path.join(folder, ".git", "index.lock") for folder in self._folders]
        deadline = time.monotonic() + GIT_PATIENCE
        while any(map(os.path.exists, locks)) and time.monotonic() < deadline and not self._stop.is_set():
            self._stop.wait(STEP / 1000)


class Ignored:
    """Decides which changed paths a sync leaves out, by the rules of the scan.

    Args:
        folders: of the workspace.
    """

    def __init__(self, folders: list[str]) -> None:
        self._folders = [os.fsencode(folder) for folder in folders]

    def any_counts(self, paths: set[str]) -> bool:
        """Return whether a sync includes at least one of these paths."""
        known: dict[bytes, Rules | None] = {}
        return any(self._counts(os.fsencode(path), known) for path in paths)

    def _counts(self, path: bytes, known: dict[bytes, Rules | None]) -> bool:
        for root in self._folders:
            if path == root:
                return True
            if path.startswith(root + b"/"):
                folder, name = os.path.split(path)
                rules = self._within(folder, root, known)
                if rules is None:
                    return False
                line = rules.verdict(name, path, os.path.isdir(path))
                return line is None or line.brings_back
        return False

    def _within(self, folder: bytes, root: bytes, known: dict[bytes, Rules | None]) -> Rules | None:
        """Return the rules within a folder; None if the folder itself is left out."""
        if folder in known:
            return known[folder]
        if folder == root:
            found: Rules | None = rules_within(root, rules_around(root))
        else:
            parent, name = os.path.split(folder)
            around = self._within(parent, root, known)
            line = around.verdict(name, folder, True) if around is not None else None
            left_out = around is None or (line is not None and not line.brings_back)
            found = None if left_out or around is None else rules_within(folder, around)
        known[folder] = found
        return found


def watch(
    hosts: HostMesh | ProcMesh,
    workspace: Folders,
    *,
    on_event: Callable[[SyncEvent], object],
    how: How | None = "reload",
    selection: ModuleSelection | Callable[[], ModuleSelection] = EVERY,
    when: When = "idle",
    wait: float = 5.0,
) -> Watcher:
    """Sync a workspace now and at every save, and make running ranks follow.

    Args:
        hosts: a mesh of hosts or procs.
        workspace: the content to watch and sync: a ``Workspace``, or one or several folders.
        on_event: called with each ``SyncEvent`` on a separate thread. Not called if nothing has changed.
        how, when, wait: as for ``refresh``; ``how=None`` only syncs.
        selection: the modules to reload, or a function that returns the current selection (the mode of
            ``%autoreload``).

    Returns:
        The watcher; ``stop()`` ends it.

    Raises:
        ValueError: the workspace has no folders.
    """
    found = workspace_of(workspace)
    folders = list(found.roots())
    if not folders:
        raise ValueError("this workspace has no folders to watch")

    def act() -> LiveReport:
        chosen = selection() if callable(selection) else selection
        return sync_live(hosts, found, how=how, selection=chosen, when=when, wait=wait)

    return Watcher(folders, act, on_event)
