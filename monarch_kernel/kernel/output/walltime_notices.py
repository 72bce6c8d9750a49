"""The end of the walltime of hosts in a notebook: one notice below the cell that runs, and which hosts it concerns."""

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
    """Shows each notice of a job of this process once, at once, and keeps those whose hosts have not ended.

    A job with an ``on_walltime`` of its own has told whoever it concerns: it gets no notice here, but its hosts are
    told of as any others.

    Args:
        notebook: where they are shown.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._near: list[WalltimeNotice] = []
        self._waiting: list[str] = []  # what no cell can show yet
        self._lock = threading.Lock()
        self._subscription: Subscription | None = None
        #: Notified of each notice, with its text.
        self.changed: Subscribers[[WalltimeNotice, str]] = Subscribers("a callback on a notice of a walltime")

    def install(self) -> None:
        """Begin."""
        self._subscription = walltime.news.subscribe(self._add)

    def close(self) -> None:
        """Show no more."""
        if self._subscription is not None:
            self._subscription.close()

    def near(self) -> list[WalltimeNotice]:
        """The notices whose hosts have not ended yet."""
        now = time.time()
        with self._lock:
            self._near = [notice for notice in self._near if notice.ends_at > now]
            return list(self._near)

    def of_mesh(self, mesh: ProcMesh) -> list[str]:
        """Sentences about the hosts on which a mesh has ranks now."""
        return [
            notice.text(self.otherwise(notice)) for notice in self.near() if mesh.name in self._meshes(notice, [mesh])
        ]

    def otherwise(self, notice: WalltimeNotice) -> str:
        """What to do in this notebook if nobody has asked for other hosts."""
        names = self._placed(notice)
        how = f"%mesh heal {names[0]}" if names else "heal(hosts=job)"
        return f"save what you need; when they have ended, {how} asks {notice.engine} for others in their places"

    def show_waiting(self) -> None:
        """Show what came while no cell could show it."""
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
        """The names of meshes that `%mesh up` has started on hosts of that job, or is to start there."""
        return [name for name, place in self._notebook.session.provider_hosts.items() if place.job.job_id == notice.job]

    @staticmethod
    def _meshes(notice: WalltimeNotice, meshes: Iterable[ProcMesh]) -> list[str]:
        """The names of those of these meshes that have ranks on the hosts of a notice."""
        workers = {host.worker for host in notice.hosts}
        return [mesh.name for mesh in meshes if any(ref.agent in workers for ref in mesh._target().procs)]
