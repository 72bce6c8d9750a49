"""Buffers between hosts: who listens where, and what becomes of a transfer when nothing comes from the other host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from monarch_kernel.actor import Actor, HostMesh, endpoint
from monarch_kernel.rdma import RDMABuffer, RDMAError
from tests.network.cluster import Cluster, Controller
from tests.network.driver import forget, say
from tests.waiting import patience

np = pytest.importorskip("numpy")
N = 1 << 20


class Keeper(Actor):
    """Owns a buffer, and reads those of others."""

    @endpoint
    def register(self, n: int) -> RDMABuffer:
        self.data = np.arange(n)
        return RDMABuffer(self.data)

    @endpoint
    def read(self, buffer: RDMABuffer, n: int) -> bool:
        into = np.zeros(n, "i8")
        buffer.read_into(into).get()
        return np.array_equal(into, np.arange(n))

    @endpoint
    def listens_at(self) -> list[str]:
        """The addresses at which this process listens."""
        from tests.transfer.backends import tcp

        return [port._acceptor._sock.getsockname()[0] for port in tcp()._data_ports.values()]


def spawn(hosts: HostMesh) -> Any:
    return hosts.spawn_procs(per_host={"gpus": 1}, name="keepers").spawn("keeper", Keeper)


def all_pairs(hosts: HostMesh) -> list[Any]:
    """Everybody reads everybody's buffer; gives where each host's rank listens."""
    keepers = spawn(hosts)
    buffers = [buffer for _, buffer in keepers.register.call(N).get()]
    for buffer in [*buffers, RDMABuffer(np.arange(N))]:
        assert all(value for _, value in keepers.read.call(buffer, N).get()), buffer
    return [keepers.slice(hosts=i).listens_at.call_one().get() for i in range(len(keepers))]


def test_ranks_listen_at_the_address_of_their_worker_only(controller: Controller, shared: Cluster) -> None:
    assert controller.run(all_pairs) == [[worker.host.address] for worker in shared.workers.values()]


def read_until_it_fails(hosts: HostMesh) -> list[Any]:
    """Reads one after the other; gives the error, and how a new read fails."""
    buffer = spawn(hosts).slice(hosts=1).register.call_one(8 * N).get()
    into = np.zeros(8 * N, "i8")
    buffer.read_into(into).get()
    say("reading")
    end = time.monotonic() + patience(30)
    told: list[Any] = []
    while time.monotonic() < end and len(told) < 2:
        try:
            buffer.read_into(into, timeout=None).get(patience(30))
        except RDMAError as error:
            told.append([str(error), error.owner == buffer.owner])
    forget(hosts)
    return told


@pytest.mark.parametrize("how", ["crash", "cut"])
def test_a_transfer_ends_when_nothing_comes_any_more(how: str, cluster: Callable[..., Cluster]) -> None:
    made = cluster(2)
    host = made.network["host1"]
    run = made.control().begin(read_until_it_fails)
    assert run.heard() == "reading"
    if how == "crash":
        host.crash()
    else:
        made.network.cut(host)
    told = run.result()
    assert len(told) == 2
    for text, named in told:
        assert named and "keepers" in text and "is gone: " in text, text
