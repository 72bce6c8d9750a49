"""What breaks, and what those see who wait: a rank, a worker, a host, a cable, a controller."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from monarch_kernel.actor import Channel, HostMesh
from monarch_kernel.errors import SupervisionError
from tests.network.actors import Remote
from tests.network.cluster import IMPATIENT, Cluster, ranks
from tests.network.driver import faults, forget, pause, say
from tests.waiting import patience

Clusters = Callable[..., Cluster]


def spawn(hosts: HostMesh, gpus: int = 1) -> Any:
    return hosts.spawn_procs(per_host={"gpus": gpus}).spawn("remote", Remote)


def hold(actors: Any) -> tuple[Any, list[Any]]:
    """A call that every actor is busy with, and the ports that end it, by rank."""
    port, receiver = Channel.open()
    pending = actors.hold.call(port)
    held = sorted((receiver.recv().get(patience(30)) for _ in range(len(actors))), key=lambda entry: entry[0])
    return pending, [gate for _, _, gate in held]


def failure(pending: Any, timeout: float = 30) -> str:
    try:
        return f"it did not fail: {pending.get(timeout)}"
    except SupervisionError as error:
        return str(error)


# -- one broken thing, seen by a call over two hosts ------------------------------------------


def caught_in_a_call(hosts: HostMesh) -> list[Any]:
    """A pending call while host1 breaks; then what host0 says; then a new call to host1."""
    actors = spawn(hosts)
    pending, gates = hold(actors)
    say("holding")
    told = failure(pending)
    gates[0].send(None)
    healthy = actors.slice(hosts=0).host.call_one().get(patience(30))
    again = failure(actors.slice(hosts=1).host.call_one())
    forget(hosts)
    return [told, healthy, again]


def die_by_rank(cluster: Cluster) -> None:
    for pid in ranks(cluster.network["host1"]):
        os.kill(pid, signal.SIGKILL)


def die_by_worker(cluster: Cluster) -> None:
    cluster.workers["host1"].process.kill()


def die_by_crash(cluster: Cluster) -> None:
    cluster.network["host1"].crash()


def die_by_vanishing(cluster: Cluster) -> None:
    cluster.network.vanish(cluster.network["host1"])


def die_by_cable(cluster: Cluster) -> None:
    """Everything on the host lives on, but nobody hears it."""
    cluster.network.cut(cluster.network["host1"])


@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        (die_by_rank, "SIGKILL"),
        (die_by_worker, "host1"),
        (die_by_crash, "host1"),
        (die_by_vanishing, "host1"),
        (die_by_cable, "host1"),
    ],
)
def test_who_waits_is_told_which_host_it_was(cluster: Clusters, breaks: Callable[[Cluster], None], why: str) -> None:
    two = cluster(2, None if breaks is die_by_vanishing else IMPATIENT)
    controller = two.control()
    run = controller.begin(caught_in_a_call)
    run.heard()
    breaks(two)
    told, healthy, again = run.result()
    assert "host1" in told
    assert why in told
    assert healthy == "host0"
    assert "host1" in again
    # The other host is as good as before; and this one is again when it is repaired.
    host1 = two.network["host1"]
    two.network.mend(host1)
    if two.workers["host1"].process.ended:
        two.workers["host1"] = two.work(host1)
    assert controller.run(host_names) == ["host0", "host1"]
    assert len(host1.files()) == 1  # a new worker cleans up after the one that could not


def host_names(hosts: HostMesh) -> list[str]:
    return list(spawn(hosts).host.call().get(patience(30)).values())


# -- the network between ----------------------------------------------------------------------


def over_a_cut(hosts: HostMesh) -> list[Any]:
    actors = spawn(hosts)
    pending, gates = hold(actors)
    pause()
    actors.note.broadcast("meanwhile")
    pause()
    for gate in gates:
        gate.send(None)
    return [list(pending.get(patience(30)).values()), list(actors.get_notes.call().get(patience(30)).values())]


def test_nobody_notices_a_short_partition(cluster: Clusters) -> None:
    """Shorter than the heartbeat's patience: what was sent meanwhile arrives late, and all goes on."""
    two = cluster(2)
    run = two.control().begin(over_a_cut)
    run.heard()
    two.network.cut(two.network["host1"])
    run.go_on()
    run.heard()
    time.sleep(1.0)  # the partition itself; nothing is waited for
    two.network.mend(two.network["host1"])
    run.go_on()
    assert run.result() == [["held", "held"], [["meanwhile"], ["meanwhile"]]]


def two_hosts_apart(hosts: HostMesh) -> list[Any]:
    actors = spawn(hosts)
    one, other = actors.slice(hosts=0), actors.slice(hosts=1)
    assert one.ask.call_one(actors.slice(hosts=slice(1, 2)), "before").get(patience(30)) == ["before"]
    pending, gates = hold(actors.slice(hosts=slice(1, 2)))
    asking = one.ask.call_one(actors.slice(hosts=slice(1, 2)), "cut")
    pause()
    told = ""
    try:
        asking.get(patience(60))
    except Exception as error:
        told = str(error)
    gates[0].send(None)
    return [
        told,
        list(pending.get(patience(30)).values()),
        one.host.call_one().get(patience(30)),
        other.host.call_one().get(patience(30)),
    ]


def test_a_partition_between_two_hosts_is_theirs_alone(cluster: Clusters) -> None:
    """Who waits for the other is told; the controller still reaches both."""
    two = cluster(2, IMPATIENT)
    run = two.control().begin(two_hosts_apart)
    run.heard()
    two.network.part(two.network["host0"], two.network["host1"])
    run.go_on()
    told, *healthy = run.result()
    assert "host1" in told
    assert healthy == [["held"], "host0", "host1"]
    two.network.heal(two.network["host0"], two.network["host1"])


def two_hosts_meet_again(hosts: HostMesh) -> list[Any]:
    procs = hosts.spawn_procs(per_host={"gpus": 2})
    actors = procs.spawn("remote", Remote)
    one, others = actors.slice(hosts=0, gpus=0), actors.slice(hosts=1)
    said = [one.ask.call_one(others, "before").get(patience(30))]
    pause()
    with pytest.raises(Exception, match="host1"):
        one.ask.call_one(others, "cut").get(patience(60))
    pause()
    procs.slice(hosts=1).kill("they have lost each other").get(patience(30))
    procs.heal().get(patience(60))
    return [
        *said,
        one.ask.call_one(others, "after").get(patience(30)),
        others.slice(gpus=0).ask.call_one(one, "back").get(patience(30)),
    ]


def test_ranks_that_are_new_reach_a_host_that_had_been_lost(cluster: Clusters) -> None:
    """At once, and in both directions: it is the old ones of the two hosts that have lost each other."""
    two = cluster(2, IMPATIENT)
    run = two.control().begin(two_hosts_meet_again)
    run.heard()
    two.network.part(two.network["host0"], two.network["host1"])
    run.go_on()
    run.heard()
    two.network.heal(two.network["host0"], two.network["host1"])
    run.go_on()
    assert run.result() == [["before"] * 2, ["after"] * 2, ["back"]]


def one_waits_for_the_other(hosts: HostMesh) -> list[Any]:
    actors = spawn(hosts)
    port, receiver = Channel.open()
    asking = actors.slice(hosts=0).wait_for.call_one(actors.slice(hosts=slice(1, 2)), port)
    receiver.recv().get(patience(30))
    say("asking")
    told = asking.get(patience(30))
    forget(hosts)
    return [told, actors.slice(hosts=0).host.call_one().get(patience(30))]


@pytest.mark.parametrize("breaks", [die_by_rank, die_by_worker, die_by_vanishing])
def test_a_rank_that_waits_for_another_host_is_told(cluster: Clusters, breaks: Callable[[Cluster], None]) -> None:
    two = cluster(2, IMPATIENT)
    run = two.control().begin(one_waits_for_the_other)
    run.heard()
    breaks(two)
    told, healthy = run.result()
    assert told.startswith("SupervisionError: ")
    assert "host1" in told
    assert healthy == "host0"


def rank_with_procs_elsewhere(hosts: HostMesh) -> None:
    actors = spawn(hosts.slice(hosts=slice(0, 1)))
    port, receiver = Channel.open()
    actors.own.call_one(hosts.slice(hosts=slice(1, 2)), port).get(patience(30))
    assert receiver.recv().get(patience(30)) == ["host1"]
    pause()
    faults.get(timeout=30)


@pytest.mark.parametrize("how", ["rank", "worker", "vanished"])
def test_procs_end_with_their_owner_on_another_host(cluster: Clusters, how: str) -> None:
    two = cluster(2, IMPATIENT)
    run = two.control().begin(rank_with_procs_elsewhere)
    run.heard()
    host0 = two.network["host0"]
    if how == "vanished":
        two.network.vanish(host0)
    elif how == "worker":
        two.workers["host0"].process.kill()
    else:
        for pid in ranks(host0):
            os.kill(pid, signal.SIGKILL)
    two.idle("host1")
    run.go_on()
    run.result()


def spawn_in_vain(hosts: HostMesh) -> list[Any]:
    host_names(hosts)
    pause()
    told = failure(spawn(hosts).host.call())
    forget(hosts)
    return [told, host_names(hosts.slice(hosts=slice(0, 1)))]


def test_procs_on_a_host_that_has_gone(cluster: Clusters) -> None:
    """Nobody knew yet that it is gone when they were to be started there."""
    two = cluster(2, IMPATIENT)
    run = two.control().begin(spawn_in_vain)
    run.heard()
    two.network.vanish(two.network["host1"])
    run.go_on()
    told, healthy = run.result()
    assert "host1" in told
    assert healthy == ["host0"]


# -- the controller ---------------------------------------------------------------------------


def busy_with_children(hosts: HostMesh) -> None:
    actors = spawn(hosts, 2)
    actors.breed.call().get(patience(30))
    hold(actors.slice(gpus=1))
    say("busy")
    Channel.open()[1].recv().get()


@pytest.mark.parametrize("end", ["killed", "vanished"])
def test_nothing_remains_of_a_dead_controller(cluster: Clusters, end: str) -> None:
    """No process, file or socket on any host; and the workers serve the next one."""
    two = cluster(2, IMPATIENT)
    before = {host.name: host.files() for host in two.hosts}
    dead = two.control()
    dead.begin(busy_with_children).heard()
    home = two.network["controller"]
    if end == "killed":
        dead.process.kill()
    else:
        two.network.vanish(home)
    dead.process.wait()
    two.idle()
    two.network.mend(home)
    assert two.control().run(host_names) == ["host0", "host1"]
    assert {host.name: host.files() for host in two.hosts} == before
    for worker in two.workers.values():
        assert worker.process.running
