"""Monotonic counters: counts of ranks that survive replaced ranks, failures, heals, and latencies of calls."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter

from monarch_kernel.watch.model import Delta, RankState, RankView

#: The upper bounds of the latency buckets (seconds).
BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
#: The number of endpoints with a separate histogram; the others share one.
MOST_ENDPOINTS = 200
#: The name of the shared histogram.
OTHERS = "other"

_FIELDS = {"calls": "calls", "call_failures": "failures", "sent_bytes": "sent", "received_bytes": "received"}


class Counters:
    """Counts since construction. ``note`` is for one thread; ``observe`` and ``latencies`` are thread-safe.

    Attributes:
        sums: by counter name, then by the names of mesh and host.
        events: failures by the name of the mesh and their kind.
        heals: healed ranks by the name of the mesh.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in _FIELDS}
        self.events: Counter[tuple[str, ...]] = Counter()
        self.heals: Counter[str] = Counter()
        self._seen: dict[tuple[str, int], RankView] = {}
        self._names: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._lock = threading.Lock()
        self._latencies: dict[str, tuple[list[int], list[float]]] = {}

    # -- what a watch sees --------------------------------------------------------------------------

    def note(self, delta: Delta) -> None:
        """Count changes."""
        self._names.update((key, mesh.name) for key, mesh in delta.meshes.items())
        self._hosts.update((key, host.name) for key, host in delta.hosts.items())
        for (key, rank), view in delta.ranks.items():
            before = self._seen.get((key, rank))
            self._seen[key, rank] = view
            self._rank(self._names.get(key, key), before, view)
        for failure in delta.failures:
            self.events[self._names.get(failure.mesh, failure.mesh), failure.kind] += 1
        for key in delta.gone_meshes:
            for place in [place for place in self._seen if place[0] == key]:
                del self._seen[place]
            self._names.pop(key, None)

    def _rank(self, mesh: str, before: RankView | None, view: RankView) -> None:
        at = (mesh, self._hosts.get(view.host, view.host))
        same = before is not None and before.proc == view.proc
        for name, field in _FIELDS.items():
            now = getattr(view, field)
            was = getattr(before, field) if same else 0
            self.sums[name][at] += now - was if now >= was else now  # the counts of an actor vanish with it
        if before is not None and not same and before.state in (RankState.DEAD, RankState.HEALING):
            self.heals[mesh] += 1

    # -- calls --------------------------------------------------------------------------------------

    def observe(self, label: str, seconds: float) -> None:
        """Count a call of this controller."""
        with self._lock:
            found = self._latencies.get(label)
            if found is None:
                if len(self._latencies) >= MOST_ENDPOINTS:
                    label = OTHERS
                found = self._latencies.setdefault(label, ([0] * (len(BOUNDS) + 1), [0.0]))
            found[0][bisect_left(BOUNDS, seconds)] += 1
            found[1][0] += seconds

    def latencies(self) -> list[tuple[str, tuple[list[int], float]]]:
        """Return for each endpoint how many calls fell into each bucket, and the sum of their times."""
        with self._lock:
            return [(label, (list(counts), total[0])) for label, (counts, total) in self._latencies.items()]
