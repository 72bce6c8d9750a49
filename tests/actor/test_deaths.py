"""Every kind of death: what pending calls, later calls, and everybody else see of it."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

import pytest

from monarch_kernel.actor import Actor, Channel, SupervisionError, endpoint
from tests.actor.actors import PATIENCE, Basic, Parent, started
from tests.actor.conftest import Procs
from tests.conftest import alive, wait_until
from tests.deaths import Death, Mortal

#: What the cause reads like, for each kind.
CAUSES = {
    "sigkill": "killed by SIGKILL",
    "segfault": "segmentation fault (SIGSEGV)",
    "os_exit": "exited with code 3",
    "lost_socket": "",
    "sys_exit": "SystemExit: 4",
    "base_exception": "Fatal: enough",
    "broadcast_exception": "ValueError: nobody asked",
}


@pytest.fixture
def mortals(procs: Procs, faults: Any) -> Any:
    """Three actors that can die; the fault that follows is no end of the test."""
    mesh = procs(3).spawn("mortal", Mortal)
    mesh.initialized.get(PATIENCE)
    return mesh


def check(error: SupervisionError, death: Death, rank: int, of: int, pid: int) -> None:
    """The error names the mesh, the rank, its place and process, the cause, and what to do."""
    text = str(error)
    assert error.ranks == (rank,)
    assert f"rank {rank} of {of} of mesh 'mortal' (gpus={rank})" in text
    assert f"pid {pid}" in text
    assert CAUSES[death.kind] in text
    assert "slice" in text
    (failure,) = [f for f in error.failures if f.death is not None]
    assert failure.coords == {"gpus": rank}
    assert failure.pid == pid
    assert failure.host
    if death.of_process:
        assert "Other ranks still work" in text
    else:
        assert "Its process is alive" in text


def test_calls_that_wait_for_a_dead_rank_fail(mortals: Any, death: Death) -> None:
    pids = list(mortals.pid.call().get().values())
    # The middle rank is busy; what is asked of it meanwhile waits behind that, and its death comes last.
    gate, gates = Channel.open()
    busy = mortals.slice(gpus=1)
    holding = busy.hold.call_one(gate)
    go = gates.recv().get(PATIENCE)
    death.strike(busy)
    call = mortals.echo.call("call")
    one = busy.echo.call_one("one")
    stream = mortals.echo.stream("stream")
    for gpus in (0, 2):  # what they answer later comes later: their answers to the call are here then
        assert mortals.slice(gpus=gpus).echo.call_one("later").get(PATIENCE) == "later"
    assert not call.done()
    go.send(None)
    assert holding.get(PATIENCE) == "held"
    with pytest.raises(SupervisionError) as caught:
        call.get(PATIENCE)
    check(caught.value, death, 1, 3, pids[1])
    assert caught.value.values == {0: "call", 2: "call"}
    with pytest.raises(SupervisionError, match=r"mortal\.echo\(\) failed"):
        one.get(PATIENCE)
    results = [element.exception(PATIENCE) for element in stream]
    assert sorted(type(r).__name__ for r in results) == ["NoneType", "NoneType", "SupervisionError"]


def test_calls_after_the_death(mortals: Any, death: Death, faults: Any) -> None:
    pids = list(mortals.pid.call().get().values())
    death.strike(mortals.slice(gpus=2))
    failure = faults.get(timeout=PATIENCE)
    assert failure.mesh == "mortal"
    assert failure.ranks == (2,)
    assert CAUSES[death.kind] in failure.report()
    with pytest.raises(SupervisionError) as caught:
        mortals.echo.call(1).get(PATIENCE)
    check(caught.value, death, 2, 3, pids[2])
    with pytest.raises(SupervisionError):
        mortals.slice(gpus=2).echo.call_one(1).get(PATIENCE)
    results = [element.exception(PATIENCE) for element in mortals.echo.stream(1)]
    assert sum(isinstance(r, SupervisionError) for r in results) == 1
    mortals.echo.broadcast(1)
    # The healthy slice goes on as if nothing had happened, also under load.
    healthy = mortals.slice(gpus=slice(0, 2))
    assert [list(c.get(PATIENCE).values()) for c in [healthy.echo.call(i) for i in range(20)]] == [
        [i, i] for i in range(20)
    ]


def test_new_actors_after_a_death(mortals: Any, death: Death, faults: Any, procs: Procs) -> None:
    world = next(iter(mortals._system.proc_meshes.values()))
    death.strike(mortals.slice(gpus=0))
    faults.get(timeout=PATIENCE)
    if death.of_process:
        part = world.slice(gpus=slice(1, 3))
        assert list(part.spawn("again", Basic).echo.call(1).get(PATIENCE).values()) == [1, 1]
        # Over the dead proc it is an error that names it, at once.
        again = world.spawn("again", Basic)
        with pytest.raises(SupervisionError, match="rank 0 of 3 of mesh 'again'"):
            again.echo.call(1).get(PATIENCE)
        with pytest.raises(SupervisionError, match="rank 0 of 3 of mesh 'again'"):
            again.initialized.get(PATIENCE)
    else:
        # An actor's death does not make its procs unusable.
        assert list(world.spawn("again", Mortal).echo.call(1).get(PATIENCE).values()) == [1, 1, 1]
    assert list(procs(2).spawn("new", Basic).echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_every_rank_dies_at_once(mortals: Any, death: Death, faults: Any) -> None:
    death.strike(mortals)
    pending = mortals.echo.call(1)
    with pytest.raises(SupervisionError):
        pending.get(PATIENCE)
    told = [rank for _ in range(3) for rank in faults.get(timeout=PATIENCE).ranks]
    assert sorted(told) == [0, 1, 2]
    with pytest.raises(SupervisionError) as caught:
        mortals.echo.call(1).get(PATIENCE)
    assert {*caught.value.ranks, *caught.value.unanswered} == {0, 1, 2}
    assert CAUSES[death.kind] in str(caught.value)
    # They died in the same way: that is said once, with all their ranks.
    if death.kind != "lost_socket" and not caught.value.unanswered:
        assert "ranks 0-2 of 3 of mesh 'mortal' (gpus=0-2)" in str(caught.value)


def _world(mesh: Any) -> Any:
    return next(iter(mesh._system.proc_meshes.values()))


def test_a_third_partys_pending_call(procs: Procs, faults: Any) -> None:
    # Rank 0 waits for rank 1, which we kill.
    world = procs(2)
    mortals = world.spawn("mortal", Mortal)
    parent = world.slice(gpus=0).spawn("parent", Parent)
    victim = mortals.slice(gpus=1)
    pid = victim.pid.call_one().get()
    port, receiver = Channel.open()
    waiting = parent.call.call_one(victim, "hold", port)
    receiver.recv().get(PATIENCE)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="killed by SIGKILL"):
        waiting.get(PATIENCE)
    # The one that waited is well.
    assert parent.call.call_one(mortals.slice(gpus=0), "echo", 3).get(PATIENCE) == [3]


def test_a_third_party_learns_of_actor_deaths_too(procs: Procs, faults: Any) -> None:
    world = procs(2)
    mortals = world.spawn("mortal", Mortal)
    parent = world.slice(gpus=0).spawn("parent", Parent)
    with pytest.raises(SupervisionError, match="SystemExit: 4"):
        parent.call.call_one(mortals.slice(gpus=1), "die", "sys_exit").get(PATIENCE)
    with pytest.raises(SupervisionError, match=r"rank 1 of 2 of mesh 'mortal' \(gpus=1\).*SystemExit: 4"):
        mortals.slice(gpus=1).echo.call_one(1).get(PATIENCE)


def test_a_stopped_process_can_be_killed(mortals: Any, faults: Any) -> None:
    stuck = mortals.slice(gpus=1)
    pid = stuck.pid.call_one().get()
    os.kill(pid, signal.SIGSTOP)
    call = mortals.echo.call(1)
    with pytest.raises(TimeoutError, match="waiting for gpus=1"):
        call.get(timeout=0.05)
    _world(mortals).slice(gpus=1).kill("it hangs").get(PATIENCE)
    with pytest.raises(SupervisionError, match="it hangs"):
        call.get(PATIENCE)
    assert list(mortals.slice(gpus=slice(0, 3, 2)).echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_a_stopped_process_that_goes_on(mortals: Any, faults: Any) -> None:
    pid = mortals.slice(gpus=1).pid.call_one().get()
    os.kill(pid, signal.SIGSTOP)
    call = mortals.echo.call(1)
    with pytest.raises(TimeoutError):
        call.get(timeout=0.05)
    os.kill(pid, signal.SIGCONT)
    assert list(call.get(PATIENCE).values()) == [1, 1, 1]
    assert faults.empty()


def test_a_death_while_a_large_message_is_on_its_way(mortals: Any, faults: Any) -> None:
    victim = mortals.slice(gpus=1)
    pid = victim.pid.call_one().get()
    os.kill(pid, signal.SIGSTOP)
    calls = [mortals.echo.call(os.urandom(1 << 20)) for _ in range(4)]
    os.kill(pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(SupervisionError, match="SIGKILL"):
            call.get(PATIENCE)
    healthy = mortals.slice(gpus=slice(0, 3, 2))
    data = os.urandom(1 << 20)
    assert list(healthy.echo.call(data).get(PATIENCE).values()) == [data, data]


def test_a_death_before_the_rank_was_up(procs: Procs, faults: Any) -> None:
    class Early(Actor):
        def __init__(self) -> None:
            from monarch_kernel.actor import context

            if context().actor_instance.rank.rank == 1:
                os._exit(7)

        @endpoint
        def get(self) -> int:
            return 1

    mesh = procs(2).spawn("early", Early)
    with pytest.raises(SupervisionError, match="exited with code 7"):
        mesh.get.call().get(PATIENCE)
    with pytest.raises(SupervisionError, match="exited with code 7"):
        mesh.initialized.get(PATIENCE)
    assert mesh.slice(gpus=0).get.call_one().get(PATIENCE) == 1


def test_a_process_that_exits_in_its_bootstrap(faults: Any) -> None:
    from monarch_kernel.actor import this_host

    world = this_host().spawn_procs(per_host={"gpus": 1}, bootstrap=_exit_at_once)
    with pytest.raises(SupervisionError, match="exited with code 9"):
        world.initialized.get(PATIENCE)
    with pytest.raises(SupervisionError, match="exited with code 9"):
        world.spawn("basic", Basic).echo.call_one(1).get(PATIENCE)


def _exit_at_once() -> None:
    os._exit(9)


class Poor(Actor):
    """An actor whose process runs short of memory."""

    @endpoint
    def limit(self, more: int) -> None:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))

    @endpoint
    def length(self, text: bytes) -> int:
        return len(text)


def test_a_rank_without_the_memory_for_a_message(procs: Procs, faults: Any) -> None:
    poor = procs(2).spawn("poor", Poor)
    poor.slice(gpus=1).limit.call_one(100_000_000).get(PATIENCE)
    for body in (bytes(300_000_000), b"small"):
        with pytest.raises(SupervisionError, match=r"gave it up: there is no memory for a message \(300,") as caught:
            poor.length.call(body).get(PATIENCE)
        assert caught.value.ranks == (1,)
    assert poor.slice(gpus=0).length.call_one(b"small").get(PATIENCE) == 5


@pytest.mark.own_runtime
def test_death_of_the_agent(two: Any, faults: Any, procs: Procs) -> None:
    pids = list(two.pid.call().get().values())
    pending = started(two)
    agent = two._system.agent_process.pid
    os.kill(agent, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="agent") as caught:
        pending.get(PATIENCE)
    assert caught.value.ranks == (0, 1)
    wait_until(lambda: not any(alive(pid) for pid in pids), "its ranks are gone")
    with pytest.raises(SupervisionError, match="agent"):
        two.echo.call(1).get(PATIENCE)
    # A new mesh gets a new agent.
    assert procs(1).spawn("new", Basic).echo.call_one(1).get(PATIENCE) == 1


@pytest.mark.own_runtime
def test_death_of_the_fork_server(two: Any, faults: Any) -> None:
    two.echo.call(1).get()
    pending = started(two)
    rank = two.slice(gpus=0)._target().procs[0]
    pid = two._system.node.pids[rank.id]
    with open(f"/proc/{pid}/stat") as file:
        server = int(file.read().rsplit(")", 1)[1].split()[1])
    os.kill(server, signal.SIGKILL)
    with pytest.raises(SupervisionError) as caught:
        pending.get(PATIENCE)
    # On a busy machine the second death may be heard too late for this error.
    assert sorted([*caught.value.ranks, *caught.value.unanswered]) == [0, 1]
    for rank in range(2):
        with pytest.raises(SupervisionError):
            two.slice(gpus=rank).echo.call_one(1).get(PATIENCE)


def test_output_of_a_dying_rank_is_not_lost(procs: Procs, faults: Any, capfd: pytest.CaptureFixture[str]) -> None:
    class Last(Actor):
        @endpoint
        def words(self) -> None:
            print("last words", flush=False)
            os.kill(os.getpid(), signal.SIGKILL)

    mesh = procs(1).spawn("last", Last)
    with pytest.raises(SupervisionError):
        mesh.words.call_one().get(PATIENCE)
    seen: list[str] = []

    def arrived() -> bool:
        seen.append(capfd.readouterr().out)
        return "last words\n" in "".join(seen)

    wait_until(arrived, "its last words have arrived")
