"""Ranks of a host that is lost are put on another one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from monarch_kernel.actor import MeshFailure
from tests.actor.test_healing import Counter, HealError, Holder, Saved, faults, kill
from tests.waiting import patience
from tests.workers import Start

__all__ = ["faults"]  # a fixture of every test


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_lost_host_is_replaced_by_a_spare_one(workers: Start, transport: str) -> None:
    made = workers(3, transport)
    hosts = made.attach()
    p = hosts.slice(hosts=slice(0, 2)).spawn_procs({"gpus": 2}, name="p", spares=hosts.slice(hosts=2))
    mesh = p.spawn("w", Saved, 10)
    holder = p.slice(hosts=0, gpus=0).spawn("h", Holder)
    holder.keep.call_one(mesh.slice(hosts=1)).get(patience(30))
    mesh.add.call(1).get(patience(30))
    mesh.checkpoint.call().get(patience(30))
    before = mesh.where.call().get(patience(30))
    made[1].end(signal.SIGKILL)
    with pytest.raises(MeshFailure):
        mesh.where.call().get(patience(30))
    done = p.heal().get(patience(60))
    assert [one.rank for one in done.replaced] == [2, 3]
    assert {one.host for one in done.replaced} == {made[2].name} and done.restored == ["w"]
    after = mesh.where.call().get(patience(30))
    assert [v[0] for v in after.values()] == [0, 1, 2, 3] and [v[2] for v in after.values()] == [11] * 4
    assert [v[1] for v in after.values()][:2] == [v[1] for v in before.values()][:2]
    # A reference in another process, which had its own links to the lost host.
    assert holder.ask.call_one().get(patience(30)) == [0, 1]
    # Nothing is left to go to.
    made[2].end(signal.SIGKILL)
    with pytest.raises(MeshFailure):
        mesh.where.call().get(patience(30))
    if transport == "tcp":
        with pytest.raises(HealError, match=rf"{made[2].name} is gone .*no spare host"):
            p.heal().get(patience(60))
    assert p.healthy().sizes == {"hosts": 1, "gpus": 2}
    assert len(p.healthy().spawn("again", Counter, 0).where.call().get(patience(30))) == 2


def test_a_heal_that_fails_leaves_its_spare_host_to_the_next(workers: Start, tmp_path: Path) -> None:
    made = workers(2, "tcp")
    hosts = made.attach()
    full = tmp_path / "full"

    def bootstrap() -> None:
        if full.exists():
            raise OSError("the disk is full")

    p = hosts.slice(hosts=0).spawn_procs({"gpus": 1}, bootstrap=bootstrap, name="p", spares=hosts.slice(hosts=1))
    mesh = p.spawn("w", Counter, 10)
    mesh.where.call().get(patience(30))
    full.touch()
    made[0].end(signal.SIGKILL)
    with pytest.raises(MeshFailure):
        mesh.where.call().get(patience(30))
    with pytest.raises(Exception, match="the disk is full"):
        p.heal().get(patience(60))
    full.unlink()
    assert [one.host for one in p.heal().get(patience(60)).replaced] == [made[1].name]
    assert len(mesh.where.call().get(patience(30))) == 1


def test_a_lost_host_is_replaced_by_one_that_is_given(workers: Start) -> None:
    made = workers(2, "tcp")
    hosts = made.attach()
    p = hosts.slice(hosts=0).spawn_procs({"gpus": 2}, name="p")
    mesh = p.spawn("w", Counter, 10)
    mesh.where.call().get(patience(30))
    made[0].end(signal.SIGKILL)
    with pytest.raises(MeshFailure):
        mesh.where.call().get(patience(30))
    with pytest.raises(HealError, match=rf"{made[0].name} is gone \(ranks 0, 1\), and there is no spare host"):
        p.heal().get(patience(60))
    done = p.heal(hosts=hosts.slice(hosts=1)).get(patience(60))
    assert {(one.old_host, one.host) for one in done.replaced} == {(made[0].name, made[1].name)}
    assert len(mesh.where.call().get(patience(30))) == 2


def test_a_host_that_is_lost_unheard_of_gets_no_successor(workers: Start) -> None:
    made = workers(2, "tcp")
    hosts = made.attach()
    p = hosts.slice(hosts=0).spawn_procs({"gpus": 2}, name="p")
    mesh = p.spawn("w", Saved, 10)
    mesh.add.call(1).get(patience(30))
    mesh.checkpoint.call().get(patience(30))
    kill(mesh, 1)
    os.kill(made[0].pid, signal.SIGSTOP)  # it has told of its rank, and takes nothing in any more
    healing = p.heal(hosts=hosts.slice(hosts=1))
    made[0].end(signal.SIGKILL)
    done = healing.get(patience(60))
    assert {(one.rank, one.host) for one in done.replaced} == {(0, made[1].name), (1, made[1].name)}
    assert [value[2] for value in mesh.where.call().get(patience(30)).values()] == [11, 11]
