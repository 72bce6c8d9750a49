"""The feed of one front end: pure, with a clock of the test's own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.watch.feed import LEASE, SHORTEST_PERIOD, Feed
from monarch_kernel.watch.model import (
    ActorView,
    Delta,
    FailureView,
    HostView,
    MeshView,
    RankState,
    RankView,
    Snapshot,
    StopView,
)

MESH = MeshView("u1", "m", ("gpus",), (2,), ("h",))
HOST = HostView("h", "node1", cores=4)


def running(rank: int, **more: Any) -> RankView:
    return RankView("u1", rank, "h", f"u1.{rank}", 100 + rank, RankState.RUNNING, doing="cell [1], line 2", **more)


@dataclass
class Known:
    """What a watch knows: a snapshot, and the deltas up to it."""

    now: Snapshot = field(
        default_factory=lambda: Snapshot(
            5,
            1.0,
            {"u1": MESH},
            {"h": HOST},
            {"u1": (running(0), running(1))},
            (FailureView(1, 1.0, "u1", (1,), "error", "ValueError"),),
        )
    )
    deltas: dict[int, Delta] = field(default_factory=dict[int, Delta])

    def snapshot(self) -> Snapshot:
        return self.now

    def since(self, version: int) -> Delta:
        if version == self.now.version:
            return Delta(version, version, self.now.time, {}, {}, {}, {}, (), (), ())
        return self.deltas[version]

    def change(self, **parts: Any) -> None:
        """The next version, which differs in these parts."""
        base = self.now.version
        empty: dict[str, Any] = {
            "meshes": {},
            "hosts": {},
            "ranks": {},
            "fields": {},
            "gone_meshes": (),
            "gone_hosts": (),
            "failures": (),
        }
        self.deltas[base] = Delta(base, base + 1, 2.0, **{**empty, **parts})
        self.now = Snapshot(base + 1, 2.0, self.now.meshes, self.now.hosts, self.now.ranks, self.now.failures)


def opened(period: float = 0.2) -> tuple[Known, Feed, list[dict[str, Any]]]:
    """A feed at time 0 whose front end has the snapshot."""
    known, sent = Known(), list[dict[str, Any]]()
    feed = Feed(known, lambda message: None if message["kind"] == "alive" else sent.append(message))
    assert feed.receive({"kind": "lease", "period": period}, 0.0)
    feed.push(0.0)
    return known, feed, sent


def test_nothing_is_sent_before_the_first_lease() -> None:
    sent: list[Any] = []
    feed = Feed(Known(), sent.append)
    assert feed.push(0.0) is None
    assert not sent


def test_the_first_message_is_all_that_is_known() -> None:
    _known, _feed, sent = opened()
    message = json.loads(json.dumps(sent.pop()))
    assert not sent
    assert message["kind"] == "snapshot"
    assert message["version"] == 5
    assert message["meshes"] == [{"key": "u1", "name": "m", "labels": ["gpus"], "sizes": [2], "hosts": ["h"]}]
    assert [rank["pid"] for rank in message["ranks"]["u1"]] == [100, 101]
    assert message["failures"][0]["kind"] == "error"


def test_changes_have_only_the_fields_that_differ_also_when_they_are_default_again() -> None:
    known, feed, sent = opened()
    idle = RankView("u1", 1, "h", "u1.1", 101, RankState.IDLE)
    known.change(ranks={("u1", 1): idle}, fields={("u1", 1): frozenset({"state", "doing"})})
    feed.push(1.0)
    assert sent[1]["kind"] == "changes"
    assert (sent[1]["base"], sent[1]["version"]) == (5, 6)
    assert sent[1]["ranks"] == {"u1": {"1": {"state": "idle", "doing": ""}}}


def test_nested_views_are_plain_in_changes_and_a_new_rank_is_whole() -> None:
    known, feed, sent = opened()
    stopped = running(
        0, stop=StopView("breakpoint", "cell [7]", 3), actors=(ActorView("trainer", waiting=2),), gpu_memory={1: 7}
    )
    known.change(
        meshes={"u2": MeshView("u2", "n")},
        ranks={("u1", 0): stopped, ("u2", 0): RankView("u2", 0)},
        fields={("u1", 0): frozenset({"stop", "actors", "gpu_memory"}), ("u2", 0): frozenset()},
        gone_hosts=("h",),
    )
    feed.push(1.0)
    told = json.loads(json.dumps(sent[1]))
    assert told["ranks"]["u1"]["0"]["stop"] == {"reason": "breakpoint", "file": "cell [7]", "line": 3}
    assert told["ranks"]["u1"]["0"]["actors"] == [{"name": "trainer", "waiting": 2}]
    assert told["ranks"]["u1"]["0"]["gpu_memory"] == {"1": 7}
    assert set(told["ranks"]["u2"]["0"]) == set(RankView.__struct_fields__)
    assert told["gone"] == {"meshes": [], "hosts": ["h"], "jobs": []}


def test_nothing_is_sent_while_nothing_differs() -> None:
    _known, feed, sent = opened()
    feed.push(3.0)
    assert len(sent) == 1


def test_changes_come_at_most_once_in_the_period_that_the_front_end_asked_for() -> None:
    known, feed, sent = opened(period=1.0)
    known.change()
    assert feed.push(0.4) == 0.6  # so long until something can be sent
    assert len(sent) == 1
    feed.push(1.0)
    assert len(sent) == 2


def test_no_front_end_is_told_more_than_five_times_a_second() -> None:
    known, feed, sent = opened(period=0.001)
    assert feed.period == SHORTEST_PERIOD
    known.change()
    feed.push(0.1)
    assert len(sent) == 1


def test_a_period_that_is_no_number_changes_nothing() -> None:
    _known, feed, _sent = opened(period=1.0)
    for wrong in (None, "fast", float("nan"), [1]):
        feed.receive({"kind": "lease", "period": wrong}, 0.0)
        assert feed.period == 1.0


def test_a_shorter_period_holds_at_once() -> None:
    known, feed, sent = opened(period=5.0)
    known.change()
    feed.receive({"kind": "lease", "period": 0.2}, 1.0)
    feed.push(1.0)
    assert len(sent) == 2


def test_the_feed_ends_with_its_lease_and_a_front_end_that_is_back_gets_all() -> None:
    known, feed, sent = opened()
    feed.receive({"kind": "lease"}, 3.0)
    assert feed.push(LEASE + 2.9) is not None
    assert feed.lease_left(LEASE + 2.0) == 1.0
    known.change()
    assert feed.push(LEASE + 3.0) is None
    assert len(sent) == 1
    feed.receive({"kind": "lease"}, 60.0)
    feed.push(60.0)
    assert sent[1]["kind"] == "snapshot"
    assert sent[1]["version"] == 6


def test_the_front_end_may_ask_for_all_again() -> None:
    _known, feed, sent = opened()
    assert feed.receive({"kind": "again"}, 0.1)
    feed.push(0.1)
    assert [message["kind"] for message in sent] == ["snapshot", "snapshot"]


def test_other_messages_are_left_alone() -> None:
    _known, feed, _sent = opened()
    assert not feed.receive({"kind": "do", "id": 1, "what": "kill"}, 0.0)


def test_each_lease_is_answered_with_the_clock_and_the_version_after_what_was_due() -> None:
    known, sent = Known(), list[dict[str, Any]]()
    feed = Feed(known, sent.append, clock=lambda: 1_000.5)
    feed.receive({"kind": "lease"}, 0.0)
    feed.push(0.0)
    feed.push(1.0)
    known.change()
    feed.receive({"kind": "lease"}, 3.0)
    feed.push(3.0)
    assert [message["kind"] for message in sent] == ["snapshot", "alive", "changes", "alive"]
    assert [message["version"] for message in sent] == [5, 5, 6, 6]
    assert sent[1] == {"kind": "alive", "time": 1_000.5, "version": 5}


def test_a_death_is_a_notice_too_once_also_if_more_ranks_die_of_it() -> None:
    known, feed, sent = opened()
    known.change(failures=(FailureView(2, 2.0, "u1", (0,), "death", "killed by SIGKILL"),))
    feed.push(1.0)
    known.change(failures=(FailureView(2, 2.0, "u1", (0, 1), "death", "killed by SIGKILL"),))
    known.change(failures=(FailureView(3, 2.0, "u1", (1,), "error", "ValueError"),))
    known.deltas[6] = known.deltas[7]
    feed.push(2.0)
    notices = [message for message in sent if message["kind"] == "notice"]
    assert notices == [{"kind": "notice", "level": "error", "mesh": "u1", "text": "killed by SIGKILL"}]
