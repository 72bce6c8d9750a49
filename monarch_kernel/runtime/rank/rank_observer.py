"""Report the activity of a rank's actors to its host agent while a controller watches.

The polling thread checks the actors a few times in each period of the lease, and reports changes. An actor with a
sequence of short calls counts as running throughout, because its state would otherwise flicker.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from monarch_kernel.protocol.messages import ObserveRank
from monarch_kernel.protocol.observation import ActorActivity, RankActivity
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.actor.execution.instance import ActorInstance
from monarch_kernel.runtime.actor.system import ActorSystem
from monarch_kernel.runtime.node.interfaces import PeerLink
from monarch_kernel.runtime.node.poller import Timer

#: The number of checks of the actors in a period.
LOOKS = 4
#: The interval of reports in which only counts have changed (seconds).
COUNTS = 1.0
#: A call that runs longer is reported with its own start. Shorter ones are reported with the start of the first in a
#: row (seconds).
LONG_CALL = 1.0


class _Seen:
    """An actor at the last check."""

    def __init__(self) -> None:
        self.calls = 0
        self.since = 0.0  # the start of the first call in a row; 0: it was idle
        self.told: ActorActivity | None = None


class RankObserver:
    """Answers ``ObserveRank``. Does nothing without a lease."""

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._agent = ""
        self._until = 0.0
        self._period = 0.0
        self._timer: Timer | None = None
        self._seen: dict[str, _Seen] = {}
        self._told_at = 0.0
        self._told = RankActivity([], [])
        self._number = 0

    def on_observe(self, link: PeerLink, message: ObserveRank, _body: Body) -> None:
        """Handle a lease."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if message.again or not message.lease:
            self._seen.clear()
            self._told = RankActivity([], [])
            self._told_at = 0.0
        self._number = message.number or self._number
        if message.lease:
            self._agent = link.peer
            self._until = time.monotonic() + message.lease
            self._period = message.period
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._until:
            self._timer = None
            return
        self._timer = self._system.node.poller.call_later(self._period / LOOKS, self._look)
        urgent = self._update(now)
        waited = now - self._told_at
        if waited >= (self._period / 2 if urgent else COUNTS):
            self._tell(now)

    def _update(self, now: float) -> bool:
        """Record which actors work. Return whether one differs from the last report in more than counts."""
        actors = self._system.actors
        urgent = False
        for key, actor in list(actors.items()):
            seen = self._seen.get(key)
            if seen is None:
                seen = self._seen[key] = _Seen()
                seen.calls = actor.calls
            working = actor.running is not None or actor.calls != seen.calls or bool(_tasks(actor))
            seen.calls = actor.calls
            if not working:
                seen.since = 0.0
            elif not seen.since:
                seen.since = actor.began or now
            told = seen.told
            urgent = urgent or told is None or bool(told.endpoint) != working or self._is_other(actor, told)
        return urgent or not self._seen.keys() <= actors.keys()

    @staticmethod
    def _is_other(actor: ActorInstance, told: ActorActivity) -> bool:
        running = actor.running
        return running is not None and running != told.endpoint

    def _tell(self, now: float) -> None:
        """Send the changes."""
        system = self._system
        ahead = time.time() - now
        changed: list[ActorActivity] = []
        cell, cell_since = "", 0.0
        for key, seen in self._seen.items():
            actor = system.actors.get(key)
            if actor is None:
                continue
            since = seen.since
            if actor.running is not None and now - actor.began > LONG_CALL:
                since = actor.began
            if actor.spec.tool:
                # Actors of tools are not shown, except for running a cell.
                if since and actor.running_for and not cell:
                    cell, cell_since = actor.running_for, since + ahead
                seen.told = ActorActivity(key, actor.name, "", "tool" if since else "")
                continue
            activity = ActorActivity(
                key,
                actor.name,
                actor.class_name,
                _endpoint(actor) if since else "",
                self._wall(since, ahead, seen.told),
                len(actor._queue),
                actor.calls,
                actor.failures,
            )
            if activity != seen.told:
                changed.append(activity)
                seen.told = activity
        gone = [key for key in self._seen if key not in system.actors]
        for key in gone:
            del self._seen[key]
        last = self._told
        if cell and cell == last.cell and abs(cell_since - last.cell_since) < LONG_CALL:
            cell_since = last.cell_since
        activity = RankActivity(changed, gone, cell, cell_since, system.sent, system.received, self._number)
        rest = (activity.cell, activity.cell_since, activity.sent, activity.received, activity.number)
        if changed or gone or rest != (last.cell, last.cell_since, last.sent, last.received, last.number):
            self._told = activity
            self._told_at = now
            system.node.send(self._agent, activity)

    @staticmethod
    def _wall(since: float, ahead: float, told: ActorActivity | None) -> float:
        """Convert a start to the host's clock, with the same result in each report."""
        if not since:
            return 0.0
        wall = since + ahead
        return told.since if told is not None and abs(told.since - wall) < 0.01 else wall


def _tasks(actor: ActorInstance) -> Collection[str]:
    """Return the running concurrent endpoints of an async actor."""
    return dict(getattr(actor, "_tasks", ())).values()


def _endpoint(actor: ActorInstance) -> str:
    return actor.running or next(iter(_tasks(actor)), "") or actor.latest or "__init__"
