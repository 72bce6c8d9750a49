"""Host and proc meshes: how they are made, awaited, sliced, looked at and set up."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    BootstrapCommand,
    Channel,
    Extent,
    HostMesh,
    ProcMesh,
    SupervisionError,
    context,
    current_actor_name,
    current_rank,
    current_size,
    default_bootstrap_cmd,
    endpoint,
    proc_mesh,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch_kernel.meshes import get_mesh, list_proc_meshes, on_change
from tests.actor.actors import PATIENCE, AsyncBasic, Basic, started
from tests.actor.conftest import Procs
from tests.conftest import alive, wait_until
from tests.waiting import patience


@pytest.mark.own_runtime
def test_this_host_and_this_proc_are_singletons() -> None:
    assert isinstance(this_host(), HostMesh)
    assert this_host() is this_host()
    assert this_host().extent == Extent((), ())
    assert len(this_host()) == 1
    assert isinstance(this_proc(), ProcMesh)
    assert this_proc() is this_proc()
    assert this_proc().initialized.get() is this_host().initialized.get() is True


def test_an_actor_in_the_controller() -> None:
    mesh = this_proc().spawn("here", Basic)
    assert mesh.pid.call_one().get() == os.getpid()
    value: dict[str, Any] = {}
    assert mesh.echo.call_one(value).get() == value
    also = this_proc().spawn("async", AsyncBasic)
    assert also.echo.call_one(3).get() == 3
    with pytest.raises(ActorError, match="local boom"):
        mesh.boom.call_one("local boom").get()
    mesh.stop().get(PATIENCE)
    with pytest.raises(SupervisionError, match="stopped"):
        mesh.pid.call_one().get(PATIENCE)


def test_per_host_gives_the_shape(procs: Procs) -> None:
    assert procs(3).extent == Extent(("gpus",), (3,))
    assert procs(a=1, b=2).sizes == {"a": 1, "b": 2}
    assert procs(a=2, b=2).size("a") == 2
    single = this_host().spawn_procs()
    assert single.extent == Extent((), ())
    assert single.spawn("one", Basic).echo.call_one(1).get() == 1


def test_await_every_handle() -> None:
    async def main() -> None:
        host = await this_host()
        assert isinstance(host, HostMesh)
        world = await host.spawn_procs(per_host={"gpus": 2})
        assert isinstance(world, ProcMesh)
        assert all(world.pids().values())
        mesh = await world.spawn("basic", Basic)
        assert await mesh is mesh
        assert await world is world
        assert list((await mesh.echo.call(1)).values()) == [1, 1]
        # Slices can be awaited as well, and the plain calls work inside a loop.
        assert await (await mesh.slice(gpus=1)).echo.call_one(2) == 2
        assert (await world.slice(gpus=0)).size() == 1
        assert world.spawn("plain", Basic).initialized.get() is None

    asyncio.run(main())


def test_proc_mesh_takes_sizes_and_env() -> None:
    async def main() -> None:
        world = await proc_mesh(gpus=2, env={"MK_TEST": "yes"})
        mesh = await world.spawn("basic", Basic)
        assert list((await mesh.env.call("MK_TEST")).values()) == ["yes", "yes"]

    asyncio.run(main())
    assert "MK_TEST" not in os.environ
    plain = proc_mesh(gpus=1)
    assert plain.spawn("basic", Basic).env.call_one("MK_TEST").get() is None


def test_async_with_stops_the_mesh() -> None:
    async def main() -> ProcMesh:
        async with this_host().spawn_procs(per_host={"gpus": 2}) as world:
            mesh = await world.spawn("basic", Basic)
            assert list((await mesh.echo.call(1)).values()) == [1, 1]
        with pytest.raises(SupervisionError, match="left its async with block"):
            await mesh.echo.call(1)
        with pytest.raises(RuntimeError, match=r"proc mesh .* was stopped: spawn on a new one"):
            world.spawn("late", Basic)
        return world

    world = asyncio.run(main())
    assert world not in list_proc_meshes()
    with pytest.raises(ZeroDivisionError):

        async def fails() -> None:
            async with proc_mesh(gpus=1):
                1 / 0

        asyncio.run(fails())
    assert list_proc_meshes() == []


def test_slices_of_proc_meshes(procs: Procs) -> None:
    world = procs(hosts=2, gpus=2)
    part = world.slice(hosts=1)
    assert part.extent == Extent(("gpus",), (2,))
    mesh = part.spawn("basic", Basic)
    seen = mesh.where.call().get()
    assert [where["spawn_rank"] for where in seen.values()] == [0, 1]
    everywhere = world.spawn("all", Basic)
    assert list(mesh.pid.call().get().values()) == list(everywhere.slice(hosts=1).pid.call().get().values())
    assert world.slice(hosts=0, gpus=1).spawn("one", Basic).where.call_one().get()["size"] == {}
    assert world.flatten("all").spawn("flat", Basic).where.choose().get()["size"] == {"all": 4}
    assert world.split(gpus=("dp", "pp"), pp=2).sizes == {"hosts": 2, "dp": 1, "pp": 2}
    assert world.rename(gpus="cards").sizes == {"hosts": 2, "cards": 2}


def test_shapes_of_actor_meshes(procs: Procs) -> None:
    mesh = procs(4).spawn("basic", Basic)
    grid = mesh.split(gpus=("dp", "pp"), pp=2)
    assert grid.sizes == {"dp": 2, "pp": 2}
    assert [w["spawn_rank"] for w in grid.slice(pp=1).where.call().get().values()] == [1, 3]
    assert [w["coords"] for w in grid.slice(pp=1).where.call().get().values()] == [{"dp": 0}, {"dp": 1}]
    assert grid.rename(dp="data").where.choose().get()["size"] == {"data": 2, "pp": 2}
    assert len(mesh.slice(gpus=slice(1, None))) == 3
    for wrong, error in (({"gpus": -1}, IndexError), ({"gpus": 4}, IndexError), ({"hosts": 0}, TypeError)):
        with pytest.raises(error):
            mesh.slice(**wrong)


def test_names(procs: Procs) -> None:
    world = this_host().spawn_procs(per_host={"gpus": 2}, name="my mesh")
    mesh = world.spawn("my actor", Basic)
    seen = mesh.slice(gpus=1).where.call_one().get()
    assert seen["name"] == "my actor"
    assert seen["class_name"] == "Basic"
    assert seen["actor_name"].startswith("my_actor-")
    assert seen["proc_id"].startswith("my_mesh-")
    assert repr(world) == "<ProcMesh my mesh (gpus=2)>"
    assert repr(mesh) == "<ActorMesh my actor (gpus=2)>"
    assert repr(mesh.slice(gpus=0)) == "<ActorMesh my actor (one actor)>"
    assert repr(mesh.echo) == "<endpoint my actor.echo of <ActorMesh my actor (gpus=2)>>"
    assert repr(this_host()).startswith("<HostMesh ")
    assert get_mesh("my mesh") is world
    with pytest.raises(LookupError, match=r"no mesh is called 'other' here \(there are: my mesh\)"):
        get_mesh("other")


def test_context_of_the_client() -> None:
    here = context()
    assert here.actor_instance.name == "root"
    assert here.message_rank.rank == 0
    assert current_rank().rank == 0
    assert current_size() == {}
    assert current_actor_name() == "root"
    assert context().actor_instance is here.actor_instance


def test_context_in_an_actor(procs: Procs) -> None:
    class Looks(Actor):
        @endpoint
        def look(self) -> dict[str, Any]:
            from monarch_kernel.actor import context

            instance = context().actor_instance
            return {
                "class": instance.class_name,
                "creator": instance.creator,
                "proc_mesh": instance.proc_mesh.sizes,
                "proc": instance.proc.sizes,
                "proc_id": instance.proc_id,
                "id": instance.actor_id,
                "repr": repr(context()),
            }

    seen = procs(hosts=1, gpus=2).spawn("looks", Looks).look.call().get()
    first, second = seen.values()
    assert first["class"] == "Looks"
    assert first["creator"] == "root"
    assert first["proc_mesh"] == {"hosts": 1, "gpus": 2}
    assert first["proc"] == {}
    assert first["proc_id"] != second["proc_id"]
    assert first["id"] != second["id"]
    assert "looks" in first["repr"]


def test_status_and_pids_and_table(procs: Procs) -> None:
    world = this_host().spawn_procs(per_host={"gpus": 2}, name="m")
    world.initialized.get()
    mesh = world.spawn("basic", Basic)
    pids = list(mesh.pid.call().get().values())
    assert list(world.pids().values()) == pids
    status = world.status().get()
    assert [s.state for s in status.values()] == ["alive", "alive"]
    assert [s.pid for s in status.values()] == pids
    assert all(s.rss_bytes > 1_000_000 for s in status.values())
    assert world.slice(gpus=1).status().get().item().pid == pids[1]
    lines = world.to_table().splitlines()
    assert lines[0].split() == ["rank", "point", "host", "pid", "state"]
    assert [line.split()[1] for line in lines[1:]] == ["gpus=0", "gpus=1"]
    assert [line.split()[3] for line in lines[1:]] == [str(pid) for pid in pids]


def test_kill_ends_procs_at_once_and_is_no_fault(procs: Procs, faults: Any) -> None:
    world = procs(2)
    mesh = world.spawn("basic", Basic)
    pending = started(mesh)
    world.slice(gpus=1).kill("as a test").get(PATIENCE)
    with pytest.raises(SupervisionError, match="as a test"):
        pending.get(PATIENCE)
    assert [s.state for s in world.status().get().values()] == ["alive", "dead"]
    assert "as a test" in world.status().get().get(1).cause
    world.kill().get(PATIENCE)
    assert [s.state for s in world.status().get().values()] == ["dead", "dead"]
    # We killed it ourselves: nobody has to handle that.
    assert list(procs(1).spawn("basic", Basic).echo.call(1).get().values()) == [1]
    assert faults.empty()


def test_meshes_of_the_controller(procs: Procs) -> None:
    assert list_proc_meshes() == []
    changes: list[int] = []
    end = on_change(lambda: changes.append(len(list_proc_meshes())))
    first, second = procs(1), procs(2)
    assert list_proc_meshes() == [first, second]
    assert changes == [1, 2]
    first.stop().get(PATIENCE)
    assert list_proc_meshes() == [second]
    end()
    seen = len(changes)
    second.stop().get(PATIENCE)
    assert len(changes) == seen


def test_stop_of_a_proc_mesh(procs: Procs) -> None:
    world = procs(2)
    mesh = world.spawn("basic", Basic)
    pids = mesh.pid.call().get()
    world.stop("enough").get(PATIENCE)
    for pid in pids.values():
        assert not alive(pid)
    with pytest.raises(SupervisionError, match="enough") as caught:
        mesh.echo.call(1).get(PATIENCE)
    assert caught.value.ranks == (0, 1)
    with pytest.raises(RuntimeError, match=r"was stopped: spawn on a new one"):
        world.spawn("late", Basic)
    with pytest.raises(RuntimeError, match=r"was stopped: spawn on a new one"):
        world.slice(gpus=0).spawn("late", Basic)
    mesh.note.broadcast(1)  # reaches nobody, and harms nobody
    world.stop().get(PATIENCE)
    assert procs(1).spawn("basic", Basic).echo.call_one(1).get() == 1


def test_stop_of_a_part(procs: Procs) -> None:
    world = procs(3)
    mesh = world.spawn("basic", Basic)
    world.slice(gpus=1).stop("not this one").get(PATIENCE)
    with pytest.raises(SupervisionError, match="not this one") as caught:
        mesh.echo.call(1).get(PATIENCE)
    assert caught.value.ranks == (1,)
    # Those that have not answered yet when a death is known are named as such.
    assert {*caught.value.values, *caught.value.unanswered} == {0, 2}
    assert list(mesh.slice(gpus=slice(0, 3, 2)).echo.call(2).get().values()) == [2, 2]
    assert mesh.slice(gpus=2).echo.call_one(3).get() == 3


def test_stopping_while_procs_start(procs: Procs) -> None:
    world = procs(2)
    mesh = world.spawn("basic", Basic)
    world.stop("changed my mind").get(PATIENCE)
    with pytest.raises(SupervisionError, match="changed my mind"):
        mesh.echo.call(1).get(PATIENCE)


def test_stop_of_busy_procs_kills_them_in_the_end(procs: Procs, monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch_kernel.runtime.actor.meshes import proc_mesh as meshes

    monkeypatch.setattr(meshes, "STOP_GRACE", 0.1)
    world = procs(1)
    pending = started(world.spawn("basic", Basic))
    world.stop("now").get(PATIENCE)
    with pytest.raises(SupervisionError, match="now|did not stop within"):
        pending.get(PATIENCE)


def test_env(procs: Procs) -> None:
    world = this_host().spawn_procs(per_host={"gpus": 2}, env={"MK_A": "1", "MK_B": "x=y z"})
    mesh = world.spawn("basic", Basic)
    assert list(mesh.env.call("MK_A").get().values()) == ["1", "1"]
    assert mesh.env.choose("MK_B").get() == "x=y z"
    other = procs(1).spawn("basic", Basic)
    assert other.env.call_one("MK_A").get() is None


def test_ranks_have_the_controllers_folder_and_path(
    procs: Procs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Looks(Actor):
        @endpoint
        def look(self) -> tuple[str, int]:
            import mk_test_module  # pyright: ignore[reportMissingImports]

            return os.getcwd(), mk_test_module.VALUE

    (tmp_path / "mk_test_module.py").write_text("VALUE = 17\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert procs(1).spawn("looks", Looks).look.call_one().get() == (str(tmp_path), 17)


def test_bootstrap_runs_first(procs: Procs) -> None:
    class Early(Actor):
        def __init__(self) -> None:
            self.seen = os.environ.get("MK_SETUP")

        @endpoint
        def get(self) -> str | None:
            return self.seen

    def setup() -> None:
        from monarch_kernel.actor import current_rank, current_size

        os.environ["MK_SETUP"] = f"{current_rank().rank} of {current_size()}"

    async def async_setup() -> None:
        await asyncio.sleep(0)
        os.environ["MK_SETUP"] = "async"

    world = this_host().spawn_procs(per_host={"gpus": 2}, bootstrap=setup)
    assert list(world.spawn("early", Early).get.call().get().values()) == ["0 of {'gpus': 2}", "1 of {'gpus': 2}"]
    world = this_host().spawn_procs(per_host={"gpus": 1}, bootstrap=async_setup)
    assert world.spawn("early", Early).get.call_one().get() == "async"
    world = proc_mesh(setup=setup, gpus=1)
    assert world.spawn("early", Early).get.call_one().get() == "0 of {'gpus': 1}"


def test_bootstrap_of_a_module_goes_by_reference(procs: Procs) -> None:
    world = this_host().spawn_procs(per_host={"gpus": 1}, bootstrap=os.getpid)
    assert world.initialized.get() is True
    assert world.spawn("basic", Basic).echo.call_one(1).get() == 1


def test_bootstrap_that_raises(faults: Any) -> None:
    def setup() -> None:
        from monarch_kernel.actor import current_rank

        if current_rank().rank == 1:
            raise ValueError("no such card")

    world = this_host().spawn_procs(per_host={"gpus": 2}, bootstrap=setup, name="m")
    mesh = world.spawn("basic", Basic)
    with pytest.raises(ActorError, match=r"Actor call m\.setup failed on rank 1 of 2") as caught:
        world.initialized.get(PATIENCE)
    assert "no such card" in str(caught.value)
    with pytest.raises(ActorError, match="no such card"):
        mesh.initialized.get(PATIENCE)
    with pytest.raises((ActorError, SupervisionError), match="bootstrap|no such card") as failed:
        mesh.echo.call(1).get(PATIENCE)
    assert [failure.rank for failure in failed.value.failures] == [1]
    assert mesh.slice(gpus=0).echo.call_one(1).get() == 1
    # Awaiting tells the same.
    with pytest.raises(ActorError, match="no such card"):

        async def main() -> None:
            await world

        asyncio.run(main())


def test_a_busy_bootstrap_holds_back_only_its_rank() -> None:
    port, receiver = Channel.open()

    def setup() -> None:
        from monarch_kernel.actor import Channel, current_rank

        if current_rank().rank == 1:
            mine, gate = Channel.open()
            port.send(mine)
            gate.recv().get(30)

    world = this_host().spawn_procs(per_host={"gpus": 2}, bootstrap=setup)
    mesh = world.spawn("basic", Basic)
    go = receiver.recv().get(PATIENCE)
    assert mesh.slice(gpus=0).echo.call_one(1).get(PATIENCE) == 1
    late = mesh.slice(gpus=1).echo.call_one(2)
    assert not late.done()
    go.send(None)
    assert late.get(PATIENCE) == 2


class Greeter(Actor):
    @endpoint
    def greet(self) -> str:
        return threading.current_thread().name


class AsyncGreeter(Actor):
    @endpoint
    async def greet(self) -> str:
        return threading.current_thread().name


def test_a_bootstrap_may_spawn_actors_and_call_them(procs: Procs) -> None:
    port, receiver = Channel.open()

    def setup() -> None:
        made = [this_proc().spawn("greeter", kind) for kind in (Greeter, AsyncGreeter)]
        port.send([mesh.greet.call_one().get(PATIENCE) for mesh in made])

    async def async_setup() -> None:
        port.send([await this_proc().spawn("greeter", kind).greet.call_one() for kind in (Greeter, AsyncGreeter)])

    for bootstrap in (setup, async_setup):
        world = this_host().spawn_procs(per_host={"gpus": 1}, bootstrap=bootstrap)
        assert receiver.recv().get(PATIENCE) == ["monarch-actor-driver"] * 2
        # The main thread is for the first actor of the proc's owner, as without a bootstrap.
        assert world.spawn("greeter", Greeter).greet.call_one().get(PATIENCE) == "MainThread"


def test_actors_of_a_running_bootstrap_can_be_called_from_other_procs(procs: Procs) -> None:
    """A third process spawns on the proc as well, and the owner's own actors wait all the same."""
    port, receiver = Channel.open()
    helper = procs(1).spawn("basic", Basic)

    class Spawns(Actor):
        @endpoint
        def on(self, proc: Any) -> Any:
            mesh = proc.spawn("greeter", Greeter)
            return mesh.greet.call_one().get(PATIENCE)

    there = procs(1).spawn("spawns", Spawns)

    def setup() -> None:
        mine, gate = Channel.open()
        made = this_proc().spawn("greeter", Greeter)
        port.send((made, there.on.call_one(this_proc()).get(PATIENCE), mine))
        gate.recv().get(PATIENCE)

    world = this_host().spawn_procs(per_host={"gpus": 1}, bootstrap=setup)
    late = world.spawn("basic", Basic)
    first, second = late.echo.call_one(1), late.echo.call_one(2)
    made, told, go = receiver.recv().get(PATIENCE)
    assert told == made.greet.call_one().get(PATIENCE) == "monarch-actor-driver"
    assert helper.echo.call_one(3).get(PATIENCE) == 3
    assert not first.done()
    go.send(None)
    assert [first.get(PATIENCE), second.get(PATIENCE)] == [1, 2]
    assert made.greet.call_one().get(PATIENCE) == "monarch-actor-driver"


def test_a_constructor_that_never_returns_blocks_no_other_actor() -> None:
    port, receiver = Channel.open()

    class Serves(Actor):
        def __init__(self) -> None:
            inside = [this_proc().spawn("greeter", kind) for kind in (Greeter, AsyncGreeter)]
            port.send([*inside, this_host().spawn_procs().spawn("greeter", Greeter)])
            threading.Event().wait()

        @endpoint
        def nothing(self) -> None: ...

    world = this_host().spawn_procs(per_host={"gpus": 1})
    world.spawn("serves", Serves)
    children = receiver.recv().get(PATIENCE)
    names = [mesh.greet.call_one().get(PATIENCE) for mesh in children]
    assert names == ["monarch-actor-driver", "monarch-actor-driver", "MainThread"]
    assert world.spawn("later", Basic).echo.call_one(1).get(PATIENCE) == 1


def test_bootstrap_command(procs: Procs) -> None:
    class Looks(Actor):
        @endpoint
        def look(self) -> tuple[str, str | None, str | None, bool]:
            return sys.executable, os.environ.get("MK_CMD"), os.environ.get("MK_POINT"), sys.flags.utf8_mode

    command = default_bootstrap_cmd().with_env({"MK_CMD": "1"})
    assert isinstance(command, BootstrapCommand)
    assert command.program == sys.executable
    world = this_host().spawn_procs(
        per_host={"gpus": 2}, bootstrap_command=lambda p: command.with_env({"MK_POINT": str(p["gpus"])})
    )
    seen = world.spawn("looks", Looks).look.call().get(patience(60))
    assert [(executable, cmd, point) for executable, cmd, point, _ in seen.values()] == [
        (sys.executable, "1", "0"),
        (sys.executable, "1", "1"),
    ]


class Surroundings(Actor):
    """Tells of its environment, and of that of a proc that it starts itself."""

    @endpoint
    def look(self, *names: str) -> list[str | None]:
        return [*map(os.environ.get, names)]

    @endpoint
    def look_below(self, *names: str) -> list[str | None]:
        below = this_host().spawn_procs().spawn("below", Surroundings)
        return below.look.call_one(*names).get(PATIENCE)

    @endpoint
    def look_far_below(self, *names: str) -> list[str | None]:
        below = this_host().spawn_procs().spawn("below", Surroundings)
        return below.look_below.call_one(*names).get(PATIENCE)


@pytest.mark.own_runtime
def test_none_removes_a_variable(procs: Procs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_GONE", "1")
    monkeypatch.setenv("MK_LATER_GONE", "1")
    procs(1).initialized.get(PATIENCE)  # the agent has both
    monkeypatch.delenv("MK_LATER_GONE")
    names = ("MK_GONE", "MK_LATER_GONE", "HOME")
    command = default_bootstrap_cmd().with_env({"MK_GONE": None, "MK_OTHER": None})
    for options in ({"bootstrap_command": command}, {"env": {"MK_GONE": None}}, {"env": {"LC_X": None}}):
        mesh = this_host().spawn_procs(**options).spawn("looks", Surroundings)  # type: ignore[arg-type]
        gone = None if "LC_X" not in options.get("env", {}) else "1"
        assert mesh.look.call_one(*names).get(PATIENCE) == [gone, None, os.environ["HOME"]]


def test_what_a_rank_starts_is_started_as_it_was(procs: Procs, tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nMK_WRAPPED=$((MK_WRAPPED + 1)) exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    mesh = this_host().with_python_executable(str(wrapper)).spawn_procs().spawn("looks", Surroundings)
    assert mesh.look.call_one("MK_WRAPPED").get(PATIENCE) == ["1"]
    assert mesh.look_far_below.call_one("MK_WRAPPED").get(PATIENCE) == ["1"]
    command = default_bootstrap_cmd()
    world = this_host().spawn_procs(
        per_host={"gpus": 2}, bootstrap_command=lambda point: command.with_env({"MK_POINT": str(point.rank)})
    )
    mesh = world.spawn("looks", Surroundings)
    for look in (mesh.look, mesh.look_below, mesh.look_far_below):
        assert list(look.call("MK_POINT").get(PATIENCE).values()) == [["0"], ["1"]]


@pytest.mark.own_runtime
def test_a_command_that_never_comes_up(faults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_START_LIMIT", "0.5")
    command = BootstrapCommand("sh", args=("-c", "sleep 1000"))
    world = this_host().spawn_procs(bootstrap_command=command, name="mute")
    with pytest.raises(SupervisionError, match=r"did not come up within 0.5 s .*is its command a Python that has"):
        world.spawn("basic", Basic).echo.call_one(1).get(PATIENCE)
    with pytest.raises(SupervisionError, match=r"did not come up within 0.5 s"):
        world.initialized.get(PATIENCE)
    assert "did not come up" in faults.get(timeout=PATIENCE).report()


def test_proc_bind(procs: Procs) -> None:
    class Looks(Actor):
        @endpoint
        def cpus(self) -> set[int]:
            return os.sched_getaffinity(0)

    cpu = min(os.sched_getaffinity(0))
    world = this_host().spawn_procs(per_host={"gpus": 1}, proc_bind=[{"cpus": str(cpu)}])
    assert world.spawn("looks", Looks).cpus.call_one().get() == {cpu}


@pytest.mark.skipif(not os.path.exists("/sys/devices/system/node/node0/cpulist"), reason="this host has no NUMA nodes")
def test_procs_are_bound_to_numa_nodes(procs: Procs, faults: Any) -> None:
    class Looks(Actor):
        @endpoint
        def policy(self) -> tuple[set[int], str]:
            with open("/proc/self/numa_maps") as maps:
                return os.sched_getaffinity(0), maps.readline().split()[1]

    def bound(**bind: str) -> Any:
        return this_host().spawn_procs({"n": 1}, proc_bind=[bind])

    cpus, policy = bound(cpunodebind="0", membind="0").spawn("looks", Looks).policy.call_one().get(PATIENCE)
    assert policy == "bind:0"
    assert cpus <= set(range(os.cpu_count() or 1))
    for bind, why in (({"cpunodebind": "1000"}, "no NUMA node 1000"), ({"membind": "0-999"}, "no NUMA node")):
        with pytest.raises(SupervisionError, match=f"could not be started: this host has {why}"):
            bound(**bind).initialized.get(PATIENCE)
        assert why in faults.get(timeout=PATIENCE).report()


def test_host_mesh_of_procs(procs: Procs) -> None:
    world = procs(2)
    host = world.host_mesh
    assert isinstance(host, HostMesh)
    assert host.spawn_procs(per_host={"x": 1}).spawn("basic", Basic).echo.call_one(1).get() == 1


@pytest.mark.own_runtime
def test_host_mesh_stop_and_shutdown(procs: Procs) -> None:
    world = procs(1)
    mesh = world.spawn("basic", Basic)
    mesh.initialized.get()
    this_host().stop().get(PATIENCE)
    with pytest.raises(SupervisionError, match="host mesh stopped"):
        mesh.echo.call_one(1).get(PATIENCE)
    # stop() ends what runs; the host stays usable.
    assert procs(1).spawn("basic", Basic).echo.call_one(1).get() == 1
    host = this_host()
    host.shutdown().get(PATIENCE)
    for use in (host.spawn_procs, host.shutdown):
        with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
            use()


def test_with_python_executable() -> None:
    world = this_host().with_python_executable(sys.executable).spawn_procs(per_host={"gpus": 1})
    assert world.spawn("basic", Basic).echo.call_one(1).get(patience(60)) == 1


@pytest.mark.own_runtime
def test_nothing_warns(procs: Procs, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world = procs(2)
        mesh = world.spawn("basic", Basic)
        mesh.echo.call(1).get()
        world.stop().get()
        shutdown_context().get()
    assert capfd.readouterr() == ("", "")


def test_a_dead_rank_shows_in_the_table(procs: Procs, faults: Any) -> None:
    world = procs(2)
    mesh = world.spawn("basic", Basic)
    pids = mesh.pid.call().get()
    os.kill(pids[0], 9)
    wait_until(lambda: world.status().get().get(0).state == "dead", "rank 0 is known to be dead")
    assert [line.split()[-1] for line in world.to_table().splitlines()[1:]] == ["dead", "alive"]
    assert "SIGKILL" in world.status().get().get(0).cause
    assert faults.get(timeout=PATIENCE).ranks == (0,)
