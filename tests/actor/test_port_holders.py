"""Who has a port: what a receiver makes of deaths, stops, and ports that are passed on."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from typing import Any

import pytest

from monarch_kernel.actor import Actor, Channel, MeshFailure, SupervisionError, concurrent_endpoint, endpoint
from tests.actor.actors import PATIENCE, Cleaned, Parent
from tests.actor.conftest import Procs
from tests.actor.test_waits import AT_ONCE, Victim
from tests.conftest import wait_until
from tests.deaths import PROCESS_KINDS
from tests.workers import Start


@pytest.fixture
def pair(procs: Procs, faults: Any) -> Any:
    """Two actors, in processes of their own."""
    mesh = procs(2).spawn("victim", Victim)
    mesh.initialized.get(PATIENCE)
    return mesh


def _kill(actor: Any) -> None:
    pid = actor.pid.call_one().get(PATIENCE)
    os.kill(pid, signal.SIGKILL)
    assert actor.echo.call_one(1).exception(PATIENCE) is not None


def test_what_was_sent_before_the_death_comes_first(pair: Any) -> None:
    port, receiver = Channel.open()
    first = pair.slice(gpus=0)
    first.keep.call_one(port).get(PATIENCE)
    for i in range(3):
        first.send.call_one(i).get(PATIENCE)
    _kill(first)
    assert [receiver.recv().get(PATIENCE) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(SupervisionError, match=r"of mesh 'victim', host .*, pid .*SIGKILL"):
            receiver.recv().get(AT_ONCE)


def test_a_wait_lasts_as_long_as_one_holder_lives(pair: Any) -> None:
    port, receiver = Channel.open()
    pair.keep.call(port).get(PATIENCE)
    waiting = receiver.recv()
    _kill(pair.slice(gpus=0))
    assert not waiting.done()
    pair.slice(gpus=1).send.call_one("from the other").get(PATIENCE)
    assert waiting.get(PATIENCE) == "from the other"
    waiting = receiver.recv()
    _kill(pair.slice(gpus=1))
    with pytest.raises(SupervisionError) as caught:
        waiting.get(AT_ONCE)
    assert caught.value.ranks == (0, 1)
    assert "ranks 0-1 of 2 of mesh 'victim'" in str(caught.value)


def test_a_port_that_was_passed_on_lives_where_it_is(pair: Any) -> None:
    port, receiver = Channel.open()
    first, second = pair.slice(gpus=0), pair.slice(gpus=1)
    first.pass_on.call_one(port, second).get(PATIENCE)
    waiting = receiver.recv()
    _kill(first)
    second.send.call_one("still here").get(PATIENCE)
    assert waiting.get(PATIENCE) == "still here"
    waiting = receiver.recv()
    _kill(second)
    with pytest.raises(
        SupervisionError, match="all holders of the port are gone: rank 0 of 1 of mesh 'victim', host .*SIGKILL"
    ):
        waiting.get(AT_ONCE)


def test_an_actor_that_ends_is_gone_though_its_process_lives(pair: Any, faults: Any) -> None:
    port, receiver = Channel.open()
    first = pair.slice(gpus=0)
    first.keep.call_one(port).get(PATIENCE)
    waiting = receiver.recv()
    first.die.broadcast("broadcast_exception")
    with pytest.raises(SupervisionError, match=r"of mesh 'victim', .*ValueError: nobody asked"):
        waiting.get(AT_ONCE)
    port, receiver = Channel.open()
    second = pair.slice(gpus=1)
    second.keep.call_one(port).get(PATIENCE)
    waiting = receiver.recv()
    second.stop("enough of it").get(PATIENCE)
    with pytest.raises(SupervisionError, match=r"of mesh 'victim', .*stopped: enough of it"):
        waiting.get(AT_ONCE)


def test_another_actor_of_the_same_process_may_still_send(procs: Procs, faults: Any) -> None:
    world = procs(1)
    one, other = world.spawn("one", Victim), world.spawn("other", Victim)
    port, receiver = Channel.open()
    one.pass_on.call_one(port, other).get(PATIENCE)
    waiting = receiver.recv()
    one.stop().get(PATIENCE)
    other.send.call_one("I have it").get(PATIENCE)
    assert waiting.get(PATIENCE) == "I have it"
    one = receiver.recv()
    other.stop().get(PATIENCE)
    assert isinstance(one.exception(AT_ONCE), SupervisionError)


def test_holders_that_dropped_the_port_are_not_waited_for(pair: Any) -> None:
    port, receiver = Channel.open()
    first, second = pair.slice(gpus=0), pair.slice(gpus=1)
    pair.keep.call(port).get(PATIENCE)
    waiting = receiver.recv()
    first.forget.call_one().get(PATIENCE)
    _kill(second)
    with pytest.raises(SupervisionError, match="of mesh 'victim'"):
        waiting.get(AT_ONCE)
    assert first.echo.call_one(1).get(PATIENCE) == 1


def test_all_may_let_go_of_it(pair: Any) -> None:
    port, receiver = Channel.open()
    pair.keep.call(port).get(PATIENCE)
    waiting = receiver.recv()
    pair.forget.call().get(PATIENCE)
    _kill(pair.slice(gpus=0))
    assert not waiting.done(), "it had nothing more to send when it died"
    port.send("mine")
    assert waiting.get(PATIENCE) == "mine"


def test_a_last_word_of_the_cleanup_arrives(procs: Procs) -> None:
    port, receiver = Channel.open()
    actors = procs(1).spawn("cleaned", Cleaned, port, "it")
    actors.stop().get(PATIENCE)
    assert receiver.recv().get(PATIENCE) == ("it", None)
    with pytest.raises(SupervisionError, match="stopped"):
        receiver.recv().get(AT_ONCE)


def test_this_process_has_used_it_itself(pair: Any) -> None:
    port, receiver = Channel.open()
    first = pair.slice(gpus=0)
    first.keep.call_one(port).get(PATIENCE)
    port.send("mine")
    assert receiver.recv().get(PATIENCE) == "mine"
    waiting = receiver.recv()
    _kill(first)
    assert not waiting.done(), "we may do so again"
    port.send("again")
    assert waiting.get(PATIENCE) == "again"


def test_a_port_that_may_be_anywhere_never_fails(pair: Any) -> None:
    port, receiver = Channel.open()
    first = pair.slice(gpus=0)
    text = pickle.dumps(port)
    first.keep.call_one(port).get(PATIENCE)
    waiting = receiver.recv()
    _kill(first)
    assert not waiting.done()
    pickle.loads(text).send("from somewhere")
    assert waiting.get(PATIENCE) == "from somewhere"


def test_a_port_given_to_a_dead_rank(pair: Any) -> None:
    first = pair.slice(gpus=0)
    _kill(first)
    port, receiver = Channel.open()
    first.keep.broadcast(port)
    with pytest.raises(SupervisionError, match="of mesh 'victim'"):
        receiver.recv().get(AT_ONCE)
    pair.slice(gpus=1).keep.call_one(port).get(PATIENCE)
    waiting = receiver.recv()
    assert not waiting.done(), "the living have it now"
    pair.slice(gpus=1).send.call_one(5).get(PATIENCE)
    assert waiting.get(PATIENCE) == 5


def test_a_successor_has_the_ports_of_its_constructor(procs: Procs, faults: Any) -> None:
    world = procs(1)
    port, receiver = Channel.open()
    victim = world.spawn("victim", Victim, False, port)
    waiting = receiver.recv()
    _kill(victim)
    assert isinstance(waiting.exception(AT_ONCE), MeshFailure)
    world.heal().get(PATIENCE)
    waiting = receiver.recv()
    assert not waiting.done()
    victim.send.call_one("the new one").get(PATIENCE)
    assert waiting.get(PATIENCE) == "the new one"
    waiting = receiver.recv()
    _kill(victim)
    assert isinstance(waiting.exception(AT_ONCE), MeshFailure)


def test_an_answer_that_was_left_to_one_that_dies(procs: Procs, faults: Any) -> None:
    first = procs(1).spawn("first", Victim)
    second = procs(1).spawn("second", Victim)
    answered = first.leave_to.call_one(second)
    waiting = [first.leave_to.call_one(second), first.leave_to.call(second)]
    first.echo.call_one(1).get(PATIENCE)  # the ports are on their way
    wait_until(lambda: second.echo.call_one(1).get(PATIENCE) == 1, "the other answers")
    _kill(second)
    for future in [answered, *waiting]:
        with pytest.raises(SupervisionError, match=r"its answer was left to rank 0 of mesh 'second'.*SIGKILL"):
            future.get(AT_ONCE)
    assert first.echo.call_one(1).get(PATIENCE) == 1


def test_an_answer_that_was_left_to_another(procs: Procs) -> None:
    first = procs(1).spawn("first", Victim)
    second = procs(1).spawn("second", Victim)
    answer = first.leave_to.call_one(second)
    first.echo.call_one(1).get(PATIENCE)
    wait_until(lambda: second.send.call_one("here").exception(PATIENCE) is None, "the port has arrived")
    assert answer.get(PATIENCE) == "here"


def test_the_owner_of_a_receiver_may_be_anywhere(procs: Procs, faults: Any) -> None:
    # A receiver in one rank, its port in another one, and we in between, who passed it on.
    third = procs(1).spawn("third", Receives)
    victim = procs(1).spawn("victim", Victim)
    port = third.open.call_one().get(PATIENCE)
    victim.keep.call_one(port).get(PATIENCE)
    waiting = third.receive.call_one()
    victim.send.call_one("hello").get(PATIENCE)
    assert waiting.get(PATIENCE) == "hello"
    _kill(victim)
    # We live, and may pass it on again.
    waiting = third.receive.call_one()
    parent = procs(1).spawn("parent", Parent)
    parent.forward.call_one(port, "by another").get(PATIENCE)
    assert waiting.get(PATIENCE) == "by another"


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_a_sender_that_the_receiver_has_never_met(kind: str, pair: Any, procs: Procs) -> None:
    third = procs(1).spawn("third", Receives)
    begun, begins = Channel.open()
    waiting = third.wait_through.call_one(begun, pair.slice(gpus=0), pair.slice(gpus=1))
    begins.recv().get(PATIENCE)
    pair.slice(gpus=1).die.broadcast(kind)
    error = waiting.get(PATIENCE)
    assert isinstance(error, SupervisionError)
    assert "all holders of the port are gone: rank 0 of 1 of mesh 'victim'" in str(error)


class Receives(Actor):
    @endpoint
    def wait_through(self, begun: Any, first: Any, second: Any) -> BaseException | None:
        port, receiver = Channel.open()
        first.pass_on.call_one(port, second).get(PATIENCE)
        waiting = receiver.recv()
        begun.send(waiting.done())
        return waiting.exception(AT_ONCE)

    @endpoint
    def open(self) -> Any:
        port, self.receiver = Channel.open()
        return port

    @endpoint
    def receive(self) -> Any:
        return self.receiver.recv().get(PATIENCE)


def test_many_ports_leave_nothing_behind(pair: Any) -> None:
    system = pair._system
    for _ in range(300):
        port, receiver = Channel.open()
        pair.slice(gpus=0).keep.call_one(port).get(PATIENCE)
        del port, receiver
    pair.slice(gpus=0).forget.call_one().get(PATIENCE)
    assert len(system.ports._given) <= 128


def test_a_script_hears_of_it_once(script: Any) -> None:
    ran = script(
        """
        import os, time
        from monarch_kernel.actor import Actor, Channel, endpoint, this_host
        class Sender(Actor):
            @endpoint
            def work(self, port):
                port.send(1)
                os.abort()
        senders = this_host().spawn_procs(per_host={"gpus": 1}).spawn("senders", Sender)
        port, receiver = Channel.open()
        senders.work.broadcast(port)
        print(receiver.recv().get(20))
        receiver.recv().get(20)
        """
    )
    code, out, err = ran.finish()
    assert (code, out) == (1, "1\n")
    assert err.count("SIGABRT") == 1, err
    assert "recv() failed, as all holders of the port are gone: rank 0 of 1 of mesh 'senders' (gpus=0)" in err


# -- messages that nobody can get ----------------------------------------------------------------------------


class Sends(Actor):
    """Is told of what it could not send."""

    def __init__(self, handle: bool) -> None:
        self.handle = handle
        self.seen: list[Any] = []

    def _handle_undeliverable_message(self, envelope: Any) -> bool:
        self.seen.append(envelope)
        return self.handle

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True

    @endpoint
    def broadcast(self, mesh: Any) -> list[Any]:
        mesh.echo.broadcast("hello")
        return self.seen

    @endpoint
    def through(self, port: Any) -> str:
        try:
            port.send(1)
        except ConnectionError as e:
            return str(e)
        return f"handled {len(self.seen)}"


@pytest.mark.parametrize("handle", [True, False])
def test_an_actor_handles_what_it_cannot_send(handle: bool, pair: Any, procs: Procs) -> None:
    port = pair.slice(gpus=1).opens.call_one().get(PATIENCE)
    _kill(pair.slice(gpus=1))
    sends = procs(1).spawn("sends", Sends, handle)
    assert isinstance(sends.broadcast.call_one(pair.slice(gpus=0)).get(PATIENCE), list)
    pair.echo.broadcast("nobody to tell outside an actor")
    wait_until(lambda: sends.broadcast.call_one(pair).get(PATIENCE), "its process knows of the death")
    told = sends.broadcast.call_one(pair).get(PATIENCE)[-1]
    assert (told.what, told.ranks) == ("victim.echo", (1,))
    assert "SIGKILL" in told.cause
    said = sends.through.call_one(port).get(PATIENCE)
    assert said.startswith("handled") if handle else "receiver is gone" in said
    assert pair.slice(gpus=0).echo.call_one(1).get(PATIENCE) == 1


# -- over several hosts ----------------------------------------------------------------------------------------


@pytest.mark.own_runtime
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("end", ["rank", "worker"])
@pytest.mark.parametrize("receiver", ["here", "on another host"])
def test_senders_on_other_hosts(receiver: str, end: str, transport: str, workers: Start, faults: Any) -> None:
    made = workers(2, transport)
    hosts = made.attach()
    victim = hosts.slice(hosts=0).spawn_procs({"gpus": 1}).spawn("victim", Victim)
    pid = victim.pid.call_one().get(PATIENCE)
    if receiver == "here":
        port, receives = Channel.open()
        victim.keep.call_one(port).get(PATIENCE)
        waiting = receives.recv()
        victim.send.call_one("hello").get(PATIENCE)
        assert waiting.get(PATIENCE) == "hello"
        waiting = receives.recv()
    else:
        third = hosts.slice(hosts=1).spawn_procs({"gpus": 1}).spawn("third", Between)
        waiting = third.wait.call_one(victim)
        wait_until(lambda: victim.send.call_one("hello").exception(PATIENCE) is None, "it has the port")
        assert third.came.call_one().get(PATIENCE) == "hello"
    assert not waiting.done()
    if end == "rank":
        os.kill(pid, signal.SIGKILL)
    else:
        made[0].end(signal.SIGKILL)
    with pytest.raises(SupervisionError, match="(?s)all holders of the port are gone: rank 0 of 1 of mesh 'victim'.*"):
        waiting.get(AT_ONCE)


class Between(Actor):
    """Waits on one host for another one, through a port that only those two know."""

    def __init__(self) -> None:
        self.first: Any = None

    @concurrent_endpoint
    async def wait(self, victim: Any) -> None:
        port, receiver = Channel.open()
        await victim.keep.call_one(port)
        del port
        self.first = await receiver.recv()
        await receiver.recv()

    @concurrent_endpoint
    async def came(self) -> Any:
        while self.first is None:
            await asyncio.sleep(0.01)
        return self.first
