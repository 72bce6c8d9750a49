"""Unhandled faults in a notebook: one notice below a cell, without interrupting any code.

A script ends when a failure reaches the root of the supervision tree. A kernel continues: code that waited for the
failed mesh has already received an error, and an unrelated cell is not interrupted.
"""

from __future__ import annotations

import html
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from IPython.display import publish_display_data

from monarch_kernel.actor import ProcMesh
from monarch_kernel.display import tables
from monarch_kernel.kernel.output.cell_errors import MeshCellError
from monarch_kernel.launchers import walltime
from monarch_kernel.launchers.walltime import WalltimeNotice
from monarch_kernel.subscriptions import Subscribers, Subscription

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from monarch_kernel.actor import MeshFailure
    from monarch_kernel.kernel.notebook import Notebook


class FaultNotices:
    """Collects unhandled faults, and shows them below the running cell, or else below the next one.

    A fault that an error has already reported is not reported again.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._waiting: deque[MeshFailure] = deque()
        self._reported: deque[tuple[str, int]] = deque(maxlen=256)  # host and pid of dead ranks of `%%mesh` cells

    def install(self) -> None:
        """Set the fault hook, and subscribe to the beginning and end of cells."""
        from monarch_kernel import actor

        actor.unhandled_fault_hook = self.add
        self._shell.events.register("pre_run_cell", self._before_cell)
        self._shell.events.register("post_run_cell", self._after_cell)

    def add(self, failure: MeshFailure) -> None:
        """The fault hook; called on any thread."""
        self._waiting.append(failure)

    def _before_cell(self, info: Any) -> None:
        self._show()

    def _after_cell(self, result: Any) -> None:
        error = None if result is None else result.error_in_exec
        for part in _chain(error):
            if isinstance(part, MeshCellError):
                self._reported += [(failed.host, failed.pid) for failed in part.failures if failed.death]
        self._show()

    def _show(self) -> None:
        failures: list[MeshFailure] = []
        while self._waiting:
            failure = self._waiting.popleft()
            death = failure.death
            if not failure.was_raised() and (death is None or (death.host, death.pid) not in self._reported):
                failures.append(failure)
        if failures:
            publish_display_data(render(_once_each(failures)))


def _once_each(failures: Sequence[MeshFailure]) -> list[str]:
    """Keep one report per event: the death of a process may end actors of several meshes."""
    events: dict[object, list[MeshFailure]] = {}
    for failure in failures:
        events.setdefault(failure.key if failure.key is not None else id(failure), []).append(failure)
    reports: list[str] = []
    for first, *others in events.values():
        report = first.report()
        if others:
            names = ", ".join(repr(other.mesh) for other in others)
            report += f"\nWith it went actors of {names}."
        reports.append(report)
    return reports


def render(reports: Sequence[str]) -> dict[str, str]:
    """Return the notice as a MIME bundle."""
    folded = "".join(_folded(report) for report in reports)
    return {
        "text/plain": "\n".join(reports),
        "text/html": f'<div style="{tables.WARNING_LINE}">{folded}</div>',
    }


def _folded(report: str) -> str:
    """Return a report as HTML: its first line, which expands to the others."""
    headline, _, rest = report.partition("\n")
    if not rest:
        return f"<div>{html.escape(headline)}</div>"
    return f"<details><summary>{html.escape(headline)}</summary><pre>{html.escape(rest)}</pre></details>"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


# Notify a notebook when the walltime of hosts ends soon: one notice below the running cell.


class WalltimeNotices:
    """Shows each notice of a job of this process once, immediately, and keeps it until the hosts have ended.

    A job with its own ``on_walltime`` callback has handled the event, so no notice is shown for it. Its hosts are still
    reported by `near`.

    Args:
        notebook: the notebook that shows the notices.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._near: list[WalltimeNotice] = []
        self._waiting: list[str] = []  # notices that no cell can show yet
        self._lock = threading.Lock()
        self._subscription: Subscription | None = None
        #: Called with each notice and its text.
        self.changed: Subscribers[[WalltimeNotice, str]] = Subscribers("a callback on a notice of a walltime")

    def install(self) -> None:
        """Begin."""
        self._subscription = walltime.news.subscribe(self._add)

    def close(self) -> None:
        """Show no more."""
        if self._subscription is not None:
            self._subscription.close()

    def near(self) -> list[WalltimeNotice]:
        """Return the notices whose hosts have not ended yet."""
        now = time.time()
        with self._lock:
            self._near = [notice for notice in self._near if notice.ends_at > now]
            return list(self._near)

    def of_mesh(self, mesh: ProcMesh) -> list[str]:
        """Return sentences about the hosts on which a mesh has ranks now."""
        return [
            notice.text(self.otherwise(notice)) for notice in self.near() if mesh.name in self._meshes(notice, [mesh])
        ]

    def otherwise(self, notice: WalltimeNotice) -> str:
        """Return the remedy in this notebook if no replacement hosts were requested."""
        names = self._placed(notice)
        how = f"%mesh heal {names[0]}" if names else "heal(hosts=job)"
        return f"save what you need; when they have ended, {how} asks {notice.engine} for others in their places"

    def show_waiting(self) -> None:
        """Show the notices that arrived while no cell could show them."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for text in waiting:
            self._show(text)

    def _add(self, notice: WalltimeNotice) -> None:
        with self._lock:
            self._near.append(notice)
        names = self._meshes(notice, self._notebook.session.proc_meshes().values()) or self._placed(notice)
        said = notice.text(self.otherwise(notice))
        what = f"mesh{'es' * (len(names) > 1)} {', '.join(names)}" if names else f"job {notice.job} of {notice.engine}"
        if not notice.handled:
            self._show(f"{what}: {said}")
        self.changed.notify(notice, said)

    def _show(self, text: str) -> None:
        if not self._notebook.show_below(render([text])):
            with self._lock:
                self._waiting.append(text)

    def _placed(self, notice: WalltimeNotice) -> list[str]:
        """Return the names of meshes that `%mesh up` has started, or will start, on hosts of that job."""
        return [name for name, place in self._notebook.session.provider_hosts.items() if place.job.job_id == notice.job]

    @staticmethod
    def _meshes(notice: WalltimeNotice, meshes: Iterable[ProcMesh]) -> list[str]:
        """Return the names of those of these meshes that have ranks on the hosts of a notice."""
        workers = {host.worker for host in notice.hosts}
        return [mesh.name for mesh in meshes if any(ref.agent in workers for ref in mesh._target().procs)]
