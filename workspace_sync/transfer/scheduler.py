"""Decide which host fetches which block from where: a state machine from events to actions, without I/O and clocks.

The client owns all blocks. A block goes from the client to one host that lacks it, and from there to the others, so
the client sends each byte about once. Hosts get different blocks from the client, and exchange them.

* A source serves a few readers at a time (``FetchLimits.client_readers``, ``FetchLimits.host_readers``).
* A fetch that takes far longer than others is *overtaken*: another host fetches the block, too, or the host fetches it
  from another source. ``FetchLimits.extra`` limits the bytes that the client sends twice for this.
* When a host is lost, the client sends the blocks again that only this host held.
* A host that cannot read from another one (a firewall between them) stops trying, and reads from the client.
* Attempts are limited: a host that fails too often is given up, with the last reason.

Source: the exchange of pieces follows BitTorrent, B. Cohen, "Incentives Build Robustness in BitTorrent", 2003, without
its incentives; speculative fetches follow the backup tasks of J. Dean and S. Ghemawat, "MapReduce", OSDI 2004.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

#: The client, as a source.
CLIENT = ""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits on simultaneous fetches and on retries.

    Attributes:
        window: simultaneous fetches by a host.
        from_client: the number of these from the client, if there are several hosts.
        client_readers: simultaneous fetches from the client.
        host_readers: simultaneous fetches from a host.
        attempts: failed fetches of one block by one host, from the client, before the host is given up.
        streak: consecutive failed fetches of one host before it is given up.
        pair: failed fetches between two hosts before the reader stops using this source.
        slow: a fetch is overtaken when it takes this many times as long as is usual for its kind ...
        slow_floor: ... but not before this time (seconds) ...
        slow_blind: ... and not before this time while no fetch of its kind has ended (seconds).
        extra: the share of all bytes that the client may send again to overtake slow hosts.
        extra_floor: bytes that the client may send again in any case.
    """

    window: int = 4
    from_client: int = 2
    client_readers: int = 6
    host_readers: int = 3
    attempts: int = 6
    streak: int = 24
    pair: int = 2
    slow: float = 4.0
    slow_floor: float = 0.5
    slow_blind: float = 5.0
    extra: float = 0.15
    extra_floor: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Fetch:
    """Action: a host fetches a block from a source (``CLIENT`` or a host)."""

    host: str
    block: int
    source: str


@dataclass(frozen=True, slots=True)
class ReleaseBlock:
    """Action: release a block at a source, because no host will fetch it from there again, as far as is known."""

    source: str
    block: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Action: give up a host, which does not get everything."""

    host: str
    reason: str


Action = Fetch | ReleaseBlock | GiveUp


@dataclass(slots=True)
class _Read:
    """A fetch in progress.

    Attributes:
        since: its start time.
        counts: whether it counts towards the limit of its source; a slow one does not.
    """

    since: float
    counts: bool = True


@dataclass(slots=True)
class _Host:
    """State of one host.

    Attributes:
        wanted: blocks that it lacks and is not fetching, in order.
        holds: blocks that it has and can pass on.
        flights: its fetches in progress, by block and source; two of one block if one was overtaken.
        serves: fetches of other hosts from it.
        client_fetches: its fetches from the client.
        failures: failed attempts by block.
        streak: failed attempts since the last success.
        bad: failed attempts by source.
        ready: those of ``wanted`` that another host has.
    """

    wanted: dict[int, None] = field(default_factory=dict[int, None])
    holds: set[int] = field(default_factory=set[int])
    flights: dict[int, dict[str, _Read]] = field(default_factory=dict[int, dict[str, _Read]])
    serves: int = 0
    client_fetches: int = 0
    streak: int = 0
    failures: dict[int, int] = field(default_factory=dict[int, int])
    bad: dict[str, int] = field(default_factory=dict[str, int])
    ready: dict[int, None] = field(default_factory=dict[int, None])

    def lacks(self, block: int) -> bool:
        return block in self.wanted or block in self.flights


class _Typical:
    """Median time per MiB of the last fetches of a kind (seconds)."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=32)

    def add(self, seconds: float, size: int) -> None:
        self._last.append(seconds / _weight(size))

    def of(self, size: int) -> float | None:
        if not self._last:
            return None
        ordered = sorted(self._last)
        return ordered[len(ordered) // 2] * _weight(size)


def _weight(size: int) -> float:
    return max(size, 1 << 16) / (1 << 20)


class Scheduler:
    """State of one distribution. Each event returns the resulting actions.

    Args:
        limits: see ``FetchLimits``.
    """

    def __init__(self, limits: FetchLimits | None = None) -> None:
        self.limits = limits or FetchLimits()
        #: The number of bytes that the client had to send, including repetitions.
        self.sent = 0
        #: The part of these that was sent again to overtake slow hosts.
        self.overtaken = 0
        self._sizes: dict[int, int] = {}
        self._hosts: dict[str, _Host] = {}
        self._holders: dict[int, dict[str, None]] = {}
        self._lacking: dict[int, set[str]] = {}  # hosts that still want or fetch a block
        self._given: dict[int, set[str]] = {}  # hosts that are fetching the block from the client
        self._unheld: dict[int, None] = {}  # blocks that no host holds or is fetching from the client
        self._total = 0
        self._client_serves = 0
        self._open: dict[str, _Host] = {}  # hosts that can serve one more reader
        self._typical = {True: _Typical(), False: _Typical()}  # by whether the source is the client
        self._dead: set[str] = set()
        self._turn = 0

    # -- events -------------------------------------------------------------------------------------

    def need(self, host: str, blocks: Mapping[int, int], now: float) -> list[Action]:
        """Record that a host lacks these blocks (number -> bytes). May be called several times for a host."""
        if host in self._dead:
            return []
        if host not in self._hosts:
            self._hosts[host] = self._open[host] = _Host()
        state = self._hosts[host]
        for block, size in blocks.items():
            if block not in self._sizes:
                self._sizes[block] = size
                self._total += size
                self._holders[block] = {}
                self._lacking[block] = set()
                self._given[block] = set()
                self._unheld[block] = None
            elif not self._holders[block] and not self._given[block]:
                self._unheld[block] = None
            if host not in self._lacking[block] and host not in self._holders[block]:
                self._lacking[block].add(host)
                state.wanted[block] = None
                if self._holders[block]:
                    state.ready[block] = None
        return self._assign(now)

    def fetched(self, host: str, block: int, source: str, now: float) -> list[Action]:
        """Record that a host has fetched and verified a block."""
        state = self._hosts.get(host)
        if state is None:
            return []
        began = self._landed(host, block, source)
        if began is not None:
            self._typical[source == CLIENT].add(now - began, self._sizes[block])
            state.bad.pop(source, None)
            state.streak = 0
        actions: list[Action] = []
        if state.lacks(block):
            for other in list(state.flights.get(block, ())):
                self._landed(host, block, other)  # the slower of two fetches; its result is ignored
            state.wanted.pop(block, None)
            state.ready.pop(block, None)
            state.failures.pop(block, None)
            self._lacking[block].discard(host)
            self._held(block, host)
            actions += self._released(block)
        return actions + self._assign(now)

    def failed(self, host: str, block: int, source: str, reason: str, now: float) -> list[Action]:
        """Record that a fetch has failed because of its source or the connection to it."""
        state = self._hosts.get(host)
        if state is None or self._landed(host, block, source) is None:
            return []
        state.streak += 1
        state.bad[source] = state.bad.get(source, 0) + 1
        if source == CLIENT:
            state.failures[block] = state.failures.get(block, 0) + 1
        if state.failures.get(block, 0) >= self.limits.attempts or state.streak >= self.limits.streak:
            return [GiveUp(host, reason), *self.lost(host, now)]
        return self._assign(now)

    def forgot(self, host: str, block: int, now: float) -> list[Action]:
        """Record that a host can no longer pass a block on."""
        holders = self._holders.get(block, {})
        if host in holders:
            del holders[host]
            if host in self._hosts:
                self._hosts[host].holds.discard(block)
            if not holders and not self._given[block]:
                self._unhold(block)
        for name, other in self._hosts.items():
            if host in other.flights.get(block, ()):
                self._landed(name, block, host)
        return self._assign(now)

    def lost(self, host: str, now: float) -> list[Action]:
        """Record that a host is lost or no longer participates."""
        self._dead.add(host)
        state = self._hosts.pop(host, None)
        self._open.pop(host, None)
        if state is None:
            return []
        actions: list[Action] = []
        for block, reads in state.flights.items():
            for source in list(reads):
                self._close(host, state, block, source)
        for block in [*state.wanted, *state.flights]:
            self._lacking[block].discard(host)
            actions += self._released(block)
        for block, holders in self._holders.items():
            if host in holders:
                del holders[host]
                if not holders and not self._given[block]:
                    self._unhold(block)
        for name, other in self._hosts.items():
            for block, reads in list(other.flights.items()):
                if host in reads:
                    self._landed(name, block, host)  # if its answer arrives nevertheless, it is used
        return actions + self._assign(now)

    def tick(self, now: float) -> list[Action]:
        """Advance the time: overtake fetches that take too long."""
        actions: list[Action] = []
        for name, state in self._hosts.items():
            for block, reads in list(state.flights.items()):
                for source, read in list(reads.items()):
                    if self._is_slow(source, block, read.since, now):
                        self._uncount(read, source)
                        if len(reads) == 1:
                            actions += self._overtake(name, state, block, source, now)
        return actions + self._assign(now)

    # -- state --------------------------------------------------------------------------------------

    def complete(self, host: str) -> bool:
        """Return whether a living host lacks nothing."""
        state = self._hosts.get(host)
        return state is not None and not state.wanted and not state.flights

    @property
    def done(self) -> bool:
        """Whether no living host lacks anything."""
        return all(not state.wanted and not state.flights for state in self._hosts.values())

    def holders(self, block: int) -> list[str]:
        """Return the living hosts that have a block."""
        return list(self._holders.get(block, ()))

    # -- fetches --------------------------------------------------------------------------------------

    def _start(self, host: str, block: int, source: str, now: float) -> Fetch:
        state = self._hosts[host]
        state.wanted.pop(block, None)
        state.ready.pop(block, None)
        state.flights.setdefault(block, {})[source] = _Read(now)
        if source == CLIENT:
            self._client_serves += 1
            state.client_fetches += 1
            self._given[block].add(host)
            self._unheld.pop(block, None)
            self.sent += self._sizes[block]
        else:
            serving = self._hosts[source]
            serving.serves += 1
            if serving.serves >= self.limits.host_readers:
                self._open.pop(source, None)
        return Fetch(host, block, source)

    def _landed(self, host: str, block: int, source: str) -> float | None:
        """End a fetch; return its start time, or None if there is no such fetch.

        The block is wanted again if this was its last fetch.
        """
        state = self._hosts[host]
        reads = state.flights.get(block)
        if reads is None or source not in reads:
            return None
        began = reads[source].since
        self._close(host, state, block, source)
        if not reads:
            del state.flights[block]
            state.wanted[block] = None
            if self._holders[block]:
                state.ready[block] = None
        if not self._holders[block] and not self._given[block]:
            self._unhold(block)
        return began

    def _close(self, host: str, state: _Host, block: int, source: str) -> None:
        self._uncount(state.flights[block].pop(source), source)
        if source == CLIENT:
            state.client_fetches -= 1
            self._given[block].discard(host)
            if not self._holders[block] and not self._given[block]:
                self._unhold(block)

    def _uncount(self, read: _Read, source: str) -> None:
        if read.counts:
            read.counts = False
            if source == CLIENT:
                self._client_serves -= 1
            elif (serving := self._hosts.get(source)) is not None:
                serving.serves -= 1
                if serving.serves < self.limits.host_readers:
                    self._open[source] = serving

    def _held(self, block: int, host: str) -> None:
        holders = self._holders[block]
        first = not holders
        holders[host] = None
        self._hosts[host].holds.add(block)
        self._unheld.pop(block, None)
        if first:
            for name in self._lacking[block]:
                if block in self._hosts[name].wanted:
                    self._hosts[name].ready[block] = None

    def _unhold(self, block: int) -> None:
        """Record that no host has a block or is getting it from the client."""
        for name in self._lacking[block]:
            if name in self._hosts:
                self._hosts[name].ready.pop(block, None)
        if self._lacking[block]:
            self._unheld[block] = None

    def _released(self, block: int) -> list[Action]:
        if self._lacking[block]:
            return [ReleaseBlock(CLIENT, block)] if self._holders[block] and not self._given[block] else []
        self._unheld.pop(block, None)
        return [ReleaseBlock(CLIENT, block), *(ReleaseBlock(holder, block) for holder in self._holders[block])]

    # -- decisions --------------------------------------------------------------------------------------

    def _assign(self, now: float) -> list[Action]:
        """Fill all windows in turn, so that hosts get different blocks."""
        actions: list[Action] = []
        names = list(self._hosts)
        if not names:
            return actions
        self._turn = (self._turn + 1) % len(names)
        waiting = names[self._turn :] + names[: self._turn]
        while waiting:
            again: list[str] = []
            for name in waiting:
                fetch = self._next(name, now)
                if fetch is not None:
                    actions.append(fetch)
                    again.append(name)
            waiting = again
        return actions

    def _next(self, name: str, now: float) -> Fetch | None:
        state = self._hosts[name]
        limits = self.limits
        if not state.wanted or len(state.flights) >= limits.window:
            return None
        if self._client_serves < limits.client_readers and (
            state.client_fetches < limits.from_client or len(self._hosts) == 1
        ):
            for block in self._unheld:
                if block in state.wanted:
                    return self._start(name, block, CLIENT, now)
        refuses = any(failures >= limits.pair for failures in state.bad.values())
        # Most hosts find all sources busy most of the time: this check avoids a search of their blocks one by one.
        if not refuses and all(state.ready.keys().isdisjoint(each.holds) for each in self._open.values()):
            return None
        for block in state.ready:
            source = self._best_holder(name, state, block)
            if source is not None:
                return self._start(name, block, source, now)
            if refuses and self._client_serves < limits.client_readers and self._only_client(state, block):
                return self._start(name, block, CLIENT, now)
        return None

    def _usable(self, state: _Host, source: str) -> bool:
        return state.bad.get(source, 0) < self.limits.pair

    def _best_holder(self, name: str, state: _Host, block: int, but: str | None = None) -> str | None:
        """Return the least busy host that has the block and can serve one more reader."""
        best, load = None, self.limits.host_readers
        holders = self._holders[block]
        for holder in self._open if len(self._open) < len(holders) else holders:
            serves = self._hosts[holder].serves
            if serves < load and holder in holders and holder not in (name, but) and self._usable(state, holder):
                best, load = holder, serves
        return best

    def _only_client(self, state: _Host, block: int) -> bool:
        """Return whether a host can read a block from none of the hosts that have it."""
        return not any(self._usable(state, holder) for holder in self._holders[block])

    def _is_slow(self, source: str, block: int, since: float, now: float) -> bool:
        usual = self._typical[source == CLIENT].of(self._sizes[block])
        limit = self.limits.slow_blind if usual is None else max(self.limits.slow_floor, self.limits.slow * usual)
        return now - since > limit

    def _overtake(self, name: str, state: _Host, block: int, source: str, now: float) -> list[Action]:
        other = self._best_holder(name, state, block, but=source)
        if other is not None:  # the same host, from another source
            return [self._start(name, block, other, now)]
        size = self._sizes[block]
        if self.overtaken + size > max(self.limits.extra_floor, self.limits.extra * self._total):
            return []
        if source != CLIENT:
            self.overtaken += size
            return [self._start(name, block, CLIENT, now)]
        if self._holders[block] or len(self._given[block]) > 1:
            return []
        for idle, candidate in self._hosts.items():  # the first receiver is slow: another host replaces it
            if block in candidate.wanted and len(candidate.flights) < self.limits.window and idle != name:
                self.overtaken += size
                return [self._start(idle, block, CLIENT, now)]
        return []
