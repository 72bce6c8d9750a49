"""Buffers of workers, each a host of its own as far as the data plane knows."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from monarch_kernel.rdma import RDMABuffer, RDMAError, configure
from tests.actor.actors import hook
from tests.conftest import wait_until
from tests.transfer.actors import KeeperActor, Peer
from tests.waiting import patience
from tests.workers import Start, workers

__all__ = ["workers"]

pytestmark = pytest.mark.filterwarnings("ignore::monarch_kernel.rdma.RDMATcpFallbackWarning")
N = 1 << 20


@pytest.fixture(params=["encrypted", "trusted-network"])
def how(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to use TCP, here and on the workers."""
    configure(tcp=request.param)
    yield request.param
    configure(tcp="encrypted")


def check(reader: Callable[[RDMABuffer], Any], buffer: RDMABuffer, n: int) -> None:
    assert np.array_equal(reader(buffer), np.arange(n))


def test_every_pair_of_processes(how: str, workers: Start) -> None:
    team = workers(2, "tcp")
    hosts = team.attach()
    procs = hosts.spawn_procs(per_host={"gpus": 1}, name="ranks")
    keepers, peers = procs.spawn("keeper", KeeperActor), procs.spawn("peer", Peer)
    buffers = [keepers.slice(hosts=i).do.call_one("words", N).get() for i in range(2)]

    assert [b.backend for b in buffers] == ["tcp", "tcp"]
    for buffer in buffers:  # the controller, which nobody can connect to, reaches them
        into = np.zeros(N, "i8")
        buffer.read_into(into).get()
        assert np.array_equal(into, np.arange(N))
        buffer.write_from(np.array([7, 8]), offset=80).get()
        assert buffer.fetch_add(1, offset=80).get() == 7
        buffer.read_into(into, size=96).get()
        assert into[9:12].tolist() == [9, 8, 8]

    for i in range(2):  # and they each other
        peer = peers.slice(hosts=i)
        assert peer.backend.call_one(buffers[1 - i]).get() == "tcp"
        assert peer.read.call_one(buffers[1 - i], N, "i8").get()[12:].tolist() == list(range(12, N))

    mine = np.arange(N)  # and they the controller, which then connects to them
    here = RDMABuffer(mine)
    for i in range(2):
        peer = peers.slice(hosts=i)
        assert np.array_equal(peer.read.call_one(here, N, "i8").get(), mine)
        peer.write.call_one(here, np.array([-1]), 8 * i).get()
    assert mine[:3].tolist() == [-1, -1, 2]
    here.drop().get()
    with pytest.raises(Exception, match="the buffer was dropped"):
        peers.slice(hosts=0).read.call_one(here, N, "i8").get()


@pytest.mark.parametrize("what", ["the rank", "its host"])
def test_a_death_over_there_ends_what_is_under_way(what: str, workers: Start) -> None:
    team = workers(1, "tcp")
    keeper = team.attach().spawn_procs(per_host={"gpus": 1}, name="doomed").spawn("keeper", KeeperActor)
    buffer, pid = keeper.do.call_one("words", N).get(), keeper.pid.call_one().get()
    into = np.zeros(N, "i8")
    buffer.read_into(into).get()
    with hook(lambda _failure: None):
        os.kill(pid, signal.SIGSTOP)
        reading = buffer.read_into(into, timeout=None)
        os.kill(pid if what == "the rank" else team[0].pid, signal.SIGKILL)
        with pytest.raises(RDMAError, match=r"proc doomed.* is gone: .+") as failure:
            reading.get(patience(30))
        assert failure.value.owner == buffer.owner
        with pytest.raises(RDMAError, match="is gone"):
            buffer.write_from(into).get(patience(30))
        wait_until(lambda: not os.path.exists(f"/proc/{pid}/fd/0"), "the rank's end")
