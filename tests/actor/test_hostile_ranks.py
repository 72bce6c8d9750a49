"""User code that does to its rank what one does not do: it is reported, other ranks go on, and nothing is left."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ActorError, SupervisionError, endpoint
from tests.actor.actors import PATIENCE
from tests.actor.conftest import Procs
from tests.conftest import alive, children, wait_until


class _RaisesAtItsEnd:
    def __del__(self) -> None:
        raise RuntimeError("raised in __del__")


class Hostile(Actor):
    @endpoint
    def ping(self) -> int:
        return os.getpid()

    @endpoint
    def close_all_descriptors(self) -> None:
        os.closerange(0, 10_000)
        threading.Event().wait()

    @endpoint
    def fork(self, n: int) -> int:
        for _ in range(n):
            if os.fork() == 0:
                while True:
                    time.sleep(600)
        return os.getpid()

    @endpoint
    def ignore_all_signals(self) -> None:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            if number < signal.SIGRTMIN:
                signal.signal(number, signal.SIG_IGN)
        print("deaf", flush=True)
        while True:
            time.sleep(600)

    @endpoint
    def leave_what_raises(self) -> int:
        first, second = _RaisesAtItsEnd(), _RaisesAtItsEnd()
        del first
        self.kept = second  # until the rank ends
        return 1

    @endpoint
    def recurse(self, limit: int) -> int:
        sys.setrecursionlimit(limit)

        def deeper(n: int) -> int:
            return deeper(n + 1)

        return deeper(0)


def test_all_descriptors_closed(procs: Procs, faults: queue.Queue[Any]) -> None:
    mesh = procs(2).spawn("hostile", Hostile)
    (pid, _) = mesh.ping.call().get(PATIENCE).values()
    with pytest.raises(SupervisionError, match="its connection was closed"):
        mesh.slice(gpus=0).close_all_descriptors.call_one().get(PATIENCE)
    assert mesh.slice(gpus=1).ping.call_one().get(PATIENCE)
    assert alive(pid), "it lives, so somebody has to end it: the fixture stops the mesh, and looks for it"


def test_400_forks_end_with_their_rank(procs: Procs) -> None:
    world = procs(1)
    mesh = world.spawn("hostile", Hostile)
    pid = mesh.fork.call_one(400).get(PATIENCE)
    forks = children(pid)
    assert len(forks) == 400
    assert mesh.ping.call_one().get(PATIENCE) == pid
    world.kill().get(PATIENCE)
    wait_until(lambda: not any(map(alive, forks)), "all forks have ended with their rank")


def test_a_rank_that_ignores_all_signals(procs: Procs) -> None:
    world = procs(2)
    mesh = world.spawn("hostile", Hostile)
    pids = list(mesh.ping.call().get(PATIENCE).values())
    deaf = mesh.slice(gpus=0).ignore_all_signals.call_one()
    world.kill("it does not listen").get(PATIENCE)
    with pytest.raises(SupervisionError, match="it does not listen"):
        deaf.get(PATIENCE)
    assert not any(map(alive, pids))


def test_exceptions_in_del_end_nothing(procs: Procs, capfd: pytest.CaptureFixture[str]) -> None:
    world = procs(1)
    mesh = world.spawn("hostile", Hostile)
    assert mesh.leave_what_raises.call_one().get(PATIENCE) == 1
    assert mesh.ping.call_one().get(PATIENCE)
    said: list[str] = []

    def told() -> bool:
        said.append(capfd.readouterr().err)
        return "RuntimeError: raised in __del__" in "".join(said)

    wait_until(told, "the rank's stderr says so")
    world.stop().get(PATIENCE)


def test_deep_recursion(procs: Procs, faults: queue.Queue[Any]) -> None:
    mesh = procs(2).spawn("hostile", Hostile)
    with pytest.raises(ActorError, match="RecursionError"):
        mesh.slice(gpus=0).recurse.call_one(1_000).get(PATIENCE)
    assert mesh.slice(gpus=0).ping.call_one().get(PATIENCE), "an error like any other"
