"""Meshes over several hosts: real workers on this machine, near (one site) and far (each a site of its own)."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from monarch_kernel import config
from monarch_kernel.actor import Channel, HostMesh, SupervisionError, attach_to_workers, this_host
from monarch_kernel.errors import AttachTimeoutError
from monarch_kernel.output import RankOutput, subscribe
from monarch_kernel.runtime.actor.hosts import host_mesh
from tests.actor.actors import PATIENCE, Basic, started
from tests.actor.remote_actors import Holder, Reader, Remote
from tests.conftest import alive, wait_until
from tests.workers import Start, Team, team

TRANSPORTS = ("ipc", "tcp")


@pytest.fixture(scope="module", autouse=True)
def ranks_without_pytest(runtime: None) -> Iterator[None]:
    """Their actors need none, and each worker would load it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_mesh, "SHARED", ("numpy",))
        yield


@pytest.fixture(scope="module")
def standing(runtime: None) -> Iterator[dict[str, tuple[ExitStack, Team]]]:
    """The workers that the tests of this file share."""
    teams: dict[str, tuple[ExitStack, Team]] = {}
    yield teams
    for ends, _team in teams.values():
        ends.close()


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest, standing: dict[str, tuple[ExitStack, Team]]) -> Iterator[Team]:
    """Two workers, on which nothing runs. A test may end them: the next one has others then."""
    if request.param not in standing:
        ends = ExitStack()
        both = ends.enter_context(team(request.param))
        standing[request.param] = ends, both
        for _ in range(2):
            both.start()
    _ends, both = standing[request.param]
    yield both
    both.detach()
    if any(worker.process.poll() is not None for worker in both):
        standing.pop(request.param)[0].close()
    else:
        for worker in both:
            worker.wait_idle()


@pytest.fixture
def far(workers: Start) -> Team:
    """Two workers, each a site of its own."""
    return workers(2, "tcp")


# -- using them -------------------------------------------------------------------------------


def test_procs_on_every_host(pair: Team) -> None:
    hosts = pair.attach(name="some")
    assert hosts.sizes == {"hosts": 2}
    assert repr(hosts) == "<HostMesh some: node0, node1 (hosts=2)>"
    world = hosts.spawn_procs(per_host={"gpus": 2})
    assert dict(world.sizes) == {"hosts": 2, "gpus": 2}
    where = world.spawn("basic", Basic).where.call().get(PATIENCE)
    assert [(p["coords"], p["size"]) for p in where.values()] == [
        ({"hosts": h, "gpus": g}, {"hosts": 2, "gpus": 2}) for h in (0, 1) for g in (0, 1)
    ]
    pids = list(world.pids().values())
    assert {*pids[:2]} == pair[0].ranks()
    assert {*pids[2:]} == pair[1].ranks()
    assert [(s.state, s.host, s.pid) for s in world.status().get(PATIENCE).values()] == [
        ("alive", f"node{rank // 2}", pid) for rank, pid in enumerate(pids)
    ]
    assert "hosts=1 gpus=0  node1" in world.to_table()


def test_slices_by_host(pair: Team) -> None:
    hosts = pair.attach()
    second = hosts.slice(hosts=1)
    world = second.spawn_procs(per_host={"gpus": 2})
    assert dict(world.sizes) == {"gpus": 2}
    basic = world.spawn("basic", Basic)
    assert {*basic.pid.call().get(PATIENCE).values()} == pair[1].ranks()
    assert pair[0].ranks() == set()
    whole = hosts.spawn_procs(per_host={"gpus": 1})
    assert whole.slice(hosts=1).host_mesh.sizes == {"hosts": 1}
    assert repr(whole.host_mesh) == "<HostMesh node0, node1 (hosts=2)>"
    again = whole.slice(hosts=1).host_mesh.spawn_procs()
    assert again.spawn("basic", Basic).pid.call().get(PATIENCE).item(hosts=0) in pair[1].ranks()
    with pytest.raises(RuntimeError, match="reference to those hosts"):
        whole.host_mesh.stop()
    hosts.stop().get(PATIENCE)  # also what was spawned on the hosts of its procs
    for worker in pair:
        worker.wait_idle()


def test_large_arguments_and_results(pair: Team) -> None:
    remote = pair.attach().spawn_procs().spawn("remote", Remote)
    values = np.arange(1_000_000.0)
    assert list(remote.total.call(values).get(PATIENCE).values()) == [values.sum()] * 2
    for doubled in remote.double.call(values).get(PATIENCE).values():
        np.testing.assert_array_equal(doubled, values * 2)


def test_actors_of_different_hosts_talk(pair: Team) -> None:
    remote = pair.attach().spawn_procs().spawn("remote", Remote)
    first, second = (remote.slice(hosts=h) for h in (0, 1))
    assert first.ask.call_one(second, 21).get(PATIENCE) == 42
    values = np.arange(300_000.0)
    np.testing.assert_array_equal(second.ask.call_one(first, values).get(PATIENCE), values * 2)
    # And with those of this host, in both directions.
    here = this_host().spawn_procs().spawn("here", Remote)
    assert here.ask.call_one(second, 4).get(PATIENCE) == 8
    assert second.ask.call_one(here, 5).get(PATIENCE) == 10


def test_ports_across_hosts(pair: Team) -> None:
    remote = pair.attach().spawn_procs().spawn("remote", Remote)
    first, second = (remote.slice(hosts=h) for h in (0, 1))
    port, receiver = Channel.open()
    first.feed.call_one(port, 100).get(PATIENCE)
    assert [receiver.recv().get(PATIENCE) for _ in range(100)] == list(range(100))
    far_port = second.open.call_one().get(PATIENCE)
    first.feed.call_one(far_port, 50).get(PATIENCE)
    far_port.send("mine")
    assert sorted(map(str, second.received.call_one(51).get(PATIENCE))) == sorted(map(str, [*range(50), "mine"]))


def test_output_of_every_host_arrives(pair: Team) -> None:
    seen: list[RankOutput] = []
    end = subscribe(seen.append)
    try:
        remote = pair.attach().spawn_procs(per_host={"gpus": 2}, name="talkers").spawn("remote", Remote)
        remote.say.call("good morning").get(PATIENCE)
        wait_until(lambda: len(seen) >= 4, "all ranks' output is here")
    finally:
        end()
    assert sorted((o.host, o.rank, o.coords["gpus"], o.mesh, o.data) for o in seen) == [
        (f"node{rank // 2}", rank, rank % 2, "talkers", "good morning\n") for rank in range(4)
    ]


def test_logs_of_every_host(pair: Team) -> None:
    from monarch_kernel.output import logs

    world = pair.attach().spawn_procs()
    world.spawn("remote", Remote).say.call("noted").get(PATIENCE)
    wait_until(lambda: list(logs(world).values()) == ["noted\n"] * 2, "the agents have the output")


def test_memory_of_another_host(pair: Team) -> None:
    world = pair.attach().spawn_procs()
    size = 100_000
    holder = world.slice(hosts=0).spawn("holder", Holder, size)
    reader = world.slice(hosts=1).spawn("reader", Reader)
    handle = holder.handle.call_one().get(PATIENCE)
    assert reader.add_one.call_one(handle, size).get(PATIENCE) == 0
    assert reader.add_one.call_one(handle, size).get(PATIENCE) == size
    assert holder.sum.call_one().get(PATIENCE) == 2 * size


def test_a_near_and_a_far_host(workers: Start, faults: Any) -> None:
    near, far = workers(1, "ipc"), workers(1, "tcp")
    hosts = [each.attach() for each in (near, far)]
    worlds = [mesh.spawn_procs() for mesh in hosts]
    here, there = (world.spawn("remote", Remote) for world in worlds)
    values = np.arange(300_000.0)
    for asker, other in ((here, there), (there, here)):
        np.testing.assert_array_equal(asker.ask.call_one(other, values).get(PATIENCE), values * 2)
    # Each has procs of its own on the other's host, and on the controller's.
    for asker, places in ((here, (hosts[1], this_host())), (there, (hosts[0], this_host()))):
        pid = asker.pid.call_one().get(PATIENCE)
        owned = [asker.spawn_on.call_one(place, 1).get(PATIENCE) for place in places]
        pids = [mesh.pid.call_one().get(PATIENCE) for mesh in owned]
        assert asker.ask.call_one(owned[1], 2).get(PATIENCE) == 4
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda gone=pids: not any(map(alive, gone)), "what the dead rank has started is gone")
    for each in (near, far):
        each[0].wait_idle()


# -- what ranks find there --------------------------------------------------------------------


def test_folders_and_environment(pair: Team, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("MK_CHANGED", "after the start")
    monkeypatch.syspath_prepend(str(tmp_path / "nowhere"))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(os, "getcwd", lambda: str(gone))  # a folder that only the controller's host has
    world = pair.attach().spawn_procs(env={"MK_GIVEN": "yes"}, preload=["no_such_module"])
    cwd, env, path = world.spawn("remote", Remote).slice(hosts=1).surroundings.call_one().get(PATIENCE)
    assert cwd == os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # where the worker was started
    assert (env["MK_GIVEN"], env["MK_CHANGED"]) == ("yes", "after the start")
    assert str(tmp_path / "nowhere") not in path


def test_another_interpreter(pair: Team) -> None:
    import sys

    hosts = pair.attach().with_python_executable(sys.executable)
    remote = hosts.spawn_procs().spawn("remote", Remote)
    assert list(remote.double.call(2).get(PATIENCE).values()) == [4, 4]


# -- ends -------------------------------------------------------------------------------------


def test_stop_drops_everything_and_keeps_the_workers(pair: Team) -> None:
    hosts = pair.attach()
    mesh = hosts.spawn_procs(per_host={"gpus": 2}).spawn("basic", Basic)
    hosts.slice(hosts=0).spawn_procs()
    mesh.pid.call().get(PATIENCE)
    hosts.stop("enough").get(PATIENCE)
    for worker in pair:
        worker.wait_idle()
    with pytest.raises(SupervisionError, match="stopped: enough"):
        mesh.pid.call().get(PATIENCE)
    again = hosts.spawn_procs().spawn("basic", Basic)
    assert list(again.echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_stop_is_for_what_was_spawned_through_that_mesh(pair: Team) -> None:
    first, second = pair.attach(), pair.attach()
    ours = [
        hosts.spawn_procs().spawn("basic", Basic)
        for hosts in (first, first.slice(hosts=0), first.with_python_executable(sys.executable))
    ]
    theirs = second.spawn_procs().spawn("basic", Basic)
    for mesh in (*ours, theirs):
        mesh.pid.call().get(PATIENCE)
    first.stop("enough").get(PATIENCE)
    for mesh in ours:
        with pytest.raises(SupervisionError, match="stopped: enough"):
            mesh.pid.call().get(PATIENCE)
    assert list(theirs.echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_shutdown_ends_the_workers(pair: Team) -> None:
    hosts = pair.attach()
    copy = pickle.loads(pickle.dumps(hosts))
    part = hosts.slice(hosts=slice(0, 1))
    mesh = hosts.spawn_procs().spawn("basic", Basic)
    mesh.pid.call().get(PATIENCE)
    for how in ("stop", "shutdown"):
        with pytest.raises(RuntimeError, match="slice"):
            getattr(part, how)()
        with pytest.raises(RuntimeError, match="reference"):
            getattr(copy, how)()
    hosts.shutdown().get(PATIENCE)
    assert [worker.process.wait(PATIENCE) for worker in pair] == [0, 0]
    for use in (hosts.spawn_procs, hosts.stop, hosts.shutdown, part.spawn_procs):
        with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
            use()
    with pytest.raises(RuntimeError, match="host node0 is gone"):
        copy.spawn_procs()


def test_async_with(pair: Team) -> None:
    import asyncio

    async def use() -> list[int]:
        async with pair.attach() as hosts, hosts.spawn_procs() as world:
            basic = await world.spawn("basic", Basic)
            return list((await basic.echo.call(3)).values())

    assert asyncio.run(use()) == [3, 3]
    assert [worker.process.wait(PATIENCE) for worker in pair] == [0, 0]


def test_stop_and_kill_of_a_mesh(pair: Team) -> None:
    hosts = pair.attach()
    for end in ("stop", "kill"):
        world = hosts.spawn_procs(per_host={"gpus": 2})
        world.spawn("basic", Basic).pid.call().get(PATIENCE)
        getattr(world, end)().get(PATIENCE)
        for worker in pair:
            worker.wait_idle()


# -- deaths -----------------------------------------------------------------------------------


def test_a_rank_dies(pair: Team, faults: Any) -> None:
    mesh = pair.attach().spawn_procs(per_host={"gpus": 2}).spawn("basic", Basic)
    pids = list(mesh.pid.call().get(PATIENCE).values())
    pending = started(mesh.slice(hosts=1))
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises(SupervisionError, match="node1.*killed by SIGKILL") as caught:
        pending.get(PATIENCE)
    assert caught.value.ranks == (1,)
    assert list(mesh.slice(hosts=0).echo.call(1).get(PATIENCE).values()) == [1, 1]
    os.kill(pids[2], signal.SIGKILL)  # it sleeps


def test_a_worker_is_killed(pair: Team, faults: Any) -> None:
    hosts = pair.attach()
    world = hosts.spawn_procs(per_host={"gpus": 2})
    mesh = world.spawn("basic", Basic)
    pids = list(mesh.pid.call().get(PATIENCE).values())
    pending = started(mesh.slice(hosts=1))
    pair[1].end(signal.SIGKILL)
    with pytest.raises(SupervisionError, match="node1") as caught:
        pending.get(PATIENCE)
    assert caught.value.ranks == (0, 1)
    wait_until(lambda: not any(alive(pid) for pid in pids[2:]), "its ranks are gone")
    # The others' work goes on, and what cannot be is said.
    with pytest.raises(SupervisionError, match="node1"):
        mesh.slice(hosts=1).echo.call(1).get(PATIENCE)
    with pytest.raises(RuntimeError, match="host node1 is gone"):
        hosts.spawn_procs()
    assert list(mesh.slice(hosts=0).echo.call(1).get(PATIENCE).values()) == [1, 1]
    fresh = hosts.slice(hosts=0).spawn_procs()
    assert fresh.spawn("basic", Basic).echo.call_one(1).get(PATIENCE) == 1
    states = [status.state for status in world.status().get(PATIENCE).values()]
    assert states == ["alive", "alive", "dead", "dead"]
    for ended in (world, fresh):
        ended.stop().get(PATIENCE)
    pair[0].wait_idle()


def test_procs_of_a_rank_end_with_it(pair: Team, faults: Any) -> None:
    hosts = pair.attach()
    parent = hosts.slice(hosts=0).spawn_procs().spawn("parent", Remote)
    pid = parent.pid.call_one().get(PATIENCE)
    own = parent.spawn_on.call_one(hosts.slice(hosts=1), 2).get(PATIENCE)
    assert {*own.pid.call().get(PATIENCE).values()} == pair[1].ranks()
    os.kill(pid, signal.SIGKILL)
    pair[1].wait_idle()
    with pytest.raises(SupervisionError):
        own.pid.call().get(PATIENCE)


def test_what_ranks_leave_behind_ends_with_the_controllers_work(pair: Team) -> None:
    hosts = pair.attach()
    world = hosts.spawn_procs()
    left = list(world.spawn("remote", Remote).leave_behind.call().get(PATIENCE).values())
    world.stop().get(PATIENCE)
    hosts.stop().get(PATIENCE)
    wait_until(lambda: not any(map(alive, left)), "what the ranks have left behind is gone")


def test_what_runs_below_living_ranks_of_another_mesh_stays(pair: Team) -> None:
    first, second = pair.attach(), pair.attach()
    left = [
        list(hosts.spawn_procs().spawn("remote", Remote).leave_behind.call().get(PATIENCE).values())
        for hosts in (first, second)
    ]
    first.stop().get(PATIENCE)
    assert all(map(alive, left[1]))
    second.stop().get(PATIENCE)
    wait_until(lambda: not any(map(alive, left[0] + left[1])), "what the ranks of both meshes have left behind is gone")


def test_only_the_controller_ends_hosts_and_attaches(pair: Team) -> None:
    hosts = pair.attach()
    remote = hosts.slice(hosts=0).spawn_procs().spawn("remote", Remote)
    for how in ("stop", "shutdown"):
        assert "reference" in remote.stop_hosts.call_one(hosts, how).get(PATIENCE)
    assert "for the controller" in remote.attach.call_one(pair.urls[1]).get(PATIENCE)


@pytest.mark.own_runtime
def test_a_host_that_is_silent_for_a_while(workers: Start, faults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_HEARTBEAT_TIMEOUT", "1")
    far = workers(2, "tcp")
    hosts = far.attach()
    basic = hosts.spawn_procs().spawn("basic", Basic)
    basic.pid.call().get(PATIENCE)
    os.kill(far[0].pid, signal.SIGSTOP)
    try:
        with pytest.raises(SupervisionError, match="node0 is out of reach") as caught:
            basic.echo.call(1).get(PATIENCE)
        assert caught.value.ranks == (0,)
        assert basic.slice(hosts=1).echo.call_one(2).get(PATIENCE) == 2
    finally:
        os.kill(far[0].pid, signal.SIGCONT)
    # Nobody knows what was lost: what ran there ends, and one attaches again.
    far[0].wait_idle()
    with pytest.raises(RuntimeError, match="host node0 is gone"):
        hosts.spawn_procs()
    again = far.attach().spawn_procs().spawn("basic", Basic)
    assert list(again.echo.call(3).get(PATIENCE).values()) == [3, 3]


# -- attaching --------------------------------------------------------------------------------


def test_attach_again(pair: Team) -> None:
    first = pair.attach()
    one = first.spawn_procs().spawn("basic", Basic)
    second = pair.attach()
    two = second.spawn_procs().spawn("basic", Basic)
    assert list(one.echo.call(1).get(PATIENCE).values()) == list(two.echo.call(1).get(PATIENCE).values())


def test_errors_name_every_worker_that_failed(far: Team) -> None:
    nobody = ["tcp://127.0.0.1:9", "tcp://127.0.0.1:11"]
    with pytest.raises(ConnectionError, match="cannot attach to 2 of 3 workers") as caught:
        attach_to_workers(workers=[far.urls[0], *nobody], key_file=far.key_file, timeout=1)
    assert all(url in str(caught.value) for url in nobody)
    assert far.urls[0] not in str(caught.value)
    # The healthy one was let go, and can be used.
    hosts = far.attach()
    assert list(hosts.spawn_procs().spawn("basic", Basic).echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_a_worker_that_never_answers_fails_each_use_of_the_mesh() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with config.configured(mesh_attach_config_timeout="300ms"):
            hosts = attach_to_workers(workers=[url], name="silent")
        assert dict(hosts.sizes) == {"hosts": 1} and "silent" in repr(hosts)
        uses = (
            lambda: hosts.initialized.get(PATIENCE),
            lambda: hosts.initialized.get(PATIENCE),
            hosts.spawn_procs,
            hosts.slice(hosts=0).spawn_procs,
            hosts.shutdown,
            lambda: pickle.dumps(hosts),
        )
        said: set[str] = set()
        for use in uses:
            with pytest.raises(AttachTimeoutError, match=r"no answer within 0\.3 s.*ATTACH_CONFIG_TIMEOUT") as caught:
                use()
            assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, ConnectionError)
            said.add(str(caught.value))
        assert len(said) == 1
        with pytest.raises(AttachTimeoutError, match=r"no answer within 0\.2 s"):
            attach_to_workers(workers=[url], timeout=0.2)


def _raises(error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        attach_to_workers(**options)


def test_bad_requests(tmp_path: Any) -> None:
    _raises(ValueError, "at least one", workers=[])
    _raises(ValueError, "named twice", workers=["ipc:///tmp/a", "ipc:///tmp/a"])
    _raises(ValueError, "not a worker address", workers=["node1"])
    _raises(ValueError, "name the host", workers=["tcp://0.0.0.0:26600"])
    _raises(ConnectionError, "ipc:///tmp/nobody-here", workers=["ipc:///tmp/nobody-here"], timeout=0.2)


def test_a_host_mesh_is_a_mesh_of_hosts(pair: Team) -> None:
    hosts = pair.attach()
    assert isinstance(hosts, HostMesh)
    assert hosts.initialized.get(PATIENCE) is True
    assert hosts.flatten("all").sizes == {"all": 2}
    with pytest.raises(ValueError, match="have a dimension 'hosts'"):
        hosts.spawn_procs(per_host={"hosts": 2})
