"""The hosts that engines give to meshes of the notebook, by the names of the meshes."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from monarch_kernel.kernel.engine_hosts import EngineHosts
from monarch_kernel.launchers.base import JobStatus
from monarch_kernel.subscriptions import Subscribers


class EnginePlaces(MutableMapping[str, EngineHosts]):
    """Where meshes are, or what they wait for. Any thread may use it."""

    def __init__(self) -> None:
        self._places: dict[str, EngineHosts] = {}
        #: Notified when one comes or goes, and of all that an engine says while its hosts are waited for.
        self.changed: Subscribers[[]] = Subscribers("a callback on the hosts of engines")

    def awaited(self) -> dict[str, JobStatus]:
        """What engines have said last of hosts that are waited for, by the ids of their jobs."""
        waiting = [place for place in self.values() if place.waiting]
        return {place.job.job_id: place.status for place in waiting if place.status is not None}

    def __getitem__(self, name: str) -> EngineHosts:
        return self._places[name]

    def __setitem__(self, name: str, place: EngineHosts) -> None:
        self._places[name] = place
        place.on_status = self.changed.notify
        self.changed.notify()

    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self.changed.notify()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._places))

    def __len__(self) -> int:
        return len(self._places)
