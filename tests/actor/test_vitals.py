"""A rank that lives but does not answer is told of, with its stack; when it answers again, it is as good as any."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel import actor as public
from monarch_kernel.actor import ActorMesh, ProcMesh, endpoint, this_host
from monarch_kernel.runtime.host import agent
from tests.conftest import wait_until
from tests.deaths import Mortal
from tests.waiting import patience

pytestmark = pytest.mark.own_runtime


class Worker(Mortal):
    @endpoint
    def wedge(self, seconds: int) -> None:
        ctypes.PyDLL(None).sleep(seconds)  # a PyDLL keeps the interpreter lock

    @endpoint
    def compute(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        rounds = 0
        while time.monotonic() < end:
            rounds += 1
        return rounds


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ProcMesh, ActorMesh[Any], list[tuple[int, Any]]]]:
    """Three ranks that are asked often, and the news of them: (rank, what is known)."""
    monkeypatch.setenv("MONARCH_KERNEL_PING_PERIOD", "0.1")
    monkeypatch.setenv("MONARCH_KERNEL_UNRESPONSIVE_AFTER", str(patience(1)))
    public.shutdown_context().get(patience(20))  # the agent reads them when it starts
    procs = this_host().spawn_procs(per_host={"gpus": 3}, name="p")
    workers = procs.spawn("w", Worker)
    workers.pid.call().get(patience(20))
    news: list[tuple[int, Any]] = []
    ranks = {ref.id: rank for rank, ref in enumerate(procs._target().procs)}

    def on_vitals(proc: str, known: Any) -> None:
        if proc in ranks:  # and no successor, which may be slow to start on a busy machine
            news.append((ranks[proc], known))

    procs._system.node.on_vitals.append(on_vitals)
    yield procs, workers, news
    public.shutdown_context().get(patience(20))


def test_a_stopped_rank(mesh: tuple[ProcMesh, ActorMesh[Any], list[tuple[int, Any]]]) -> None:
    procs, workers, news = mesh
    pids = workers.pid.call().get(patience(20))
    os.kill(pids.get(1), signal.SIGSTOP)
    try:
        wait_until(lambda: news, "it was told", 20)
        rank, known = news[0]
        assert rank == 1 and "SIGSTOP" in known.why and known.pid == pids.get(1)
        status = procs.status().get(patience(20))
        assert [status.get(k).state for k in range(3)] == ["alive", "unresponsive", "alive"]
        assert "SIGSTOP" in status.get(1).cause
        # A call that waits for it says so when its time is up, and is not lost.
        pending = workers.pid.call()
        with pytest.raises(TimeoutError, match=r"waiting for gpus=1; rank 1 .*does not respond: it is stopped"):
            pending.get(1)
        wait_until(lambda: len(news) > 1, "the stack was read", 20)
        assert "waiting for a message" in news[1][1].stack
    finally:
        os.kill(pids.get(1), signal.SIGCONT)
    assert len(pending.get(patience(20))) == 3
    wait_until(lambda: news[-1] == (1, None), "it was told that it answers again", 20)
    assert procs.status().get(patience(20)).get(1).state == "alive"


def test_a_rank_whose_interpreter_is_held(mesh: tuple[ProcMesh, ActorMesh[Any], list[tuple[int, Any]]]) -> None:
    _procs, workers, news = mesh
    call = workers.slice(gpus=2).wedge.call_one(math.ceil(patience(4)))
    wait_until(lambda: any(known and known.stack for _, known in news), "it was told, with a stack", 20)
    rank, known = next((rank, known) for rank, known in news if known and known.stack)
    assert rank == 2 and "interpreter lock" in known.why
    assert "Worker.wedge (" in known.stack and "monarch_kernel/runtime" not in known.stack
    call.get(patience(20))
    wait_until(lambda: (2, None) in news, "it answers again", 20)


def test_a_rank_that_computes_responds(mesh: tuple[ProcMesh, ActorMesh[Any], list[tuple[int, Any]]]) -> None:
    _procs, workers, news = mesh
    assert workers.slice(gpus=0).compute.call_one(patience(2)).get(patience(20))
    assert not [known for rank, known in news if rank == 0]


def test_a_stopped_rank_can_be_killed(mesh: tuple[ProcMesh, ActorMesh[Any], list[tuple[int, Any]]]) -> None:
    procs, workers, news = mesh
    os.kill(workers.pid.call().get(patience(20)).get(0), signal.SIGSTOP)
    wait_until(lambda: news, "it was told", 20)
    procs.slice(gpus=0).kill().get(patience(20))
    assert procs._system.node.unresponsive == {}
    assert procs.heal().get(patience(60))
    assert len(workers.pid.call().get(patience(20))) == 3


DUMP = """Process 7: python x.py
Python v3.11.7 (/usr/bin/python3)

Thread 7 (active): "MainThread"
    work (user.py:3)
    call (monarch_kernel/runtime/actor/execution/instance.py:240)
    train (user.py:9)
    _handle (monarch_kernel/runtime/actor/execution/instance.py:269)
    <module> (<frozen runpy>:88)
Thread 8 (idle): "monarch-poller"
    _step (monarch_kernel/runtime/node/poller.py:281)
Thread 9 (idle): "loader"
    get (queue.py:171)
    _bootstrap (threading.py:1002)
Thread 10 (idle): "Thread-4"
    wait (monarch_kernel/runtime/node/poller.py:165)
"""


def test_stacks_are_the_users() -> None:
    assert agent._tidy(DUMP).splitlines() == [
        'Thread 7 (active): "MainThread"',
        "    work (user.py:3)",
        "    call (monarch_kernel/runtime/actor/execution/instance.py:240)",
        "    train (user.py:9)",
        'Thread 9 (idle): "loader"',
        "    get (queue.py:171)",
        'Thread 10 (idle): "Thread-4": in the runtime, waiting for a message',
    ]
    assert agent._tidy("Error: Permission Denied\n") == "Error: Permission Denied"
