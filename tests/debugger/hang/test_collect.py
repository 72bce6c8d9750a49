"""What ranks tell while they wait in torch.distributed, for each of its operations, and what is made of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.model.evidence import WAITS, Evidence
from monarch_kernel.debugger.rank.hang import collect
from tests.conftest import wait_until
from tests.debugger.hang.matrix import Runner, settled
from tests.waiting import patience

pytest.importorskip("torch")

FILE = "<waiting>"
SIZE = 3


@dataclass
class Waiting:
    """Ranks that run a program in which rank 1 stays away."""

    procs: Any
    calls: Any

    def evidence(self) -> dict[int, Evidence]:
        """What ranks tell, once 0 and 2 wait."""
        found: dict[int, Evidence] = {}

        def both_wait() -> bool:
            found.update(ask(self.procs, collect, timeout=10).values)
            return len(found) == SIZE and found[0].state == WAITS and found[2].state in (WAITS, "runs", "idle")

        wait_until(both_wait, "rank 0 waits", 60)
        return found

    def verdict(self) -> Verdict:
        return settled(self.procs)


@pytest.fixture
def waiting(procs: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[[str], Waiting]]:
    """Start a program on three ranks."""
    started: list[Waiting] = []

    def start(source: str) -> Waiting:
        mesh = procs(SIZE, preload=("torch",))
        runners = mesh.spawn("runner", Runner, os.fspath(tmp_path / "store"), SIZE)
        runners.initialized.get(120)
        started.append(Waiting(mesh, runners.run.stream(source, FILE)))
        return started[-1]

    yield start
    for each in started:
        each.procs.kill(reason="the test is over").get(patience(60))
        for slot in each.calls:
            slot.exception(patience(60))


FUNCTIONAL = (
    "import torch.distributed._functional_collectives as f; "
    "f.wait_tensor(f.all_reduce(torch.ones(7), 'sum', dist.group.WORLD))"
)
BATCH = """
if rank == 0:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(5), 1)]):
        work.wait()
"""
AWAY = "if rank == 1: slow()\n"


@pytest.mark.parametrize(
    "code, name, op, elements, number",
    [
        ("dist.all_reduce(torch.ones(5))", "all_reduce", "all_reduce", 5, 1),
        ("dist.all_reduce(torch.ones(5), async_op=True).wait()", "all_reduce", "all_reduce", 5, 1),
        ("dist.broadcast(torch.ones(2, 3), src=1)", "broadcast", "broadcast", 6, 1),
        ("dist.all_gather([torch.ones(4) for _ in range(3)], torch.ones(4))", "all_gather", "all_gather", 4, 1),
        ("dist.reduce_scatter_tensor(torch.ones(5), torch.ones(15))", "reduce_scatter_tensor", "all_reduce", 15, 1),
        ("dist.all_to_all_single(torch.ones(3), torch.ones(3))", "all_to_all_single", "all_to_all", 3, 1),
        ("dist.barrier()", "barrier", "barrier", 0, 1),
        ("dist.all_gather_object([None] * 3, 'text')", "all_gather_object", "all_gather", 1, 1),
        ("dist.monitored_barrier()", "monitored_barrier", "monitored_barrier", 0, 0),
        (FUNCTIONAL, "all_reduce", "all_reduce", 7, 1),
    ],
)  # fmt: skip
def test_each_collective_is_told_with_its_number_size_and_line(
    waiting: Callable[[str], Waiting], code: str, name: str, op: str, elements: int, number: int
) -> None:
    ranks = waiting(AWAY + code)
    found = ranks.evidence()
    wait = found[0].waits[0]
    assert (wait.operation.name, wait.operation.op) in ((name, op), (op, op)), wait
    assert wait.operation.elements == elements
    assert wait.operation.number == number
    assert wait.place is not None and (wait.place.file, wait.place.line) == (FILE, 2)
    assert not found[1].waits
    group = found[0].groups["0"]
    assert group.ranks == (0, 1, 2)
    assert group.timeout == 1800
    told = ranks.verdict()
    assert told.ranks == (1,), told
    assert told.kind == "standing"
    assert "matrix.py" in told.sentence and "<waiting>:2" in told.sentence


DDP = """
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(3):
    loss = net(torch.ones(2, 4)).sum()
    if rank == 1 and step == 2: slow()
    loss.backward()
"""


def test_the_reducer_of_ddp_is_seen_though_it_has_no_python_frame(waiting: Callable[[str], Waiting]) -> None:
    ranks = waiting(DDP)
    told = ranks.verdict()
    assert (told.kind, told.ranks) == ("standing", (1,)), told
    call = ranks.evidence()[0].waits[0].operation
    assert call.op == "all_reduce"
    assert call.elements == 20
    assert call.place is not None and call.place.line == 6


@pytest.mark.parametrize(
    "code, said",
    [
        ("if rank == 0: dist.recv(torch.ones(5), src=1)", "recv from rank 1"),
        ("if rank == 0:\n  for w in [dist.irecv(torch.ones(5), 1)]: w.wait()", "for a send or receive that it started"),
        (BATCH, "for a send or receive that it started"),
        ("dist.new_group([0, 1])", "new_group"),
    ],
)  # fmt: skip
def test_what_no_recorder_knows_is_read_from_frames(waiting: Callable[[str], Waiting], code: str, said: str) -> None:
    ranks = waiting(AWAY + code)
    ranks.evidence()
    told = ranks.verdict()
    assert said in str(told)
    assert 1 in told.ranks


def test_two_ranks_that_receive_from_each_other_are_a_cycle(waiting: Callable[[str], Waiting]) -> None:
    ranks = waiting("if rank < 2: dist.recv(torch.ones(3), src=1 - rank)\nelse: dist.send(torch.ones(3), dst=0)")
    ranks.evidence()
    told = ranks.verdict()
    assert told.kind == "cycle"
    assert set(told.ranks) == {0, 1}


def test_a_rank_that_a_signal_stopped_in_the_collective_itself_is_named(waiting: Callable[[str], Waiting]) -> None:
    ranks = waiting(AWAY + "dist.barrier()")
    ranks.evidence()
    os.kill(ranks.procs.pids().get(1), 19)
    told = ranks.verdict()
    assert (told.kind, told.ranks) == ("silent", (1,))
    assert "SIGSTOP" in told.sentence


class Caller(Actor):
    """Calls another one, and that one it."""

    @endpoint
    def call(self, others: Any, back: Any) -> int:
        return int(others.answer.call_one(back).get())

    @endpoint
    def answer(self, back: Any) -> int:
        return 1 if back is None else int(back.answer.call_one(None).get())


def test_endpoints_that_wait_for_each_other_are_a_cycle(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    actors = mesh.spawn("callers", Caller)
    first, second = actors.slice(gpus=0), actors.slice(gpus=1)
    call = first.call.call_one(second, first)
    told = settled(mesh)
    assert told.kind == "cycle", told
    assert set(told.ranks) == {0, 1}
    assert "waits for an answer from callers.answer" in told.sentence
    mesh.kill(reason="the test is over").get(patience(60))
    call.exception(patience(60))


def test_a_rank_that_holds_the_interpreter_is_read_from_outside(waiting: Callable[[str], Waiting]) -> None:
    ranks = waiting("if rank == 1:\n    import ctypes\n    ctypes.PyDLL(None).sleep(600)\ndist.barrier()")
    told = ranks.verdict()
    assert (told.kind, told.ranks) == ("standing", (1,)), told
    assert told.culprits[0].place is not None
    assert told.culprits[0].place.line == 3
