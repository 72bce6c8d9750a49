"""Host agents as relays of casts: how two orders become one, and real nodes with sockets and shared memory.

Trees of many agents, and what happens to them when some die, are in ``tests/actor/test_casting.py``.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_kernel.protocol.casts import GONE
from monarch_kernel.protocol.messages import DEAD, ERROR, OK, Call, Death, ProcRef, Reply, encode
from monarch_kernel.protocol.serialize import dumps, loads
from monarch_kernel.runtime.actor.calls.caster import Caster
from monarch_kernel.runtime.node import relay
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.node.relay import Merge, Relay
from tests.conftest import wait_until
from tests.waiting import patience

# -- the merge ---------------------------------------------------------------------------------------


@given(sent=st.lists(st.sampled_from(["cast", "direct"]), max_size=40), data=st.data())
@settings(deadline=None)
def test_two_ways_become_one_order(sent: list[str], data: st.DataObject) -> None:
    """Whatever the interleaving of what comes by two ways, each in order, it is delivered as it was sent."""
    merge = Merge()
    got: list[int] = []
    casts: deque[tuple[int, int, int]] = deque()  # (message, number, directs before it)
    directs: deque[tuple[int, int]] = deque()  # (message, the last cast before it)
    number = count = 0
    for message, kind in enumerate(sent):
        if kind == "cast":
            number += 3  # numbers grow, but are not dense: others get casts, too
            casts.append((message, number, count))
        else:
            directs.append((message, number))
            count += 1
    while casts or directs:
        if casts and (not directs or data.draw(st.booleans())):
            message, n, before = casts.popleft()
            merge.add_cast(n, before, lambda: True, lambda m=message: got.append(m))
        else:
            message, after = directs.popleft()
            merge.add_direct(after, lambda m=message: got.append(m))
    assert got == list(range(len(sent)))


def test_what_brings_casts_does_not_wait_for_them() -> None:
    merge = Merge()
    got: list[str] = []
    merge.add_direct(7, lambda: got.append("after the cast"))
    merge.add_direct(0, None)  # the message that carries the cast
    merge.add_cast(7, 0, lambda: True, lambda: got.append("cast"))
    assert got == ["cast", "after the cast"]
    assert merge.directs == 2


def test_a_cast_that_is_not_ready_holds_up_what_follows() -> None:
    merge = Merge()
    got: list[str] = []
    ready: list[bool] = []
    merge.add_cast(1, 0, lambda: bool(ready), lambda: got.append("cast"))
    merge.add_direct(1, lambda: got.append("direct"))
    assert got == []
    ready.append(True)
    merge.run()
    assert got == ["cast", "direct"]


def test_what_is_delivered_may_bring_more() -> None:
    merge = Merge()
    got: list[int] = []

    def first() -> None:
        got.append(1)
        merge.add_direct(1, lambda: got.append(2))

    merge.add_cast(1, 0, lambda: True, first)
    assert got == [1, 2]


# -- real nodes --------------------------------------------------------------------------------------


class Gathered:
    """A sink that keeps what comes."""

    def __init__(self, node: Node, ranks: int) -> None:
        self.relayed: frozenset[str] = frozenset()
        self.values: dict[int, Any] = {}
        self.messages = 0
        self.future: Future[dict[int, Any]] = Future(node.poller, "answers")
        self._ranks = ranks

    def on_replies(self, ranks: Any, statuses: bytes, bodies: Any, buffers: dict[int, Any]) -> None:
        self.messages += 1
        for rank, status, body in zip(ranks, statuses or bytes(len(ranks)), bodies, strict=True):
            value = loads(body, buffers.get(rank, ())) if status == OK else (status, bytes(body))
            assert rank not in self.values
            self.values[rank] = value
        self._look()

    def on_gone(self, rank: int, death: Death) -> None:
        self.values.setdefault(rank, (GONE, death.cause))
        self._look()

    def _look(self) -> None:
        if len(self.values) == self._ranks:
            self.future._resolve(self.values)


class Net:
    """A controller, hosts with a relay each, and ranks, in one process, with real links."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.controller = self._node("controller", "controller", site="home")
        self.caster = Caster(self.controller, fanout=2)
        self.ranks: list[Node] = []
        self.got: dict[str, list[Any]] = {}
        self.answer: Callable[[Node, Any, Call, Any], None] = self._echo

    def _node(self, name: str, kind: str, **more: Any) -> Node:
        node = Node(f"{name}-{secrets.token_hex(3)}", kind, str(self.folder), name, **more)
        node.listen()
        node.poller.start_background()
        self.nodes.append(node)
        return node

    def host(self, ranks: int) -> Node:
        name = f"host{len(self.nodes)}"
        agent = self._node(name, "agent", site=name)
        agent.listen_at(f"ipc://{self.folder}/{name}")
        Relay(agent)
        dialled: Future[Any] = Future(self.controller.poller, "dial")
        self.controller.dial(agent.ref.gateway_address, dialled._resolve, 10)
        assert dialled.get(patience(10)).id == agent.id
        for _ in range(ranks):
            self.rank(agent, f"rank{len(self.ranks)}")
        return agent

    def rank(self, agent: Node, name: str) -> Node:
        rank = self._node(name, "rank", agent=agent.ref)
        self.ranks.append(rank)
        self.got[rank.id] = []

        def on_call(link: Any, message: Call, body: Any) -> None:
            if message.segment is not None:
                body = rank.apart(message.segment, body)
            value = loads(body, message.buffers)
            self.got[rank.id].append(value)
            if message.call:
                self.answer(rank, link, message, value)

        rank.handlers[Call] = on_call
        rank.link_to(agent.id)
        wait_until(lambda: rank.id in agent.links, f"{name} is known to its agent", 10)
        return rank

    def _echo(self, rank: Node, link: Any, message: Call, value: Any) -> None:
        body, buffers = dumps(value)
        body, segment = rank.pack(body, buffers, [link.peer])
        link.send(encode(Reply(message.call, message.rank, OK, buffers, segment)), body)

    def cast(self, value: Any, answered: bool = True, procs: tuple[ProcRef, ...] = ()) -> Gathered:
        procs = procs or tuple(rank.ref for rank in self.ranks)
        plan = self.caster.plan(procs)
        assert plan is not None
        sink = Gathered(self.controller, len(procs))
        body, buffers = dumps(value)
        call = Call("actor", "work", 1 if answered else 0, 0, (), (), "", buffers)
        self.caster.cast(plan.group, call, body, sink if answered else None)
        return sink


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    made = Net(tmp_path)
    yield made
    for node in made.nodes:
        node.close()


def test_answers_of_a_host_come_together(net: Net) -> None:
    for _ in range(4):
        net.host(3)
    for _ in range(5):
        net.cast("warm").future.get(patience(10))
    sink = net.cast("hello")
    assert sink.future.get(patience(10)) == dict.fromkeys(range(12), "hello")
    assert sink.messages < 12
    assert all(got == ["warm"] * 5 + ["hello"] for got in net.got.values())


def test_large_arguments_are_mapped_by_all_ranks_of_a_host_and_large_results_come_back(net: Net) -> None:
    for _ in range(3):
        net.host(2)
    array = np.random.default_rng(0).standard_normal(200_000)
    for _ in range(3):
        values = net.cast(array).future.get(patience(20))
        assert [np.array_equal(value, array) for value in values.values()] == [True] * 6
        values.clear()
    assert all(np.array_equal(got[-1], array) for got in net.got.values())
    net.got.clear()
    agents = [node for node in net.nodes if node.kind == "agent"]
    wait_until(
        lambda: all(not s.holders for node in [*agents, *net.ranks] for s in node.segments._all.values()),
        "all segments have come back",
        10,
    )


def test_answers_that_are_there_do_not_wait_for_those_that_are_not(net: Net) -> None:
    net.host(3)
    held: list[Callable[[], None]] = []

    def answer(rank: Node, link: Any, message: Call, value: Any) -> None:
        if message.rank == 2:
            held.append(lambda: net._echo(rank, link, message, value))
        else:
            net._echo(rank, link, message, value)

    net.answer = answer
    sink = net.cast("x")
    wait_until(lambda: set(sink.values) == {0, 1} and held, "two answers are there", 10)
    assert not sink.future.done()
    held[0]()
    assert sink.future.get(patience(10)) == dict.fromkeys(range(3), "x")


def test_errors_and_deaths_are_told_apart(net: Net) -> None:
    agent = net.host(3)

    def answer(_rank: Node, link: Any, message: Call, _value: Any) -> None:
        if message.rank < 2:
            link.send(encode(Reply(message.call, message.rank, (ERROR, DEAD)[message.rank])), b"why")

    net.answer = answer
    sink = net.cast("x")
    wait_until(lambda: len(sink.values) == 2, "two answers are there", 10)
    agent.declare_dead(net.ranks[2].id, Death("killed by SIGKILL", "proc", net.ranks[2].id))
    values = sink.future.get(patience(10))
    assert values[0] == (ERROR, b"why")
    assert values[1] == (DEAD, b"why")
    assert values[2][0] == GONE
    assert b"killed by SIGKILL" in values[2][1]
    # It is known now, and answered for at once.
    net.answer = net._echo
    assert net.cast("y").future.get(patience(10))[2][0] == GONE


def test_a_cast_waits_for_ranks_that_are_being_started(net: Net) -> None:
    agent = net.host(2)
    late = agent.ref.beside("late", str(net.folder / "late.sock"))
    procs = (*(rank.ref for rank in net.ranks), late)
    sink = net.cast(1, procs=procs)
    second = net.cast(2)  # must not overtake it
    third = net.cast(3, procs=(net.ranks[0].ref, late))
    agent.deaths["late"] = Death("killed by SIGKILL", "proc", "late")
    agent.refs["late"] = late
    assert second.future.get(patience(10)) == {0: 2, 1: 2}
    values = sink.future.get(patience(10))
    assert values[0] == values[1] == 1
    assert values[2][0] == GONE
    assert third.future.get(patience(10))[0] == 3
    assert net.got[net.ranks[0].id] == [1, 2, 3]


def test_a_host_that_is_gone_is_told_for_all_its_ranks(net: Net) -> None:
    agents = [net.host(2) for _ in range(4)]
    net.cast("warm").future.get(patience(10))
    net.answer = lambda *_: None
    sink = net.cast("x")
    wait_until(lambda: all(len(got) == 2 for got in net.got.values()), "all have it", 10)
    agents[0].close()  # a relay: host 2 is below it
    wait_until(lambda: {0, 1} <= set(sink.values), "its ranks are given up", 10)
    assert set(sink.values) == {0, 1}
    net.answer = net._echo
    values = net.cast("y").future.get(patience(10))
    assert sorted(rank for rank, value in values.items() if value == "y") == [2, 3, 4, 5, 6, 7]


def test_broadcasts_are_acknowledged_and_forgotten(net: Net) -> None:
    for _ in range(5):
        net.host(2)
    for k in range(20):
        net.cast(k, answered=False)
    wait_until(lambda: all(got == list(range(20)) for got in net.got.values()), "all ranks have all", 10)
    wait_until(lambda: not net.caster._open, "all are acknowledged", 10)


def test_nothing_is_kept_when_all_have_answered(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    make = relay._Source.__init__

    def init(self: Any, *args: Any) -> None:
        make(self, *args)
        kept.append(self)

    monkeypatch.setattr(relay._Source, "__init__", init)
    for _ in range(5):
        net.host(2)
    for k in itertools.repeat("x", 10):
        net.cast(k).future.get(patience(10))
    assert len(kept) == 5
    wait_until(lambda: not any(source.casts for source in kept), "no agent keeps answers", 10)
