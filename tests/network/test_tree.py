"""Casts over a tree of host agents, with a fan-out so small that four hosts make one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_kernel.actor import Channel, HostMesh
from monarch_kernel.errors import ActorError, SupervisionError
from tests.network.actors import Remote
from tests.network.cluster import IMPATIENT, Cluster, Controller
from tests.network.conftest import network
from tests.network.driver import forget, pause
from tests.waiting import patience

FANOUT = "MONARCH_KERNEL_CAST_FANOUT"
NAMES = ["host0", "host1", "host2", "host3"]
MB = 1 << 20


def spawn(hosts: HostMesh, gpus: int = 2) -> Any:
    return hosts.spawn_procs(per_host={"gpus": gpus}).spawn("remote", Remote)


@pytest.fixture(scope="module", params=["1", "2"])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four hosts whose agents form a chain (fan-out 1), or a tree of two levels (2)."""
    with network("controller", *NAMES) as made:
        cluster = Cluster(made, tmp_path_factory.mktemp("tree"), {FANOUT: request.param})
        yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def controller(tree: Cluster) -> Controller:
    return tree.control()


def everything(hosts: HostMesh) -> dict[str, Any]:
    actors = spawn(hosts)
    names = actors.host.call().get(patience(30))
    seen: dict[str, Any] = {"names": list(names.values())}
    seen["coordinates"] = [dict(point) for point, _ in names.items()]
    seen["stream"] = sorted(future.get(patience(30)) for future in actors.host.stream())
    seen["slice"] = list(actors.slice(gpus=1).host.call().get(patience(30)).values())
    try:
        actors.boom.call([1, 6]).get(patience(30))
    except ActorError as error:
        seen["error"] = str(error)
    return seen


def test_a_cast_reaches_every_rank_once(controller: Controller) -> None:
    seen = controller.run(everything)
    assert seen["names"] == [name for name in NAMES for _ in range(2)]
    assert seen["coordinates"] == [{"hosts": h, "gpus": g} for h in range(4) for g in range(2)]
    assert seen["stream"] == sorted(seen["names"])
    assert seen["slice"] == NAMES
    assert "no luck on host0" in seen["error"]
    assert "no luck on host3" in seen["error"]


def order(hosts: HostMesh, rounds: int) -> list[list[int]]:
    actors = spawn(hosts, 1)
    each = [actors.slice(hosts=n) for n in range(4)]
    actors.host.call().get(patience(30))
    for n in range(0, rounds, 2):
        actors.note.broadcast(n)
        for one in each:
            one.note.broadcast(n + 1)
    return list(actors.get_notes.call().get(patience(60)).values())


@pytest.mark.parametrize("slow", ["host0", "host2"])
def test_casts_and_direct_messages_arrive_in_order(tree: Cluster, controller: Controller, slow: str) -> None:
    """Although they take different ways, one of which is slow."""
    with tree.network.slow(tree.network[slow], delay=0.01, jitter=0.008):
        assert controller.run(order, 100) == [list(range(100))] * 4


def sized(hosts: HostMesh, size: int) -> list[int]:
    actors = spawn(hosts, 1)
    actors.host.call().get(patience(30))
    pause()
    return list(actors.size_of.call(os.urandom(size)).get(patience(60)).values())


def test_the_controller_sends_a_cast_to_its_children_only(tree: Cluster, controller: Controller) -> None:
    run = controller.begin(sized, 4 * MB)
    run.heard()
    home = tree.network["controller"]
    before = tree.network.traffic(home)
    run.go_on()
    assert run.result() == [4 * MB] * 4
    children = int(tree.env[FANOUT])
    assert children * 4 * MB < tree.network.traffic(home) - before < (children + 0.5) * 4 * MB


# -- deaths in the tree -----------------------------------------------------------------------


def hold_all(hosts: HostMesh) -> list[Any]:
    """A cast that keeps every rank busy while an agent dies; what each rank answers, and what they say afterwards."""
    actors = spawn(hosts, 1)
    port, receiver = Channel.open()
    answers = actors.hold.stream(port)
    gates = {}
    for _ in range(4):
        _, name, gate = receiver.recv().get(patience(30))
        gates[name] = gate
    dead = pause()
    for name, gate in gates.items():
        if name != dead:
            gate.send(None)
    outcome: list[str] = []
    for answer in answers:
        try:
            outcome.append(answer.get(patience(30)))
        except SupervisionError as error:
            outcome.append(str(error))
    again = [actors.slice(hosts=n).host.call_one().get(patience(30)) for n, name in enumerate(NAMES) if name != dead]
    forget(hosts)
    return [sorted(outcome), again]


@pytest.mark.parametrize("victim", NAMES[:3])
@pytest.mark.parametrize("fanout", ["1", "2"])
def test_an_agent_dies_in_the_middle_of_a_cast(cluster: Callable[..., Cluster], fanout: str, victim: str) -> None:
    """Its ranks are reported dead; those behind it in the tree answer as if nothing had been."""
    four = cluster(4, {FANOUT: fanout})
    run = four.control().begin(hold_all)
    run.heard()
    four.workers[victim].process.kill()
    run.go_on(victim)
    others = [name for name in NAMES if name != victim]
    answers, again = run.result()
    told = [answer for answer in answers if answer != "held"]
    assert len(answers) == 4
    assert len(told) == 1
    assert victim in told[0]
    assert again == others


def hold_over_a_partition(hosts: HostMesh) -> list[Any]:
    actors = spawn(hosts, 1)
    port, receiver = Channel.open()
    answers = actors.hold.stream(port)
    gates = [receiver.recv().get(patience(30))[2] for _ in range(4)]
    pause()
    for gate in gates:
        gate.send(None)
    return [[answer.get(patience(30)) for answer in answers], list(actors.host.call().get(patience(30)).values())]


def test_a_partition_in_the_middle_of_the_tree_is_routed_around(cluster: Callable[..., Cluster]) -> None:
    """All hosts live, and the controller reaches each; only the way between two of them is gone."""
    four = cluster(4, {FANOUT: "1", **IMPATIENT})
    run = four.control().begin(hold_over_a_partition)
    run.heard()
    four.network.part(four.network["host0"], four.network["host1"])
    run.go_on()
    assert run.result() == [["held"] * 4, NAMES]
