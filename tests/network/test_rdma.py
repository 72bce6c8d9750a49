"""The data plane between hosts, by TCP: no card for RDMA is in a namespace."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

from monarch_kernel.actor import Channel, HostMesh
from monarch_kernel.rdma import RDMABuffer, RDMATcpFallbackWarning
from tests.network.cluster import IMPATIENT, Cluster, Controller, ranks
from tests.network.driver import pause
from tests.waiting import patience

pytest.importorskip("numpy")
SIZE = 16 << 20


def spawn(hosts: HostMesh, size: int = SIZE) -> Any:
    from tests.network.memory import Owner

    warnings.simplefilter("ignore", RDMATcpFallbackWarning)
    return hosts.slice(hosts=slice(0, 2)).spawn_procs(per_host={"gpus": 1}).spawn("owner", Owner, size)


def between_hosts(hosts: HostMesh) -> list[Any]:
    owners = spawn(hosts)
    first, second = owners.slice(hosts=0), owners.slice(hosts=1)
    theirs = first.buffer.call_one().get(patience(30))
    pause()
    read = second.read.call_one(theirs).get(patience(60))
    second.write.call_one(theirs, 7).get(patience(60))
    return [read, first.contents.call_one().get(patience(30))]


def test_read_and_write_between_hosts(shared: Cluster, controller: Controller) -> None:
    """Straight from one to the other."""
    run = controller.begin(between_hosts)
    run.heard()
    home = shared.network["controller"]
    before = shared.network.traffic(home)
    run.go_on()
    assert run.result() == [["tcp", 0, 0], [7, 7]]
    assert shared.network.traffic(home) - before < SIZE / 16


def with_the_controller(hosts: HostMesh) -> list[Any]:
    import numpy

    second = spawn(hosts).slice(hosts=1)
    theirs = second.buffer.call_one().get(patience(30))
    got = numpy.zeros(SIZE, numpy.uint8)
    theirs.read_into(got).get(patience(60))
    mine = RDMABuffer(got)
    second.write.call_one(mine, 9).get(patience(60))
    return [theirs.backend, second.read.call_one(mine).get(patience(60)), int(got.min()), int(got.max())]


def test_read_and_write_between_a_host_and_the_controller(controller: Controller) -> None:
    """In both directions."""
    assert controller.run(with_the_controller) == ["tcp", ["tcp", 9, 9], 9, 9]


def counting(hosts: HostMesh) -> int:
    import numpy

    owners = spawn(hosts, 1024)
    word = numpy.zeros(1, numpy.int64)
    owners.count.call(RDMABuffer(word), 50).get(patience(60))
    return int(word[0])


def test_hosts_count_together(controller: Controller) -> None:
    assert controller.run(counting) == 100


def dropped(hosts: HostMesh) -> str:
    owners = spawn(hosts)
    theirs = owners.slice(hosts=0).buffer.call_one().get(patience(30))
    assert owners.slice(hosts=1).read.call_one(theirs).get(patience(60))[0] == "tcp"
    theirs.drop().get(patience(30))
    return owners.slice(hosts=1).read_on.call_one(theirs, None).get(patience(60))


def test_a_dropped_buffer(controller: Controller) -> None:
    assert controller.run(dropped).startswith("RDMAError: ")


def until_it_breaks(hosts: HostMesh) -> str:
    owners = spawn(hosts)
    theirs = owners.slice(hosts=0).buffer.call_one().get(patience(30))
    port, receiver = Channel.open()
    told = owners.slice(hosts=1).read_on.call_one(theirs, port)
    receiver.recv().get(patience(30))
    pause()
    return told.get(patience(60))


@pytest.mark.parametrize("how", ["its rank is killed", "its host vanishes"])
def test_the_owner_dies_in_the_middle_of_a_transfer(cluster: Any, how: str) -> None:
    two = cluster(2, IMPATIENT)
    host0 = two.network["host0"]
    run = two.control().begin(until_it_breaks)
    run.heard()
    if how == "its rank is killed":
        for pid in ranks(host0):
            os.kill(pid, 9)
    else:
        two.network.vanish(host0)
    run.go_on()
    told = run.result()
    assert told.startswith("RDMAError: ")
    assert "host0" in told
