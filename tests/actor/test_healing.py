"""What died is replaced in its place: same coordinates, same actors, every reference to the mesh still good."""

from __future__ import annotations

import asyncio
import operator
import os
from typing import Any, ClassVar

import psutil
import pytest

from monarch_kernel import actor as public
from monarch_kernel.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    HealError,
    MeshFailure,
    ProcMesh,
    RestartPolicy,
    SupervisionError,
    current_rank,
    endpoint,
    heal_mesh,
    this_host,
)
from monarch_kernel.meshes import respawn_actors
from monarch_kernel.runtime.actor.healing.healer import Healer
from monarch_kernel.runtime.actor.process import get_system
from tests.conftest import wait_until
from tests.deaths import KINDS, PROCESS_KINDS, Mortal
from tests.waiting import patience


class Counter(Mortal):
    def __init__(self, start: int) -> None:
        self.count = start

    @endpoint
    def where(self) -> tuple[int, int, int]:
        return current_rank().rank, os.getpid(), self.count

    @endpoint
    def add(self, n: int) -> int:
        self.count += n
        return self.count


class Saved(Counter):
    @endpoint
    def checkpoint(self) -> dict[str, Any]:
        return {"count": self.count, "bulk": bytes(300_000)}

    def __restore__(self, state: dict[str, Any]) -> None:
        assert len(state["bulk"]) == 300_000
        self.count = state["count"]


class Lives(Saved):
    """Notes its beginnings and ends in the process that it lives in."""

    log: ClassVar[list[str]] = []

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.log.append("begins")

    def __cleanup__(self, exc: Exception | None) -> None:
        self.log.append("ends")

    @endpoint
    def lives(self) -> list[str]:
        return self.log


class SavedAsync(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def add(self, n: int) -> int:
        self.count += n
        return self.count

    @endpoint
    async def checkpoint(self) -> int:
        return self.count

    async def __restore__(self, state: int) -> None:
        self.count = state

    @endpoint
    async def die(self) -> None:
        os._exit(3)


class Holder(Actor):
    """Keeps a reference to a mesh, can spawn on procs of others, and survives their deaths."""

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True

    @endpoint
    def keep(self, mesh: Any) -> None:
        self.mesh = mesh

    @endpoint
    def ask(self) -> list[int]:
        return [rank for rank, _, _ in self.mesh.where.call().get().values()]

    @endpoint
    def spawn_on(self, procs: ProcMesh) -> Any:
        self.mesh = procs.spawn("guests", Counter, 7)
        self.mesh.initialized.get()
        return self.mesh


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """Failures that nobody handled; they end nothing here."""
    seen: list[MeshFailure] = []
    monkeypatch.setattr(public, "unhandled_fault_hook", seen.append)
    return seen


def procs(n: int = 3, **options: Any) -> ProcMesh:
    return this_host().spawn_procs(per_host={"gpus": n}, name="p", **options)


def kill(mesh: ActorMesh[Any], rank: int, kind: str = "sigkill") -> None:
    with pytest.raises(SupervisionError):
        mesh.slice(gpus=rank).die.call_one(kind).get(patience(20))


# -- heal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_death_is_healed(kind: str) -> None:
    p = procs()
    mesh = p.spawn("w", Counter, 5)
    before = mesh.where.call().get()
    mesh.add.call(1).get()
    if kind == "broadcast_exception":
        mesh.slice(gpus=1).die.broadcast(kind)
        with pytest.raises(SupervisionError):
            while True:
                mesh.slice(gpus=1).where.call_one().get(patience(20))
    else:
        kill(mesh, 1, kind)
    done = p.heal().get(patience(60))
    assert [one.rank for one in done.replaced] == [1]
    assert done.respawned == ["w"] and not done.restored
    assert done.replaced[0].what == ("proc" if kind in PROCESS_KINDS else "actor")
    after = mesh.where.call().get(patience(20))
    assert [after.get(k)[2] for k in range(3)] == [6, 5, 6]  # its __init__ ran again, with its argument
    for k in (0, 2):
        assert after.get(k)[1] == before.get(k)[1]
    assert (after.get(1)[1] == before.get(1)[1]) == (kind not in PROCESS_KINDS)
    assert "1 healed" in str(done) and "gpus=1" in str(done)


def test_nothing_to_heal() -> None:
    p = procs(2)
    p.spawn("w", Counter, 0).where.call().get()
    done = p.heal().get(patience(20))
    assert not done and "nothing to heal" in str(done)


def test_it_can_die_and_be_healed_again_and_again() -> None:
    p = procs(2)
    mesh = p.spawn("w", Counter, 0)
    pids = set()
    for _ in range(4):
        pids.add(mesh.where.call().get(patience(20)).get(1)[1])
        kill(mesh, 1)
        assert p.heal().get(patience(60))
    pids.add(mesh.where.call().get(patience(20)).get(1)[1])
    assert len(pids) == 5


def test_all_ranks_at_once() -> None:
    p = procs(4)
    mesh = p.spawn("w", Counter, 1)
    mesh.where.call().get()
    p.kill().get(patience(20))
    done = p.heal().get(patience(60))
    assert [one.rank for one in done.replaced] == [0, 1, 2, 3]
    assert [v[::2] for v in mesh.where.call().get(patience(20)).values()] == [(k, 1) for k in range(4)]


def test_a_slice_heals_only_its_ranks() -> None:
    p = procs(3)
    mesh = p.spawn("w", Counter, 1)
    mesh.where.call().get()
    p.slice(gpus=slice(0, 2)).kill().get(patience(20))
    assert [one.rank for one in p.slice(gpus=1).heal().get(patience(60)).replaced] == [1]
    assert mesh.slice(gpus=slice(1, 3)).where.call().get(patience(20))
    with pytest.raises(SupervisionError):
        mesh.slice(gpus=0).where.call_one().get(patience(20))
    assert [one.rank for one in p.heal().get(patience(60)).replaced] == [0]


def test_references_in_other_processes_reach_the_successor() -> None:
    p = procs(2)
    mesh = p.spawn("w", Counter, 1)
    holder = this_host().spawn_procs(name="q").spawn("h", Holder)
    holder.keep.call_one(mesh).get(patience(20))
    assert holder.ask.call_one().get(patience(20)) == [0, 1]
    kill(mesh, 0)
    with pytest.raises(ActorError, match=r"rank 0"):
        holder.ask.call_one().get(patience(20))
    p.heal().get(patience(60))
    assert holder.ask.call_one().get(patience(20)) == [0, 1]
    # and one that was never used before its rank died
    late = this_host().spawn_procs(name="r").spawn("h", Holder)
    late.keep.call_one(mesh).get(patience(20))
    assert late.ask.call_one().get(patience(20)) == [0, 1]


def test_actors_of_other_owners_come_back_too() -> None:
    p = procs(2)
    p.initialized.get()
    holder = this_host().spawn_procs(name="q").spawn("h", Holder)
    guests = holder.spawn_on.call_one(p).get(patience(20))
    assert [v[::2] for v in guests.where.call().get(patience(20)).values()] == [(0, 7), (1, 7)]
    p.slice(gpus=1).kill().get(patience(20))
    p.heal().get(patience(60))
    # The holder owns them, and has made them anew when heal() is done.
    assert [v[::2] for v in guests.where.call().get(patience(20)).values()] == [(0, 7), (1, 7)]
    assert holder.ask.call_one().get(patience(20)) == [0, 1]


def test_calls_that_failed_are_not_repeated() -> None:
    p = procs(2)
    mesh = p.spawn("w", Counter, 0)
    mesh.where.call().get()
    port, receiver = Channel.open()
    pending = mesh.slice(gpus=1).hold.call_one(port)
    receiver.recv().get(patience(20))
    behind = mesh.slice(gpus=1).add.call_one(1)
    p.slice(gpus=1).kill().get(patience(20))
    p.heal().get(patience(60))
    for call in (pending, behind):
        with pytest.raises(SupervisionError, match="killed"):
            call.get(patience(20))
    assert mesh.slice(gpus=1).where.call_one().get(patience(20))[2] == 0


def test_a_loop_that_heals_and_repeats() -> None:
    p = procs(2)
    mesh = p.spawn("w", Saved, 0)
    steps = 0
    while steps < 3:
        try:
            mesh.add.call(1).get(patience(20))
            mesh.checkpoint.call().get(patience(20))
            steps += 1
            if steps == 2 and mesh.where.call().get(patience(20)).get(0)[2] == 2:
                kill(mesh, 1)
                steps += 0
        except MeshFailure:
            p.heal().get(patience(60))
    assert [v[2] for v in mesh.where.call().get(patience(20)).values()][1] == 3


def test_bootstrap_and_environment_are_as_at_first() -> None:
    def bootstrap() -> None:
        os.environ["BOOTED"] = "yes"

    class Env(Mortal):
        @endpoint
        def env(self) -> tuple[str, str, str]:
            return os.environ.get("BOOTED", ""), os.environ.get("GIVEN", ""), os.getcwd()

    p = this_host().spawn_procs(per_host={"gpus": 2}, bootstrap=bootstrap, env={"GIVEN": "x"})
    mesh = p.spawn("e", Env)
    before = mesh.env.call().get(patience(20))
    p.kill().get(patience(20))
    p.heal().get(patience(60))
    assert list(mesh.env.call().get(patience(20)).values()) == list(before.values())


def test_output_of_a_successor_belongs_to_its_place() -> None:
    class Talker(Mortal):
        @endpoint
        def say(self, what: str) -> None:
            print(what)

    from monarch_kernel import output

    p = procs(2)
    mesh = p.spawn("t", Talker)
    mesh.pid.call().get(patience(20))
    p.slice(gpus=1).kill().get(patience(20))
    p.heal().get(patience(60))
    heard: list[tuple[str, int, dict[str, int], str]] = []
    stop = output.subscribe(lambda o: heard.append((o.mesh, o.rank, o.coords, str(o.data))))
    try:
        mesh.say.call("hello").get(patience(20))
        wait_until(lambda: len([h for h in heard if "hello" in h[3]]) == 2, "both were heard", 20)
    finally:
        stop()
    assert {h[:2] for h in heard if "hello" in h[3]} == {("p", 0), ("p", 1)}
    assert any(h[2] == {"gpus": 1} for h in heard)


async def _awaited(mesh: Any) -> Any:
    return await mesh


def test_heal_mesh_gives_the_healed_proc_mesh() -> None:
    p = procs(2)
    p.spawn("w", Counter, 3).where.call().get()
    p.kill().get(patience(20))
    again = heal_mesh(p)
    mesh = again.spawn("later", Counter, 5)
    assert [v[2] for v in mesh.where.call().get(patience(60)).values()] == [5, 5]
    assert len(again.healed.replaced) == 2
    assert asyncio.run(_awaited(again.slice(gpus=0))).extent == again.slice(gpus=0).extent


def test_calls_behind_heal_wait_for_it() -> None:
    p = procs()
    mesh = p.spawn("w", Saved, 100)
    mesh.add.call(1).get()
    mesh.checkpoint.call().get()
    kill(mesh, 1)
    agent = psutil.Process(get_system().agent_process.pid)
    agent.suspend()  # so the heal cannot be over before all of these are made
    try:
        healing = p.heal()
        one = mesh.slice(gpus=1).add.call_one(1)
        many = mesh.add.call(1)
        chosen = mesh.slice(gpus=1).where.choose()
        streamed = list(mesh.where.stream())
        mesh.add.broadcast(1)
        folded = Accumulator(mesh.add, 0, operator.add).accumulate(0)
        healthy = mesh.slice(gpus=slice(0, 3, 2)).where.call()  # behind those in order, so it waits as well
        assert not any(call.done() for call in (healing, one, many, chosen, *streamed, folded, healthy))
    finally:
        agent.resume()
    assert one.get(patience(60)) == 102, "the checkpoint was restored before the first of them came"
    assert [v for _, v in many.get(patience(20)).items()] == [102, 103, 102]
    assert healing.get(patience(20)).restored == ["w"]
    assert chosen.get(patience(20))[2] == 103
    assert sorted(element.get(patience(20))[2] for element in streamed) == [102, 102, 103]
    assert folded.get(patience(20)) == 103 + 104 + 103
    assert [v[2] for v in healthy.get(patience(20)).values()] == [103, 103]


def test_a_call_behind_a_heal_that_fails_meets_the_death(monkeypatch: pytest.MonkeyPatch) -> None:
    p = procs(2)
    mesh = p.spawn("w", Counter, 0)
    mesh.where.call().get()
    kill(mesh, 1)

    def no_place(*_args: Any) -> Any:
        raise HealError("there is no place")

    with monkeypatch.context() as patch:
        patch.setattr(Healer, "_places", no_place)
        again = heal_mesh(mesh)
        with pytest.raises(SupervisionError, match="SIGKILL"):
            again.where.call().get(patience(20))
        with pytest.raises(HealError, match="there is no place"):
            _ = again.healed
    assert len(heal_mesh(mesh).where.call().get(patience(60))) == 2


def test_actors_that_are_replaced_twice_at_once_are_one_actor() -> None:
    p = procs(2)
    mesh = p.spawn("w", Lives, 5)
    mesh.add.call(1).get()
    mesh.checkpoint.call().get()
    done = [each.get(patience(60)) for each in [respawn_actors(p) for _ in range(4)]]
    assert [each.respawned for each in done] == [["w"]] * 4
    assert set(map(tuple, mesh.lives.call().get(patience(20)).values())) == {("begins", "ends") * 4 + ("begins",)}
    kill(mesh, 1)
    futures = [p.heal(), respawn_actors(p), p.heal(), respawn_actors(p)]
    mesh.add.call(1).get(patience(60))  # it waits for all of them
    done = [each.get(patience(60)) for each in futures]
    assert sorted(len(each.replaced) for each in (done[0], done[2])) == [0, 1], "one of them heals"
    lives = mesh.lives.call().get(patience(20))
    assert lives.get(0) == ["begins", "ends"] * 6 + ["begins"]
    rest = lives.get(1)  # how many it has depends on which was first
    assert rest == ["begins", "ends"] * (len(rest) // 2) + ["begins"]
    assert [count for _, _, count in mesh.where.call().get(patience(20)).values()] == [7, 7]


def test_heal_mesh_takes_an_actor_mesh() -> None:
    p = procs(2)
    mesh = p.spawn("w", Counter, 3)
    mesh.where.call().get()
    kill(mesh, 0)
    again = heal_mesh(mesh)
    assert len(again.where.call().get(patience(60))) == 2, "it can be used at once"
    assert again.healed.respawned == ["w"]
    assert asyncio.run(_awaited(again)) is again
    assert mesh.where.call().get(patience(20))
    with pytest.raises(RuntimeError, match="did not come from heal_mesh"):
        _ = mesh.healed
    with pytest.raises(TypeError, match="heal_mesh takes a proc mesh or an actor mesh"):
        heal_mesh("w")


def test_a_failing_init_is_reported_and_can_be_retried(tmp_path: Any) -> None:
    flag = tmp_path / "fail"

    class Fragile(Mortal):
        def __init__(self, path: str) -> None:
            if os.path.exists(path):
                raise ValueError("not yet")

    p = procs(2)
    mesh = p.spawn("f", Fragile, str(flag))
    mesh.pid.call().get(patience(20))
    kill(mesh, 0)
    flag.touch()
    with pytest.raises(ActorError, match="not yet"):
        p.heal().get(patience(60))
    flag.unlink()
    assert p.heal().get(patience(60))
    assert mesh.pid.call().get(patience(20))


def test_only_the_spawner_heals_and_not_after_the_stop() -> None:
    p = procs(1)
    p.initialized.get()
    p.stop().get(patience(20))
    with pytest.raises(HealError, match="only until it is stopped"):
        p.heal()


# -- hosts --------------------------------------------------------------------------------------


def test_two_concurrent_heals() -> None:
    p = this_host().spawn_procs({"gpus": 2})
    mesh = p.spawn("w", Counter, 0)
    kill(mesh, 1)
    done = [p.heal(), p.slice(gpus=1).heal(), p.heal()]
    assert sum(len(each.get(patience(60)).replaced) for each in done) == 1
    assert len(mesh.where.call().get(patience(30))) == 2


# -- checkpoints ------------------------------------------------------------------------------------


def test_the_last_checkpoint_is_restored() -> None:
    p = procs(2)
    mesh = p.spawn("w", Saved, 100)
    mesh.add.call(1).get()
    mesh.checkpoint.call().get()
    mesh.add.call(1).get()
    mesh.slice(gpus=1).checkpoint.call_one().get()
    mesh.add.call(1).get()
    p.kill().get(patience(20))
    done = p.heal().get(patience(60))
    assert done.restored == ["w"]
    assert [v[2] for v in mesh.where.call().get(patience(20)).values()] == [101, 102]


def test_async_actors_restore_too() -> None:
    p = procs(2)
    mesh = p.spawn("a", SavedAsync)
    mesh.add.call(4).get()
    mesh.checkpoint.call().get()
    mesh.add.call(1).get()
    with pytest.raises(SupervisionError):
        mesh.slice(gpus=0).die.call_one().get(patience(20))
    assert p.heal().get(patience(60)).restored == ["a"]
    assert list(mesh.add.call(0).get(patience(20)).values()) == [4, 5]


# -- healthy ----------------------------------------------------------------------------------------


def test_healthy_keeps_the_shape_where_it_can() -> None:
    p = this_host().spawn_procs(per_host={"rows": 2, "cols": 2}, name="grid")
    p.initialized.get()
    assert p.healthy() is p
    p.slice(rows=0).kill().get(patience(20))
    assert p.healthy().sizes == {"rows": 1, "cols": 2}
    assert len(p.healthy().spawn("w", Counter, 0).where.call().get(patience(20))) == 2
    p.slice(rows=1, cols=1).kill().get(patience(20))
    assert p.healthy().sizes == {"rows": 1, "cols": 1}
    p.slice(rows=1, cols=0).kill().get(patience(20))
    with pytest.raises(RuntimeError, match="all ranks of grid are dead"):
        p.healthy()


def test_healthy_is_one_dimension_where_it_cannot() -> None:
    p = this_host().spawn_procs(per_host={"rows": 2, "cols": 2}, name="grid")
    p.initialized.get()
    p.slice(rows=0, cols=1).kill().get(patience(20))
    rest = p.healthy()
    assert rest.sizes == {"ranks": 3}
    assert len(rest.spawn("w", Counter, 0).where.call().get(patience(20))) == 3
    rest.stop().get(patience(20))
    # What was stopped was a part, so the mesh itself can still be healed.
    assert len(p.heal().get(patience(60)).replaced) == 4


# -- policies -----------------------------------------------------------------------------------------


def answers(mesh: ActorMesh[Any]) -> bool:
    try:
        mesh.where.call().get(patience(20))
    except MeshFailure:
        return False
    return True


def test_on_failure_restarts_by_itself_until_the_limit(faults: list[MeshFailure]) -> None:
    p = procs(2, restart=RestartPolicy("on_failure", limit=2))
    mesh = p.spawn("w", Counter, 1)
    mesh.where.call().get()
    for _ in range(2):
        kill(mesh, 1)
        wait_until(lambda: answers(mesh), "the rank is back", 30)
        # Deaths close to each other count as one.
        wait_until(lambda: p.status().get(20).get(1).uptime_s > 0.6, "some time has passed", 30)
    assert not faults
    kill(mesh, 1)
    wait_until(lambda: faults, "the third failure is told", 30)
    assert faults[0].ranks == (1,)
    assert not answers(mesh)


def test_all_together() -> None:
    p = procs(3, restart=RestartPolicy("on_failure", scope="all"))
    mesh = p.spawn("w", Counter, 1)
    before = {v[1] for v in mesh.where.call().get().values()}
    kill(mesh, 2)
    wait_until(
        lambda: answers(mesh) and not before & {v[1] for v in mesh.where.call().get(20).values()}, "all are new", 30
    )


def test_a_dead_actor_is_restarted_in_its_process(faults: list[MeshFailure]) -> None:
    p = procs(2, restart="on_failure")
    mesh = p.spawn("w", Counter, 1)
    before = [v[1] for v in mesh.where.call().get().values()]
    kill(mesh, 0, "sys_exit")
    wait_until(lambda: answers(mesh), "the actor is back", 30)
    assert [v[1] for v in mesh.where.call().get(patience(20)).values()] == before
    assert not faults


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"restart": "always"}, "restart='always': use one of"),
        ({"restart": "on_failure", "bad": 1}, "bad"),
    ],
)
def test_bad_policies(options: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        procs(1, **options)
    with pytest.raises(ValueError, match="scope='mesh'"):
        RestartPolicy(scope="mesh")
    with pytest.raises(ValueError, match="limit must be at least 1"):
        RestartPolicy(limit=0)
