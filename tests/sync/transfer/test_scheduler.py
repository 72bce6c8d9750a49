"""The scheduler of the fan-out in a simulated network: hosts are slow, die, stall and cannot reach each other."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workspace_sync.transfer.scheduler import CLIENT, Action, Fetch, FetchLimits, GiveUp, ReleaseBlock, Scheduler

MIB = 1 << 20


@dataclass
class Net:
    """Hosts that fetch as the scheduler says. Each read takes its block's size over the slower side's speed.

    Attributes:
        speed: MiB a second of each host; 0: it stalls for ever.
        blocked: pairs (host, source) between which nothing passes.
        deaths: when hosts die.
        noticed: how long after its death a host is known to be dead (seconds).
    """

    blocks: dict[int, int]
    speed: dict[str, float]
    lacks: dict[str, list[int]]
    blocked: set[tuple[str, str]] = field(default_factory=set)
    deaths: dict[str, float] = field(default_factory=dict)
    noticed: float = 1.0
    limits: FetchLimits = field(default_factory=FetchLimits)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.now = 0.0
        self.has: dict[str, set[int]] = {host: set() for host in self.speed}
        self.given_up: dict[str, str] = {}
        self.dead: set[str] = set()
        self.egress = 0
        self.first: dict[str, int] = {}
        self.released: set[tuple[str, int]] = set()
        self.ends: dict[str, float] = {}
        self._events: list[tuple[float, int, str, tuple[object, ...]]] = []
        self._count = itertools.count()
        self._begun = 0

    def run(self) -> None:
        for host, when in self.deaths.items():
            self._at(when, "die", host)
        for host, blocks in self.lacks.items():
            self._do(self.scheduler.need(host, {b: self.blocks[b] for b in blocks}, self.now))
        self._at(0.25, "tick")
        for _ in range(200_000):
            if self.scheduler.done:
                return
            self.now, _, what, args = heapq.heappop(self._events)
            assert self.now < 36_000, "ten hours have passed"
            getattr(self, f"_on_{what}")(*args)
        raise AssertionError("it goes on for ever")

    def _at(self, when: float, what: str, *args: object) -> None:
        heapq.heappush(self._events, (when, next(self._count), what, args))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Fetch):
                self._begin(action)
            elif isinstance(action, GiveUp):
                self.given_up[action.host] = action.reason
            else:
                assert isinstance(action, ReleaseBlock)
                self.released.add((action.source, action.block))

    def _begin(self, fetch: Fetch) -> None:
        host, block, source = fetch.host, fetch.block, fetch.source
        assert host != source
        assert block not in self.has[host]
        if source == CLIENT:
            self.egress += self.blocks[block]
            self.first.setdefault(host, block)
        else:
            assert block in self.has[source]
        size = self.blocks[block] / MIB
        if (host, source) in self.blocked:
            self._at(self.now + 0.1, "fail", host, block, source)
        elif source in self.dead:
            self._at(self.now + self.noticed, "fail", host, block, source)
        else:
            slower = min(self.speed[host], self.speed.get(source, 1e9))
            if slower:
                self._at(self.now + size / slower, "end", host, block, source)

    def _on_end(self, host: str, block: int, source: str) -> None:
        if host in self.dead:
            return
        if source in self.dead:
            self._on_fail(host, block, source)
            return
        self.has[host].add(block)
        self.ends[host] = self.now
        self._do(self.scheduler.fetched(host, block, source, self.now))

    def _on_fail(self, host: str, block: int, source: str) -> None:
        if host not in self.dead:
            self._do(self.scheduler.failed(host, block, source, f"cannot read from {source or 'the client'}", self.now))

    def _on_die(self, host: str) -> None:
        self.dead.add(host)
        self._at(self.now + self.noticed, "known", host)

    def _on_known(self, host: str) -> None:
        self._do(self.scheduler.lost(host, self.now))

    def _on_tick(self) -> None:
        self._do(self.scheduler.tick(self.now))
        self._at(self.now + 0.25, "tick")

    def check(self) -> None:
        for host, blocks in self.lacks.items():
            if host not in self.dead and host not in self.given_up:
                assert self.has[host] >= set(blocks), f"{host} lacks {set(blocks) - self.has[host]}"


def net(hosts: int, blocks: int, size: int = 4 * MIB, **options: object) -> Net:
    names = [f"h{i}" for i in range(hosts)]
    lacks = {name: list(range(blocks)) for name in names}
    return Net(dict.fromkeys(range(blocks), size), dict.fromkeys(names, 100.0), lacks, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 8, 64])
def test_each_block_leaves_the_client_once(hosts: int) -> None:
    sim = net(hosts, 40)
    sim.run()
    sim.check()
    assert not sim.given_up
    assert sim.egress == 40 * 4 * MIB == sim.scheduler.sent


def test_each_host_gets_another_block_first() -> None:
    sim = net(6, 40)
    sim.run()
    assert len(set(sim.first.values())) == len(sim.first) == 6


def test_all_is_released_at_the_end() -> None:
    sim = net(3, 10)
    sim.run()
    assert {(CLIENT, block) for block in range(10)} <= sim.released
    assert all(any((f"h{i}", block) in sim.released for i in range(3)) for block in range(10))


def test_a_host_gets_only_what_it_lacks() -> None:
    sim = net(3, 30)
    sim.lacks["h1"] = [3, 4]
    sim.lacks["h2"] = []
    sim.run()
    assert sim.has == {"h0": set(range(30)), "h1": {3, 4}, "h2": set()}
    assert sim.egress == 30 * 4 * MIB


def test_a_slow_first_receiver_is_overtaken_within_the_bound() -> None:
    sim = net(4, 60)
    sim.speed["h2"] = 0.05
    sim.run()
    sim.check()
    fast = [sim.ends[host] for host in ("h0", "h1", "h3")]
    assert max(fast) < sim.ends["h2"] / 5, "the others waited for the slow one"
    assert sim.egress <= 1.2 * 60 * 4 * MIB


def test_a_dead_host_is_routed_around() -> None:
    sim = net(4, 60)
    sim.deaths = {"h1": 1.0}
    sim.run()
    sim.check()
    assert not sim.given_up
    assert sim.egress <= 1.5 * 60 * 4 * MIB


def test_hosts_that_cannot_reach_each_other_get_all_from_the_client() -> None:
    sim = net(3, 12)
    sim.blocked = {(a, b) for a in sim.speed for b in sim.speed if a != b}
    sim.run()
    sim.check()
    assert not sim.given_up
    assert sim.egress == 3 * 12 * 4 * MIB


def test_a_host_that_cannot_read_at_all_is_given_up_with_the_reason() -> None:
    sim = net(3, 200)
    sim.blocked = {("h1", source) for source in (CLIENT, "h0", "h2")}
    sim.run()
    sim.check()
    assert sim.given_up.keys() == {"h1"}
    assert sim.given_up["h1"].startswith("cannot read from")


def test_a_host_that_comes_late_gets_all_from_the_others() -> None:
    sim = net(3, 20)
    late = sim.lacks.pop("h2")
    sim.run()
    sim.scheduler.need("h2", {}, sim.now)
    sim._do(sim.scheduler.need("h2", {block: sim.blocks[block] for block in late}, sim.now))
    sim.lacks["h2"] = late
    while not sim.scheduler.done:
        sim.now, _, what, args = heapq.heappop(sim._events)
        getattr(sim, f"_on_{what}")(*args)
    sim.check()
    assert sim.egress == 20 * 4 * MIB


@st.composite
def nets(draw: st.DrawFn) -> Net:
    hosts = draw(st.integers(1, 6))
    blocks = draw(st.integers(0, 40))
    seed = draw(st.integers(0, 1 << 30))
    rng = random.Random(seed)
    names = [f"h{i}" for i in range(hosts)]
    sizes = {block: rng.choice([MIB // 4, MIB, 4 * MIB, 8 * MIB]) for block in range(blocks)}
    speed = {name: draw(st.sampled_from([100.0, 100.0, 50.0, 5.0, 0.2])) for name in names}
    lacks = {name: [b for b in range(blocks) if rng.random() < draw(st.sampled_from([1.0, 0.5]))] for name in names}
    deaths = {name: draw(st.floats(0, 30)) for name in names if draw(st.integers(0, 3)) == 0}
    pairs = [(a, b) for a in names for b in names if a != b]
    blocked = {pair for pair in pairs if draw(st.integers(0, 9)) == 0}
    return Net(sizes, speed, lacks, blocked, deaths, noticed=draw(st.sampled_from([0.0, 1.0, 10.0])))


@settings(max_examples=150, deadline=None)
@given(nets())
def test_every_living_host_ends_with_everything(sim: Net) -> None:
    sim.run()
    sim.check()
    assert not sim.given_up, "only a host that can read from nobody is given up"
    needed = sum(sim.blocks[b] for b in {b for blocks in sim.lacks.values() for b in blocks})
    if not sim.deaths and not sim.blocked:
        assert sim.egress <= max(1.2 * needed, needed + MIB)
    assert sim.scheduler.sent == sim.egress


@settings(max_examples=60, deadline=None)
@given(nets(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_whatever_the_limits_are(sim: Net, window: int, client_readers: int, host_readers: int) -> None:
    sim.limits = FetchLimits(window, 1, client_readers, host_readers)
    sim.__post_init__()
    sim.run()
    sim.check()
    assert not sim.given_up


def test_a_block_that_its_holder_has_forgotten_comes_from_elsewhere() -> None:
    scheduler = Scheduler(FetchLimits())
    assert [(each.host, each.source) for each in fetches(scheduler.need("h0", {1: MIB}, 0.0))] == [("h0", CLIENT)]
    assert not fetches(scheduler.forgot("h0", 1, 0.0)), "it has not had it yet"
    scheduler.fetched("h0", 1, CLIENT, 0.1)
    assert [(each.host, each.source) for each in fetches(scheduler.need("h1", {1: MIB}, 0.2))] == [("h1", "h0")]
    assert [(each.host, each.source) for each in fetches(scheduler.forgot("h0", 1, 0.3))] == [("h1", CLIENT)]
    scheduler.fetched("h1", 1, CLIENT, 0.4)
    assert scheduler.done


def fetches(actions: list[Action]) -> list[Fetch]:
    return [each for each in actions if isinstance(each, Fetch)]
