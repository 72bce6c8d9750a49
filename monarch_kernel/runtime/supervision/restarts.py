"""Decide when a mesh with failed ranks restarts automatically. Pure: times in, decisions out."""

from __future__ import annotations

from collections import deque

import msgspec

WHEN = ("never", "on_failure")
SCOPES = ("rank", "all")


class RestartPolicy(msgspec.Struct, frozen=True):
    """The automatic reaction to dead procs of a mesh.

    Attributes:
        when: "on_failure": replace them; "never": report the failure to their owner.
        limit: the maximum number of restarts within ``within`` seconds; the next failure is reported to the owner.
        backoff: seconds before the first restart; doubled for each further one, up to ``backoff_max``.
        scope: "rank": restart only the dead ranks; "all": restart all ranks of the mesh together, as for a training job
            that has lost its process group.
    """

    when: str = "on_failure"
    limit: int = 3
    within: float = 60.0
    backoff: float = 0.0
    backoff_max: float = 30.0
    scope: str = "rank"

    def __post_init__(self) -> None:
        if self.when not in WHEN:
            raise ValueError(f"restart={self.when!r}: use one of {', '.join(map(repr, WHEN))}")
        if self.scope not in SCOPES:
            raise ValueError(f"scope={self.scope!r}: use one of {', '.join(map(repr, SCOPES))}")
        if self.limit < 1 or self.within <= 0 or self.backoff < 0 or self.backoff_max < 0:
            raise ValueError(f"{self}: limit must be at least 1, within more than 0, and no wait negative")


#: Deaths within this time count as one event, such as a host that dies with its ranks (seconds).
TOGETHER = 0.5


class Restarts:
    """The restarts of each mesh so far."""

    def __init__(self) -> None:
        self._policies: dict[str, RestartPolicy] = {}
        self._times: dict[str, deque[float]] = {}
        self._pending: dict[str, float] = {}

    def add(self, mesh: str, policy: RestartPolicy) -> None:
        """Set the policy of a mesh."""
        if policy.when != "never":
            self._policies[mesh] = policy
            self._times[mesh] = deque()

    def remove(self, mesh: str) -> None:
        """Remove the policy of a mesh that has ended."""
        for known in (self._policies, self._times, self._pending):
            known.pop(mesh, None)

    def policy(self, mesh: str) -> RestartPolicy | None:
        """Return the policy of a mesh; None if it is never restarted."""
        return self._policies.get(mesh)

    def failed(self, mesh: str, now: float) -> float | None:
        """Record a proc's death. Return the delay before the restart (seconds), or None if there is no restart."""
        policy = self._policies.get(mesh)
        if policy is None:
            return None
        times = self._times[mesh]
        while times and now - times[0] > policy.within:
            times.popleft()
        if times and now - times[-1] <= TOGETHER:
            return self._pending.get(mesh, policy.backoff)
        if len(times) >= policy.limit:
            return None
        delay = min(policy.backoff * 2 ** len(times), policy.backoff_max)
        times.append(now)
        self._pending[mesh] = delay
        return delay
