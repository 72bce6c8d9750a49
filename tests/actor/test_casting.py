"""Casts through trees of agents: without any I/O, in random order, while agents die and links break."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_kernel.protocol.casts import Cast, CastGroup, CastReplies
from monarch_kernel.runtime.actor.calls import caster as casting
from tests.simulated import Net


@given(
    hosts=st.integers(1, 40),
    ranks=st.integers(1, 3),
    fanout=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    ops=st.lists(
        st.sampled_from(["cast", "cast", "broadcast", "direct", "steps", "steps", "agent", "cut", "rank"]), max_size=40
    ),
)
@settings(deadline=None, max_examples=300)
def test_nothing_is_lost_doubled_or_reordered(hosts: int, ranks: int, fanout: int, seed: int, ops: list[str]) -> None:
    net = Net(hosts, ranks, fanout, seed)
    pick = net.random
    meshes = [tuple(net.procs)]
    for _ in range(3):
        some = pick.sample(net.procs, pick.randint(1, len(net.procs)))
        meshes.append(tuple(sorted(some, key=net.procs.index)))
    for op in ops:
        agents = [name for name in net.nodes if name != "source"]
        if op in ("cast", "broadcast"):
            net.cast(pick.choice(meshes), op == "cast")
        elif op == "direct":
            net.direct(pick.choice(net.procs))
        elif op == "steps":
            for _ in range(pick.randint(1, 200)):
                net.step()
        elif op == "agent" and agents:
            net.kill_agent(pick.choice(agents))
        elif op == "cut" and len(agents) > 1:
            net.cut(*pick.sample(agents, 2))
        elif op == "far" and agents:
            net.cut("source", pick.choice(agents))
        elif op == "rank":
            net.kill_rank(pick.choice(net.procs).id)
    net.run()
    net.check()
    # What was kept for the sake of relays that have died is dropped with the next casts.
    for _ in range(2):
        net.cast(meshes[0])
        net.run()
    net.check()
    net.check_forgotten()


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_of_hundreds_in_which_relays_die(seed: int) -> None:
    net = Net(hosts=300, ranks=2, fanout=8, seed=seed)
    mesh = tuple(net.procs)
    dice = random.Random(seed)
    net.cast(mesh)
    net.run()
    for _ in range(8):
        for _ in range(3):
            net.cast(mesh, dice.random() < 0.7)
            for _ in range(5):
                net.direct(dice.choice(net.procs))
        for _ in range(dice.randint(0, 4000)):
            net.step()
        relays = [host.id for host in net.caster._hosts.values() if host.children and host.id in net.nodes]
        for name in dice.sample(relays, min(2, len(relays))):
            net.kill_agent(name)
    net.run()
    net.check()
    net.cast(mesh)
    net.run()
    net.check()


def count(net: Net, kind: type) -> Counter[tuple[str, str]]:
    """From now on, how many messages of a kind go over each link."""
    seen: Counter[tuple[str, str]] = Counter()
    put = net.put

    def counted(sender: str, receiver: str, item: object) -> None:
        if isinstance(item, tuple) and type(item[0]) is kind:
            seen[sender, receiver] += 1
        put(sender, receiver, item)

    net.put = counted  # type: ignore[method-assign]
    return seen


def test_the_source_sends_to_as_many_as_the_fanout() -> None:
    net = Net(hosts=300, ranks=2, fanout=16, seed=0)
    net.cast(tuple(net.procs))
    net.run()
    casts, groups, replies = (count(net, kind) for kind in (Cast, CastGroup, CastReplies))
    net.cast(tuple(net.procs))
    net.run()
    net.check()
    assert sum(n for (sender, _), n in casts.items() if sender == "source") == 16
    assert max(Counter(sender for sender, _ in casts).values()) == 16
    assert len(casts) == 300
    assert not groups
    assert len({sender for sender, receiver in replies if receiver == "source"}) == 16


def test_up_to_the_fanout_all_agents_are_reached_directly() -> None:
    net = Net(hosts=16, ranks=2, fanout=16, seed=0)
    casts = count(net, Cast)
    net.cast(tuple(net.procs))
    net.run()
    net.check()
    assert {sender for sender, _ in casts} == {"source"}


def test_one_rank_of_each_of_few_hosts_is_no_cast() -> None:
    net = Net(hosts=6, ranks=3, fanout=4, seed=0)
    one_each = tuple(net.procs[::3])
    plan = net.caster.plan(one_each[:4])
    assert plan is None
    # With more hosts than one would send to, it is.
    plan = net.caster.plan(one_each)
    assert plan is not None
    assert len(plan.group.procs) == 6
    # A host with one rank among others with more.
    plan = net.caster.plan(tuple(net.procs[:4]))
    assert plan is not None
    assert [ref.id for _, ref in plan.near] == ["a1r0"]
    assert plan.group.members == {"a0": [(0, "a0r0"), (1, "a0r1"), (2, "a0r2")]}


def test_ranks_of_this_site_are_not_cast_to() -> None:
    net = Net(hosts=2, ranks=2, fanout=4, seed=0)
    here = net.source.ref.beside("local", "")
    assert net.caster.plan((here, here)) is None
    plan = net.caster.plan((here, *net.procs))
    assert plan is not None
    assert plan.near == [(0, here)]
    assert plan is net.caster.plan((here, *net.procs))


def test_groups_are_bounded_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casting, "MAX_GROUPS", 3)
    net = Net(hosts=5, ranks=2, fanout=2, seed=0)
    meshes = [tuple(net.procs[: 2 * n]) for n in range(1, 6)]
    plans = [net.caster.plan(mesh) for mesh in meshes]
    for _ in range(3):
        for mesh in meshes:
            net.cast(mesh)
            net.run()
    net.check()
    assert len(net.caster._groups) == 3
    for relay in net.relays.values():
        source = relay._sources.get("source")
        assert source is None or len(source.groups) <= 3
    assert all(plan is not None for plan in plans)


def test_calls_that_end_with_the_runtime_say_so() -> None:
    net = Net(hosts=3, ranks=2, fanout=2, seed=0)
    sink = net.cast(tuple(net.procs))
    assert sink is not None
    for callback in net.source.on_close:
        callback()
    assert sink.got == dict.fromkeys(range(6))
