"""References that travel: meshes, slices, ports and values sent into actors, and trees of owners."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    Channel,
    Extent,
    Point,
    SupervisionError,
    ValueMesh,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from tests.actor.actors import PATIENCE, Basic, Parent, started
from tests.actor.conftest import Procs
from tests.conftest import alive, wait_until


@pytest.fixture
def parent(procs: Procs) -> Any:
    """One actor that uses what it is given."""
    return procs(1).spawn("parent", Parent)


def test_actor_meshes_and_slices(four: Any, parent: Any) -> None:
    assert parent.call.call_one(four, "echo", 7).get(PATIENCE) == [7] * 4
    part = four.slice(gpus=slice(1, 3))
    assert [w["spawn_rank"] for w in parent.call.call_one(part, "where").get(PATIENCE)] == [1, 2]
    assert [w["message_rank"] for w in parent.call.call_one(part, "where").get(PATIENCE)] == [0, 1]
    # There and back again it is still the same mesh.
    basic = four.slice(gpus=0)
    returned = basic.echo.call_one(four).get(PATIENCE)
    assert list(returned.pid.call().get().values()) == list(four.pid.call().get().values())
    assert returned.extent == four.extent
    with pytest.raises(RuntimeError, match="came from another process: only the handle that spawn returned"):
        returned.initialized


def test_a_pickled_mesh_still_works(two: Any) -> None:
    again = pickle.loads(pickle.dumps(two.slice(gpus=1)))
    assert again.where.call_one().get()["spawn_rank"] == 1
    assert repr(again) == "<ActorMesh basic (one actor)>"


def test_classes_of_a_test_travel_by_value(procs: Procs, parent: Any) -> None:
    class Local(Actor):
        def __init__(self, value: Any) -> None:
            self.value = value

        @endpoint
        def get(self) -> Any:
            return self.value

    class Payload:
        def __init__(self, x: int) -> None:
            self.x = x

        def double(self) -> int:
            return 2 * self.x

    mesh = procs(2).spawn("local", Local, Payload(4))
    assert [value.double() for value in mesh.get.call().get().values()] == [8, 8]
    # A third process, which has never seen the class, calls it.
    assert [value.double() for value in parent.call.call_one(mesh, "get").get(PATIENCE)] == [8, 8]
    assert mesh.slice(gpus=0).get.call_one().get().double() == 8


def test_values_points_extents(one: Any) -> None:
    values = ValueMesh(Extent(("a", "b"), (2, 2)), [1, 2, 3, 4])
    again = one.echo.call_one(values).get()
    assert isinstance(again, ValueMesh)
    assert again.slice(a=1).values is not None
    assert list(again.slice(a=1).values()) == [3, 4]
    point = Point(3, Extent(("a", "b"), (2, 2)))
    assert one.echo.call_one(point).get() == point
    assert one.echo.call_one(point.extent).get() == point.extent


def test_ports_travel(parent: Any, one: Any) -> None:
    port, receiver = Channel.open()
    # Through one actor to another, and from there back here.
    carried = one.echo.call_one({"port": port}).get()["port"]
    parent.forward.call_one(carried, "hello").get()
    assert receiver.recv().get(PATIENCE) == "hello"


def test_proc_meshes_travel(procs: Procs, parent: Any) -> None:
    world = procs(3)
    mesh = parent.spawn_on.call_one(world.slice(gpus=slice(1, 3)), Basic, "made by parent").get(PATIENCE)
    assert list(mesh.get_tag.call().get(PATIENCE).values()) == ["made by parent"] * 2
    mine = world.spawn("mine", Basic)
    assert list(mesh.pid.call().get().values()) == list(mine.slice(gpus=slice(1, 3)).pid.call().get().values())
    world.stop().get(PATIENCE)
    with pytest.raises(SupervisionError):
        mesh.pid.call().get(PATIENCE)


def test_host_meshes_travel(parent: Any) -> None:
    class Spawner(Actor):
        @endpoint
        def spawn(self, host: Any) -> Any:
            self.procs = host.spawn_procs(per_host={"x": 2}, env={"MK_T": "t"})
            return self.procs.spawn("made", Basic)

    mesh = this_proc().spawn("spawner", Spawner).spawn.call_one(this_host()).get(PATIENCE)
    assert list(mesh.env.call("MK_T").get(PATIENCE).values()) == ["t", "t"]


def test_actors_spawn_procs_of_their_own(parent: Any) -> None:
    mesh = parent.spawn_procs.call_one(2, Basic, "deep").get(PATIENCE)
    assert mesh.extent == Extent(("sub",), (2,))
    assert list(mesh.get_tag.call().get(PATIENCE).values()) == ["deep"] * 2
    pids = {*mesh.pid.call().get().values(), os.getpid()}
    assert len(pids) == 3
    # Errors of procs that another process has started name the process as well.
    with pytest.raises(ValueError, match="boom") as caught:
        mesh.slice(sub=0).boom.call_one().get(PATIENCE)
    assert caught.value.failures[0].pid in pids  # type: ignore[attr-defined]


def test_actors_of_a_mesh_call_each_other(procs: Procs) -> None:
    class Ring(Actor):
        @endpoint
        def hop(self, mesh: Any, left: int) -> list[int]:
            from monarch_kernel.actor import context

            rank = context().actor_instance.rank.rank
            if not left:
                return [rank]
            return [rank, *mesh.slice(gpus=(rank + 1) % 3).hop.call_one(mesh, left - 1).get(30)]

    mesh = procs(3).spawn("ring", Ring)
    assert mesh.slice(gpus=0).hop.call_one(mesh, 2).get(PATIENCE) == [0, 1, 2]


def test_ranks_connect_both_ways_at_once(procs: Procs) -> None:
    class Peer(Actor):
        @endpoint
        def ask_all(self, mesh: Any) -> list[int]:
            return [w["message_rank"] for w in mesh.where.call().get(30).values()]

    world = procs(4)
    basic = world.spawn("basic", Basic)
    peers = world.spawn("peers", Peer)
    for _ in range(3):
        assert list(peers.ask_all.call(basic).get(PATIENCE).values()) == [[0, 1, 2, 3]] * 4


def test_stop_goes_down_the_tree_children_first(procs: Procs) -> None:
    class Owner(Actor):
        def __init__(self, port: Any, name: str) -> None:
            self.port = port
            self.name = name

        @endpoint
        def adopt(self, procs: Any, cls: type, *args: Any) -> Any:
            mesh = procs.spawn("owned", cls, *args)
            mesh.initialized.get(30)
            return mesh

        def __cleanup__(self, error: BaseException | None) -> None:
            self.port.send((time.monotonic_ns(), self.name))

    port, receiver = Channel.open()
    top = procs(1).spawn("top", Owner, port, "top")
    middle = top.adopt.call_one(procs(1), Owner, port, "middle").get(PATIENCE)
    bottom = middle.adopt.call_one(procs(1), Owner, port, "bottom").get(PATIENCE)
    top.stop().get(PATIENCE)
    # What different processes send may come in any order: they tell the time.
    ended = sorted(receiver.recv().get(PATIENCE) for _ in range(3))
    assert [name for _, name in ended] == ["bottom", "middle", "top"]
    for mesh in (middle, bottom):
        with pytest.raises(SupervisionError, match="stopped"):
            mesh.adopt.call_one(procs(1), Basic).get(PATIENCE)


def test_procs_end_with_the_actor_that_spawned_them(parent: Any) -> None:
    mesh = parent.spawn_procs.call_one(2, Basic).get(PATIENCE)
    pids = list(mesh.pid.call().get().values())
    parent.stop().get(PATIENCE)
    wait_until(lambda: not any(alive(pid) for pid in pids), "the grandchildren's procs are gone")
    with pytest.raises(SupervisionError):
        mesh.pid.call().get(PATIENCE)


def test_a_third_partys_pending_call_ends_with_the_owner(procs: Procs) -> None:
    # Monarch lets it hang.
    class Silent(Actor):
        @endpoint(explicit_response_port=True)
        def never(self, reply: Any, port: Any) -> None:
            self.reply = reply
            port.send(None)

    parent = procs(1).spawn("parent", Parent)
    child = parent.spawn_procs.call_one(1, Silent).get(PATIENCE)
    third = procs(1).spawn("third", Parent)
    port, receiver = Channel.open()
    calls = [third.call.call_one(child, "never", port), child.never.call(port)]
    for _ in calls:
        receiver.recv().get(PATIENCE)
    parent.stop().get(PATIENCE)
    for call in calls:
        with pytest.raises(SupervisionError):
            call.get(PATIENCE)


def test_procs_end_with_the_process_of_their_owner(procs: Procs, faults: Any) -> None:
    world = procs(1)
    mesh = world.spawn("parent", Parent).spawn_procs.call_one(1, Basic).get(PATIENCE)
    pid = mesh.pid.call_one().get()
    pending = started(mesh)
    world.kill().get(PATIENCE)
    wait_until(lambda: not alive(pid), "the procs that it had spawned are gone")
    with pytest.raises(SupervisionError):
        pending.get(PATIENCE)


# -- controllers ----------------------------------------------------------------------------------------


class Counter(Actor):
    def __init__(self, start: int = 0) -> None:
        self.n = start

    @endpoint
    def add(self) -> int:
        self.n += 1
        return self.n

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Asker(Actor):
    @endpoint
    def ask(self, name: str, start: int) -> int:
        return get_or_spawn_controller(name, Counter, start).get(30).add.call_one().get(30)


def test_controllers_are_singletons(procs: Procs) -> None:
    first = get_or_spawn_controller("counter", Counter, 10).get(PATIENCE)
    again = get_or_spawn_controller("counter", Counter, 99).get(PATIENCE)
    assert first.add.call_one().get() == 11
    assert again.add.call_one().get() == 12
    assert first.pid.call_one().get() == os.getpid()
    other = get_or_spawn_controller("other", Counter).get(PATIENCE)
    assert other.add.call_one().get() == 1


def test_controllers_from_ranks(procs: Procs) -> None:
    mesh = procs(3).spawn("asker", Asker)
    # Whoever asks first makes it; all get the same.
    assert sorted(mesh.ask.call("shared", 0).get(PATIENCE).values()) == [1, 2, 3]
    assert get_or_spawn_controller("shared", Counter).get(PATIENCE).add.call_one().get() == 4


def test_controllers_can_be_awaited(procs: Procs) -> None:
    import asyncio

    async def main() -> int:
        counter = await get_or_spawn_controller("awaited", Counter, 5)
        return await counter.add.call_one()

    assert asyncio.run(main()) == 6


def test_a_controller_that_fails(faults: Any) -> None:
    class Broken(Actor):
        def __init__(self) -> None:
            raise ValueError("no controller today")

        @endpoint
        def get(self) -> int:
            return 1

    for _ in range(2):
        with pytest.raises(ActorError, match="no controller today"):
            get_or_spawn_controller("broken", Broken).get(PATIENCE)
    with pytest.raises(ValueError, match="is not an Actor class"):
        get_or_spawn_controller("wrong", int)
    # The others are not touched by that.
    assert get_or_spawn_controller("fine", Counter).get(PATIENCE).add.call_one().get() == 1


def test_controllers_that_need_each_other(procs: Procs) -> None:
    class Needs(Actor):
        def __init__(self) -> None:
            self.other = get_or_spawn_controller("needed", Counter, 7).get(30)

        @endpoint
        def ask(self) -> int:
            return self.other.add.call_one().get(30)

    assert get_or_spawn_controller("needs", Needs).get(PATIENCE).ask.call_one().get(PATIENCE) == 8


def test_a_controller_that_died(faults: Any) -> None:
    class Dies(Actor):
        @endpoint
        def die(self) -> None:
            raise SystemExit(1)

        @endpoint
        def alive(self) -> bool:
            return True

    mesh = get_or_spawn_controller("dies", Dies).get(PATIENCE)
    with pytest.raises(SupervisionError, match="raises this once more, and then makes another"):
        mesh.die.call_one().get(PATIENCE)
    assert faults.get(timeout=PATIENCE).mesh == "dies"
    # Each process that had it is told once that its state is gone; then there is another.
    with pytest.raises(ValueError, match="Failure on dies: ") as told:
        get_or_spawn_controller("dies", Dies).get(PATIENCE)
    assert "The next get_or_spawn_controller('dies', ...) of this process makes another." in str(told.value)
    again = get_or_spawn_controller("dies", Dies).get(PATIENCE)
    assert again.alive.call_one().get(PATIENCE)
    # One that was stopped is made anew at once.
    again.stop().get(PATIENCE)
    assert get_or_spawn_controller("dies", Dies).get(PATIENCE).alive.call_one().get(PATIENCE)
