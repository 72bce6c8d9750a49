"""The messages of a watch for one front end: a snapshot, then changed fields, as long as it renews its lease. Pure.

docs/watching.md describes the messages. A feed never waits: its owner calls `Feed.push` after each change, or when the
time returned by the last call is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from monarch_kernel.watch.model import Delta, FailureView, Snapshot, plain

if TYPE_CHECKING:
    from monarch_kernel.watch.watcher import Watch

#: How long a front end is served after its last lease (seconds).
LEASE = 10.0
#: The minimum interval between messages with changes (seconds).
SHORTEST_PERIOD = 0.2
#: The maximum interval that a front end may request (seconds).
LONGEST_PERIOD = 60.0

#: Kinds of failures that cause a notice, with the level of the notice. Errors of endpoints are shown where they are
#: raised.
_LEVELS = {"death": "error", "hang": "error", "unresponsive": "warning", "walltime": "warning"}

Message = dict[str, object]
"""A message as plain JSON values."""


class Feed:
    """Produces the messages for one front end.

    Args:
        watch: the watch to send.
        send: called with each message for the front end.
        clock: returns seconds since 1970. Each lease is answered with this time, because the front end's clock may
            differ.
    """

    def __init__(self, watch: Watch, send: Callable[[Message], object], clock: Callable[[], float] = time.time) -> None:
        self._watch = watch
        self._send = send
        self._clock = clock
        self._renewed = False  # a lease has arrived and needs an answer
        self._period = SHORTEST_PERIOD
        self._lease = float("-inf")
        self._due = float("-inf")
        self._noticed = 0  # the number of the last failure with a notice
        self.version: int | None = None
        """The version that the front end has; None before the first snapshot, and when it has asked for another."""

    @property
    def period(self) -> float:
        """The minimum time between two messages (seconds)."""
        return self._period

    def receive(self, message: Mapping[str, object], now: float) -> bool:
        """Handle a message of the front end.

        Args:
            message: the message; only `lease` and `again` are handled.
            now: the time on the same clock as for `push` (seconds).

        Returns:
            Whether the message was handled, so that `push` must be called.
        """
        kind = message.get("kind")
        if kind == "lease":
            self._lease = now + LEASE
            self._renewed = True
            period = message.get("period")
            if isinstance(period, int | float) and period == period:
                earlier, self._period = self._period, min(max(float(period), SHORTEST_PERIOD), LONGEST_PERIOD)
                self._due += self._period - earlier
        elif kind == "again":
            self.version = None
        else:
            return False
        return True

    def is_open(self, now: float) -> bool:
        """Return whether the front end has renewed its lease in time."""
        return now < self._lease

    def push(self, now: float) -> float | None:
        """Send what is due; ``now`` is as for `receive`.

        Returns:
            The time until pending changes may be sent (seconds), 0 if that is now; None if the lease has expired.
        """
        if not self.is_open(now):
            self.version = None  # a returning front end gets everything
            return None
        if self.version is None:
            snapshot = self._watch.snapshot()
            self.version = snapshot.version
            self._send(snapshot_message(snapshot))
            self._due = now + self._period
        elif now >= self._due:
            delta = self._watch.since(self.version)
            if delta:
                self.version = delta.version
                self._send(changes_message(delta))
                for failure in delta.failures:
                    self._notify(failure)
                self._due = now + self._period
        if self._renewed:
            self._renewed = False
            self._send({"kind": "alive", "time": self._clock(), "version": self.version})
        return max(0.0, self._due - now)

    def _notify(self, failure: FailureView) -> None:
        """Send a notice of a failure that users should see even if the page is hidden.

        Only once for a growing failure.
        """
        level = _LEVELS.get(failure.kind)
        if level is not None and failure.number > self._noticed:
            self._noticed = failure.number
            self._send({"kind": "notice", "level": level, "mesh": failure.mesh, "text": failure.text})

    def lease_left(self, now: float) -> float:
        """Return the remaining time of the lease (seconds)."""
        return max(0.0, self._lease - now)


def snapshot_message(snapshot: Snapshot) -> Message:
    """Return the complete state as a `snapshot` message. Fields with their default are left out of views."""
    return {
        "kind": "snapshot",
        "version": snapshot.version,
        "time": snapshot.time,
        "meshes": [plain(mesh) for mesh in snapshot.meshes.values()],
        "hosts": [plain(host) for host in snapshot.hosts.values()],
        "ranks": {mesh: [plain(rank) for rank in ranks] for mesh, ranks in snapshot.ranks.items()},
        "failures": [plain(failure) for failure in snapshot.failures],
        "jobs": [plain(job) for job in snapshot.jobs.values()],
    }


def changes_message(delta: Delta) -> Message:
    """Return the changes as a `changes` message: for ranks only the changed fields, otherwise whole views."""
    ranks: dict[str, dict[str, object]] = {}
    for (mesh, number), rank in delta.ranks.items():
        fields = delta.fields.get((mesh, number))
        # Fields with their default are included: "idle again" is a change, too.
        told = {name: plain(getattr(rank, name)) for name in sorted(fields)} if fields else _whole(rank)
        ranks.setdefault(mesh, {})[str(number)] = told
    return {
        "kind": "changes",
        "base": delta.base,
        "version": delta.version,
        "time": delta.time,
        "meshes": [plain(mesh) for mesh in delta.meshes.values()],
        "hosts": [plain(host) for host in delta.hosts.values()],
        "ranks": ranks,
        "jobs": [plain(job) for job in delta.jobs.values()],
        "gone": {"meshes": list(delta.gone_meshes), "hosts": list(delta.gone_hosts), "jobs": list(delta.gone_jobs)},
        "failures": [plain(failure) for failure in delta.failures],
    }


def _whole(view: msgspec.Struct) -> dict[str, object]:
    return {name: plain(getattr(view, name)) for name in view.__struct_fields__}
