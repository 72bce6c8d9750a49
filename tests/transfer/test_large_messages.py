"""Large arguments and results between hosts: they go from process to process, beside the control plane."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_kernel.actor import Actor, Channel, HostMesh, endpoint
from tests.conftest import wait_until
from tests.waiting import patience
from tests.workers import Start, Team, workers

__all__ = ["workers"]

#: Elements of an array that goes beside the control plane.
LARGE = 1 << 20


def fetched() -> int:
    """How many large bodies this process has fetched from processes of other hosts."""
    from monarch_kernel.runtime.actor.process import get_system

    bodies: Any = get_system().node._bodies
    return 0 if bodies is None else bodies.fetched


class Store(Actor):
    """Keeps and gives arrays."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def put(self, value: Any) -> int:
        self.seen.append(value)
        return len(value)

    @endpoint
    def sums(self) -> list[float]:
        return [float(np.sum(value)) for value in self.seen]

    @endpoint
    def fetched(self) -> int:
        return fetched()

    @endpoint
    def make(self, n: int, kind: str = "array") -> Any:
        return b"x" * n if kind == "bytes" else np.arange(n)

    @endpoint
    def change(self, value: Any) -> float:
        value += 1  # what came belongs to the actor
        return float(value.sum())

    @endpoint
    def give(self, other: Any, n: int) -> int:
        return other.put.call_one(np.arange(n)).get(60)

    @endpoint
    def give_and_forget(self, other: Any, n: int) -> None:
        array = np.ones(n)
        other.put.broadcast(array)
        array[:] = 5
        other.put.broadcast([1.0])

    @endpoint
    def answer_by(self, port: Any, n: int) -> None:
        port.send(np.arange(n))

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def team(workers: Start) -> Team:
    """Two workers."""
    return workers(2, "tcp")


def spawn(hosts: HostMesh) -> Any:
    return hosts.spawn_procs(per_host={"gpus": 1}, name="ranks").spawn("store", Store)


def test_arguments_and_results(team: Team) -> None:
    stores = spawn(team.attach())
    one, other = stores.slice(hosts=0), stores.slice(hosts=1)

    assert one.put.call_one(np.arange(LARGE)).get() == LARGE  # from the controller, to which nobody can connect
    assert one.put.call_one(b"x" * 3_000_001).get() == 3_000_001
    assert one.put.call_one([np.arange(LARGE), np.arange(2 * LARGE + 1)]).get() == 2
    assert one.fetched.call_one().get() == 3

    before = fetched()
    assert np.array_equal(one.make.call_one(LARGE).get(), np.arange(LARGE))
    assert one.make.call_one(2_000_000, "bytes").get() == b"x" * 2_000_000
    assert [int(v.sum()) for v in stores.make.call(LARGE).get().values()] == [LARGE * (LARGE - 1) // 2] * 2
    assert fetched() - before >= 2

    assert one.give.call_one(other, LARGE).get() == LARGE  # between ranks of two hosts
    assert other.fetched.call_one().get() == 1
    assert one.change.call_one(np.zeros(LARGE)).get() == LARGE

    assert stores.put.call(np.ones(LARGE)).get().items()  # one rank on each host
    assert one.fetched.call_one().get() == 5 and other.fetched.call_one().get() == 2


def test_small_ones_stay_on_the_control_plane(team: Team) -> None:
    one = spawn(team.attach()).slice(hosts=0)
    one.put.call_one(np.ones(1000)).get()
    one.put.call_one(b"x" * 1000).get()
    assert one.fetched.call_one().get() == 0


def test_ports(team: Team) -> None:
    one = spawn(team.attach()).slice(hosts=0)
    port, receiver = Channel.open()
    before = fetched()
    one.answer_by.call_one(port, LARGE).get()
    assert np.array_equal(receiver.recv().get(patience(60)), np.arange(LARGE))
    assert fetched() == before + 1


def test_messages_keep_their_order_and_their_values(team: Team) -> None:
    stores = spawn(team.attach())
    one, other = stores.slice(hosts=0), stores.slice(hosts=1)
    for _ in range(5):
        one.give_and_forget.call_one(other, LARGE).get()  # the array is changed right after it was sent
    wait_until(lambda: len(other.sums.call_one().get()) == 10, "all messages have come")
    assert other.sums.call_one().get() == [float(LARGE), 1.0] * 5


def test_memory_is_used_again(team: Team) -> None:
    one = spawn(team.attach()).slice(hosts=0)
    for n in range(20):
        value = one.change.call_one(np.full(LARGE, float(n))).get()
        assert value == (n + 1) * LARGE
    assert one.fetched.call_one().get() == 20


def test_a_path_that_is_barred_is_left_for_the_control_plane(workers: Start) -> None:
    # As behind a firewall: the ranks may not use TCP for data.
    team = workers(0, "tcp")
    for _ in range(2):
        team.start(env={"MONARCH_KERNEL_RDMA_TCP_FALLBACK": "0"})
    stores = spawn(team.attach())
    one, other = stores.slice(hosts=0), stores.slice(hosts=1)
    for _ in range(3):
        assert one.give.call_one(other, LARGE).get() == LARGE
        assert one.put.call_one(np.arange(LARGE)).get() == LARGE
    assert other.fetched.call_one().get() == one.fetched.call_one().get() == 0
    assert other.sums.call_one().get() == [LARGE * (LARGE - 1) / 2] * 3


def test_a_result_of_a_rank_that_ends_at_once(team: Team) -> None:
    hosts = team.attach()
    procs = hosts.spawn_procs(per_host={"gpus": 1}, name="ranks")
    stores = procs.spawn("store", Store)
    results = [stores.slice(hosts=i).make.call_one(8 * LARGE) for i in range(2)]
    for future in results:
        assert len(future.get(patience(60))) == 8 * LARGE
    last = stores.slice(hosts=0).make.call_one(8 * LARGE)
    stopped = procs.stop()
    assert len(last.get(patience(60))) == 8 * LARGE
    stopped.get(patience(60))


@pytest.mark.usefixtures("faults")
def test_a_sender_that_dies_takes_its_message_along(team: Team) -> None:
    stores = spawn(team.attach())
    one, other = stores.slice(hosts=0), stores.slice(hosts=1)
    sender, receiver = one.pid.call_one().get(), other.pid.call_one().get()
    os.kill(receiver, signal.SIGSTOP)
    try:
        call = one.give.call_one(other, 8 * LARGE)
        one.give.call_one(other, 8 * LARGE)
        wait_until(lambda: waits(sender), "the sender waits for its call")
        os.kill(sender, signal.SIGKILL)
        with pytest.raises(Exception, match="SIGKILL"):
            call.get(patience(60))
    finally:
        os.kill(receiver, signal.SIGCONT)
    assert other.put.call_one([1.0]).get(patience(60)) == 1  # it does not wait for what is gone
    assert other.put.call_one(np.ones(LARGE)).get(patience(60)) == LARGE


def waits(pid: int) -> bool:
    """Whether a process sleeps, with all its threads."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "S" for thread in threads)
