"""Facts from workspace syncs: the trees of hosts, and ranks with older modules than their hosts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from monarch_kernel.actor import ProcMesh
from monarch_kernel.introspection import whole_of
from monarch_kernel.meshes import list_proc_meshes, on_change, parse_ranks
from monarch_kernel.watch.facts import HostFact, ProcFact
from monarch_kernel.watch.sources import Give
from monarch_kernel.workers import placement_of
from workspace_sync.news import on_synced, trees

log = logging.getLogger(__name__)

#: The time for ranks to report their imported modules (seconds).
ASK_TIMEOUT = 2.0


def follow_syncs(give: Give) -> Callable[[], None]:
    """Start the source. Ranks are queried after each sync, and at the start if their hosts have synced trees."""
    follower = _Follower(give)
    subscriptions = (on_synced.subscribe(follower.on_synced), on_change(follower.tell_trees))
    follower.tell_trees()
    if any(any(placement_of(mesh)) for mesh in list_proc_meshes()):
        follower.ask()

    def end() -> None:
        for subscription in subscriptions:
            subscription.close()
        follower.ended = True

    return end


class _Follower:
    """Queries ranks on a separate thread, one at a time, because busy ranks answer late."""

    def __init__(self, give: Give) -> None:
        self._give = give
        self._lock = threading.Lock()
        self._asking = False
        self._again = False
        self.ended = False

    def on_synced(self) -> None:
        self.tell_trees()
        self.ask()

    def tell_trees(self) -> None:
        """Report the trees of all hosts. The board ignores hosts without meshes."""
        for key, (tree, environment) in dict(trees).items():
            self._give(HostFact(key, {"tree": tree, "environment": environment}))

    def ask(self) -> None:
        with self._lock:
            self._again = True
            if self._asking:
                return
            self._asking = True
        threading.Thread(target=self._run, name="monarch-watch-syncs", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._again or self.ended:
                    self._asking = False
                    return
                self._again = False
            for mesh in list_proc_meshes():
                try:
                    self._tell(mesh)
                except Exception as e:  # the mesh is ending, or a rank does not answer: keep the last state
                    log.debug("the older modules of %s are unknown: %s", mesh.name, e)

    def _tell(self, mesh: ProcMesh) -> None:
        from workspace_sync.reload import stale_modules

        whole = whole_of(mesh).procs
        stale = stale_modules(whole, timeout=ASK_TIMEOUT)
        older = {rank for module in stale for rank in parse_ranks(module.ranks, whole.extent)}
        if not self.ended:
            procs = whole._target().procs
            self._give(*(ProcFact(ref.id, {"older": rank in older}) for rank, ref in enumerate(procs)))
