"""Process groups that outlive their ranks: nobody hangs in the old one, all meet in the next, with the state kept."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel import actor as public
from monarch_kernel.actor import Actor, ActorError, ActorMesh, Channel, ProcMesh, endpoint, this_host
from monarch_kernel.runtime.actor.execution import collectives
from monarch_kernel.runtime.spmd import member
from monarch_kernel.spmd import (
    Group,
    ProcessGroups,
    setup_torch_elastic_env,
    setup_torch_elastic_env_async,
    share_state,
)
from tests.conftest import stop_all_meshes
from tests.waiting import patience

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Sum(Actor):
    """Adds up over all ranks."""

    def __init__(self) -> None:
        self.steps = 0
        point = public.current_rank()
        self.rank, self.world_size = point.rank, point.extent.nelements

    @endpoint
    def join(self, group: Group) -> int:
        group.join()
        return torch.distributed.get_rank()

    @endpoint
    def add(self, port: Any = None) -> float:
        if port is not None:
            port.send(os.getpid())
        total = torch.ones(10_000)
        torch.distributed.all_reduce(total)
        return total[0].item()

    @endpoint
    def add_unless(self, failing: int) -> float:
        if torch.distributed.get_rank() == failing:
            raise ValueError("not I")
        total = torch.ones(10_000)
        torch.distributed.all_reduce(total)
        return total[0].item()

    @endpoint
    def add_late(self, failing: int, late: int) -> float:
        """One rank raises, another comes late."""
        if self.rank == failing:
            raise ValueError("not I")
        if self.rank == late:
            time.sleep(1)
        if failing >= 0:
            return 0.0
        total = torch.ones(10_000)
        torch.distributed.all_reduce(total)
        return total[0].item()

    @endpoint
    def check(self) -> None:
        raise KeyError("nobody waits for this")

    @endpoint
    def join_alone(self, address: str) -> int:
        """As a user's own program does."""
        rank = self.rank
        torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=self.world_size)
        return rank

    @endpoint
    def environment(self) -> dict[str, str]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
        return {name: os.environ.get(name, "") for name in names}


class Learner(Actor):
    """Has a state to share."""

    def __init__(self) -> None:
        torch.manual_seed(os.getpid())
        self.net = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.steps = 0

    @endpoint
    def learn(self) -> None:
        self.net(torch.ones(64)).sum().backward()
        self.optimizer.step()
        self.steps += 1

    @endpoint
    def join(self, group: Group) -> int:
        group.join()
        self.steps = share_state(self.steps, self.net, self.optimizer)
        return self.steps

    @endpoint
    def state(self) -> tuple[int, float, float]:
        buffers = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return self.steps, self.net.weight.sum().item(), sum(buffer.sum().item() for buffer in buffers)


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Failures that nobody handled end nothing here; the ranks of a test end with it."""
    monkeypatch.setattr(public, "unhandled_fault_hook", lambda failure: None)
    yield
    stop_all_meshes("the test is over")


def procs(n: int) -> ProcMesh:
    """Forked from a process that has loaded torch, and what its optimizers load."""
    return this_host().spawn_procs({"gpus": n}, name="p", preload=("torch", "torch._dynamo"))


def all_stuck(mesh: ActorMesh[Any], without: int) -> list[Any]:
    """Have every rank but one wait in a collective."""
    port, receiver = Channel.open()
    calls = [mesh.slice(gpus=k).add.call_one(port) for k in range(len(mesh)) if k != without]
    for _ in calls:
        receiver.recv().get(patience(20))
    return calls


# -- ranks that raise -------------------------------------------------------------------------------


def test_an_endpoint_that_raises_releases_those_that_wait_for_it(tmp_path: Path) -> None:
    mesh = procs(4).spawn("sum", Sum)
    mesh.join_alone.call(f"file://{tmp_path}/meeting").get(patience(60))
    # One that fails while nobody waits, in the middle of another call or alone, breaks nothing.
    with pytest.raises(ActorError):
        mesh.check.call().get(patience(20))
    assert set(mesh.add.call().get(patience(20)).values()) == {4.0}
    with pytest.raises(ActorError) as raised:
        mesh.add_unless.call(2).get(patience(20))
    error = raised.value
    assert isinstance(error, ValueError)
    assert ([one.rank for one in error.failures], [one.rank for one in error.released]) == ([2], [0, 1, 3])
    assert error.unanswered == []
    assert "failed on rank 2 of 4" in str(error)
    assert "Ranks 0-1,3 waited in torch.distributed for rank 2, and were released" in str(error)
    assert "by peer" not in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert ([one.rank for one in copy.failures], [one.rank for one in copy.released]) == ([2], [0, 1, 3])


def test_a_call_after_one_that_failed_waits_for_late_ranks(tmp_path: Path) -> None:
    mesh = procs(3).spawn("sum", Sum)
    mesh.join_alone.call(f"file://{tmp_path}/meeting").get(patience(60))
    with pytest.raises(ActorError, match="not I"):
        mesh.add_late.call(0, 1).get(patience(20))  # rank 1 is still in it when it hears of rank 0
    assert set(mesh.add_late.call(-1, 2).get(patience(20)).values()) == {3.0}


# -- groups -----------------------------------------------------------------------------------------


def test_survivors_are_freed_and_meet_anew() -> None:
    p = procs(5)
    mesh = p.spawn("sum", Sum)
    groups = ProcessGroups(p)
    first = groups.form(patience=patience(10)).get(patience(60))
    assert (first.number, bool(first.healed), first.stuck) == (1, False, ())
    assert list(mesh.join.call(first).get(patience(60)).values()) == [0, 1, 2, 3, 4]
    assert set(mesh.add.call().get(patience(20)).values()) == {5.0}
    for victim in (2, 0):  # rank 0 has the store
        # Ranks that are not the victim's neighbours would wait for half an hour.
        calls = all_stuck(mesh, victim)
        os.kill(p.pids().get(victim), signal.SIGKILL)
        group = groups.form(patience=patience(10)).get(patience(60))
        for call in calls:
            with pytest.raises(ActorError, match=r"(?i)connection|gloo"):
                call.get(patience(20))
        assert [one.rank for one in group.healed.replaced] == [victim]
        assert list(mesh.join.call(group).get(patience(60)).values()) == [0, 1, 2, 3, 4]
        assert set(mesh.add.call().get(patience(20)).values()) == {5.0}
    assert group.number == 3


def test_connections_are_not_ended_while_a_message_is_under_way() -> None:
    """Gloo would forget it, and its receiver would wait for ever."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, collectives.opening():
        sender = socket.create_connection(server.getsockname())
        receiver = server.accept()[0]
    with sender, receiver:
        sender.sendall(b"half")
        thread = threading.Thread(target=lambda: (collectives.settle(patience(60)), done.set()))
        thread.start()
        assert not done.wait(0.1)
        receiver.recv(4)
        assert done.wait(patience(20))
        thread.join()


def test_a_rank_that_stands_still_is_replaced() -> None:
    p = procs(3)
    mesh = p.spawn("sum", Sum)
    groups = ProcessGroups(p)
    mesh.join.call(groups.form(patience=patience(10)).get(patience(60))).get(patience(60))
    calls = all_stuck(mesh, 1)
    before = p.pids()
    os.kill(before.get(1), signal.SIGSTOP)
    group = groups.form(patience=1).get(patience(60))
    assert group.stuck == (1,)
    assert [one.rank for one in group.healed.replaced] == [1]
    for call in calls:
        assert isinstance(call.exception(patience(20)), ActorError)
    mesh.join.call(group).get(patience(60))
    assert set(mesh.add.call().get(patience(20)).values()) == {3.0}
    assert [a == b for a, b in zip(before.values(), p.pids().values(), strict=True)] == [True, False, True]


def test_a_death_while_the_others_join() -> None:
    p = procs(3)
    mesh = p.spawn("sum", Sum)
    groups = ProcessGroups(p)
    group = groups.form(patience=patience(10)).get(patience(60))
    waiting = [mesh.slice(gpus=k).join.call_one(group) for k in (0, 1)]
    os.kill(p.pids().get(2), signal.SIGKILL)
    group = groups.form(patience=patience(10)).get(patience(60))
    for call in waiting:
        assert isinstance(call.exception(patience(30)), ActorError)
    assert list(mesh.join.call(group).get(patience(60)).values()) == [0, 1, 2]
    assert set(mesh.add.call().get(patience(20)).values()) == {3.0}


def test_only_the_groups_connections_are_broken() -> None:
    """What else a rank is connected to stays."""

    class Connected(Sum):
        @endpoint
        def connect(self, port: int) -> None:
            self.other = socket.create_connection(("127.0.0.1", port))

        @endpoint
        def say(self) -> None:
            self.other.sendall(b"still here")

    with socket.create_server(("127.0.0.1", 0)) as server:
        p = procs(2)
        mesh = p.spawn("sum", Connected)
        groups = ProcessGroups(p)
        group = groups.form(patience=patience(10)).get(patience(60))
        mesh.slice(gpus=0).connect.call_one(server.getsockname()[1]).get(patience(20))
        connection, _ = server.accept()
        with connection:
            mesh.join.call(group).get(patience(60))
            assert groups.release().get(patience(20)) == []
            assert isinstance(mesh.add.call().exception(patience(20)), ActorError)
            mesh.slice(gpus=0).say.call_one().get(patience(20))
            connection.settimeout(20)
            assert connection.recv(100) == b"still here"


def test_a_group_is_joined_by_ranks() -> None:
    p = procs(1)
    group = ProcessGroups(p).form().get(patience(60))
    with pytest.raises(RuntimeError, match="send the group to an endpoint of the ranks"):
        group.join()


def test_a_mesh_that_waits_in_a_collective_stops_quickly() -> None:
    p = procs(3)
    mesh = p.spawn("sum", Sum)
    mesh.join.call(ProcessGroups(p).form().get(patience(60))).get(patience(60))
    calls = all_stuck(mesh, 2)
    p.stop().get(patience(30))
    for call in calls:
        assert call.exception(patience(20)) is not None


# -- state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", [(0,), (1, 2)])
def test_the_one_that_came_furthest_is_followed(victims: tuple[int, ...]) -> None:
    p = procs(4)
    mesh = p.spawn("learner", Learner)
    groups = ProcessGroups(p)
    assert set(mesh.join.call(groups.form(patience=patience(10)).get(patience(60))).get(patience(60)).values()) == {0}
    mesh.learn.call().get(patience(20))
    mesh.slice(gpus=3).learn.call().get(patience(20))  # a step that the others have failed in
    wanted = mesh.slice(gpus=3).state.call_one().get(patience(20))
    for victim in victims:
        os.kill(p.pids().get(victim), signal.SIGKILL)
    assert set(mesh.join.call(groups.form(patience=patience(10)).get(patience(60))).get(patience(60)).values()) == {2}
    assert set(mesh.state.call().get(patience(20)).values()) == {wanted}


# -- torchrun's environment -----------------------------------------------------------------------------


def test_environment_of_torchrun() -> None:
    p = this_host().spawn_procs({"nodes": 2, "gpus": 2})
    mesh = p.spawn("sum", Sum)
    setup_torch_elastic_env(p)
    found = list(mesh.environment.call().get(patience(20)).values())
    assert [each["RANK"] for each in found] == ["0", "1", "2", "3"]
    assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "0", "1"]
    assert [each["GROUP_RANK"] for each in found] == ["0", "0", "1", "1"]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in found} == {("4", "2")}
    assert {each["MASTER_ADDR"] for each in found} == {"127.0.0.1"}
    (port,) = {each["MASTER_PORT"] for each in found}
    assert int(port) > 0


async def given(p: ProcMesh) -> None:
    await setup_torch_elastic_env_async(p, "10.0.0.7", 29500)


def test_environment_with_a_given_address() -> None:
    import asyncio

    p = this_host().spawn_procs({"gpus": 2})
    mesh = p.spawn("sum", Sum)
    asyncio.run(given(p))
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in mesh.environment.call().get(patience(20)).values()} == {
        ("10.0.0.7", "29500")
    }


# -- one rank alone -------------------------------------------------------------------------------------


def test_nothing_to_abandon() -> None:
    assert member.abandon()


def test_a_join_that_nobody_else_comes_to_can_be_abandoned() -> None:
    meeting = member.reserve(2, 2, local=True)
    failed: list[BaseException] = []

    def join() -> None:
        try:
            member.join(meeting, 0, "gloo")
        except Exception as e:
            failed.append(e)

    thread = threading.Thread(target=join)
    before = dict(os.environ)
    thread.start()
    try:
        while not failed and thread.is_alive():
            member.abandon()
            thread.join(0.1)
        assert failed
    finally:
        member.leave()
        os.environ.clear()
        os.environ.update(before)
