"""Notify a notebook when the walltime of hosts ends soon: one notice below the running cell."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from monarch_kernel.actor import ProcMesh
from monarch_kernel.kernel.output.fault_notices import render
from monarch_kernel.launchers import walltime
from monarch_kernel.launchers.walltime import WalltimeNotice
from monarch_kernel.subscriptions import Subscribers, Subscription

if TYPE_CHECKING:
    from monarch_kernel.kernel.notebook import Notebook


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
