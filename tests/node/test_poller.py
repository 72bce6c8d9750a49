"""The protocol by which threads share one epoll set."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.runtime.node.event_loop import new_loop
from monarch_kernel.runtime.node.future import Future, gathered
from monarch_kernel.runtime.node.poller import Poller
from tests.waiting import patience

DEADLINE = patience(10)


@pytest.fixture
def poller() -> Iterator[Poller]:
    made = Poller()
    yield made
    made.close()


class Pipe:
    """A descriptor that becomes readable, and a future that its handler resolves."""

    def __init__(self, poller: Poller) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.future: Future[bytes] = Future(poller, "pipe")
        self.handled_by = 0
        poller.register(self.ours.fileno(), self._on_event)
        self._poller = poller

    def _on_event(self, _events: int) -> None:
        self.handled_by = threading.get_ident()
        self.future._resolve(self.ours.recv(100))

    def close(self) -> None:
        self._poller.unregister(self.ours.fileno())
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def pipe(poller: Poller) -> Iterator[Pipe]:
    made = Pipe(poller)
    yield made
    made.close()


def test_the_thread_that_waits_handles_the_event_itself(poller: Poller, pipe: Pipe) -> None:
    pipe.theirs.send(b"x")
    assert pipe.future.get(DEADLINE) == b"x"
    assert pipe.handled_by == threading.get_ident()


def test_a_wait_ends_at_its_deadline_and_the_result_can_be_had_later(poller: Poller, pipe: Pipe) -> None:
    with pytest.raises(TimeoutError, match="pipe"):
        pipe.future.get(0.01)
    pipe.theirs.send(b"late")
    assert pipe.future.get(DEADLINE) == b"late"
    assert pipe.future.get() == b"late"


def test_the_background_thread_takes_over_when_nobody_waits(poller: Poller, pipe: Pipe) -> None:
    poller.start_background()
    seen = threading.Event()
    pipe.future.add_done_callback(lambda _f: seen.set())
    pipe.theirs.send(b"x")
    assert seen.wait(DEADLINE)
    assert pipe.handled_by not in (0, threading.get_ident())


def test_a_waiter_takes_the_lead_from_the_background_thread(poller: Poller, pipe: Pipe) -> None:
    poller.start_background()
    first: Future[None] = Future(poller)
    poller.call_later(0.05, lambda: first._resolve(None))  # by then the background thread leads
    first.get(DEADLINE)
    other = Pipe(poller)
    timer = poller.call_later(0.05, lambda: other.theirs.sendall(b"y"))
    assert other.future.get(DEADLINE) == b"y"
    assert timer.callback is not None
    other.close()


def test_many_waiters_each_get_theirs_whoever_leads(poller: Poller) -> None:
    pipes = [Pipe(poller) for _ in range(8)]
    results: dict[int, bytes] = {}

    def wait(k: int) -> None:
        results[k] = pipes[k].future.get(10)

    threads = [threading.Thread(target=wait, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for k in (5, 0, 7, 3, 1, 6, 2, 4):
        pipes[k].theirs.send(str(k).encode())
    for thread in threads:
        thread.join(DEADLINE)
    assert results == {k: str(k).encode() for k in range(8)}
    for made in pipes:
        made.close()


def test_a_future_resolved_by_another_thread_wakes_the_leader(poller: Poller) -> None:
    future: Future[int] = Future(poller)
    thread = threading.Timer(0.02, lambda: future._resolve(3))
    thread.start()
    assert future.get(DEADLINE) == 3
    thread.join()


def test_waiting_inside_the_delivery_of_a_message_is_refused_instead_of_hanging(poller: Poller, pipe: Pipe) -> None:
    caught: list[BaseException | None] = []
    never: Future[None] = Future(poller)

    def callback(_future: Any) -> None:
        try:
            never.get(1)
        except RuntimeError as e:
            caught.append(e)

    pipe.future.add_done_callback(callback)
    pipe.theirs.send(b"x")
    pipe.future.get(DEADLINE)
    assert "hand the work to a thread" in str(caught[0])


def test_a_handler_that_raises_does_not_end_the_poller(
    poller: Poller, pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    bad = Pipe(poller)

    def raising(_events: int) -> None:
        bad.ours.recv(10)
        raise ValueError("bug")

    poller.unregister(bad.ours.fileno())
    poller.register(bad.ours.fileno(), raising)
    bad.theirs.send(b"x")
    pipe.theirs.send(b"y")
    assert pipe.future.get(DEADLINE) == b"y"
    assert "bug in monarch_kernel" in caplog.text
    bad.close()


def test_ctrl_c_ends_a_wait_and_loses_nothing(poller: Poller, pipe: Pipe) -> None:
    poller.call_later(0.01, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        pipe.future.get(DEADLINE)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    pipe.theirs.send(b"x")
    assert pipe.future.get(DEADLINE) == b"x"


def test_ctrl_c_ends_the_wait_of_a_main_thread_that_follows(poller: Poller, pipe: Pipe) -> None:
    leading: Future[None] = Future(poller)
    thread = threading.Thread(target=leading.get)
    thread.start()
    while not poller._lead.locked():
        pass
    timer = threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pipe.future.get(DEADLINE)
    leading._resolve(None)
    thread.join(DEADLINE)
    timer.join(DEADLINE)


def test_a_handler_that_does_not_raise_lets_the_wait_go_on(poller: Poller, pipe: Pipe) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        poller.call_later(0.01, lambda: os.kill(os.getpid(), signal.SIGINT))
        poller.call_later(0.05, lambda: pipe.theirs.sendall(b"x"))
        assert pipe.future.get(DEADLINE) == b"x"
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_what_is_shielded_is_not_cut_by_ctrl_c(poller: Poller) -> None:
    steps: list[int] = []
    with pytest.raises(KeyboardInterrupt), poller.shielded():
        os.kill(os.getpid(), signal.SIGINT)
        steps.append(1)
    assert steps == [1]


def test_timers_run_in_order_and_can_be_cancelled(poller: Poller) -> None:
    seen: list[str] = []
    done: Future[None] = Future(poller)
    poller.call_later(0.5, lambda: seen.append("second"))  # long enough for a busy machine to begin the others
    poller.call_later(0.01, lambda: seen.append("first"))
    poller.call_later(0.25, lambda: seen.append("never")).cancel()
    poller.call_later(0.5, lambda: done._resolve(None))
    done.get(DEADLINE)
    assert seen == ["first", "second"]


def test_a_timer_that_is_years_away_is_in_nobodys_way(poller: Poller, pipe: Pipe) -> None:
    timers = [poller.call_later(far, lambda: None) for far in (1e10, 1e300)]
    future: Future[None] = Future(poller)
    poller.call_later(0.01, lambda: future._resolve(None))
    future.get(DEADLINE)
    for timer in timers:
        timer.cancel()


def test_an_event_loop_polls_while_it_sleeps(poller: Poller, pipe: Pipe) -> None:
    loop = new_loop(poller)

    async def main() -> bytes:
        pipe.theirs.send(b"x")
        return await pipe.future

    assert loop.run_until_complete(main()) == b"x"
    assert pipe.handled_by == threading.get_ident()
    loop.close()


def test_an_event_loop_comes_back_to_what_was_not_read_up(poller: Poller) -> None:
    loop = new_loop(poller)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    read: list[bytes] = []

    async def main() -> None:
        whole = loop.create_future()

        def one_byte() -> None:
            read.append(ours.recv(1))
            if len(read) == 3:
                whole.set_result(None)

        loop.add_reader(ours, one_byte)
        theirs.send(b"abc")
        await asyncio.wait_for(whole, 5)
        loop.remove_reader(ours)

    loop.run_until_complete(main())
    assert read == [b"a", b"b", b"c"]
    loop.close()
    ours.close()
    theirs.close()


def test_an_event_loop_wakes_up_while_another_thread_polls(poller: Poller) -> None:
    loop = new_loop(poller)
    leading, never = threading.Event(), Future[None](poller)
    poller.call_later(0, leading.set)
    other = threading.Thread(target=lambda: never.get(10))
    other.start()
    assert leading.wait(DEADLINE)

    async def main() -> str:
        return await asyncio.wait_for(loop.run_in_executor(None, lambda: "done"), 5)

    assert loop.run_until_complete(main()) == "done"
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    never._resolve(None)
    other.join(DEADLINE)


def test_what_can_wait_is_said_before_the_leader_sleeps(poller: Poller, pipe: Pipe) -> None:
    said: list[tuple[str, str]] = []
    poller.on_late = lambda peer, message: said.append((peer, message))
    poller.say_late("a", "first")
    poller.call_later(0.01, lambda: pipe.theirs.sendall(b"x"))
    pipe.future.get(DEADLINE)
    assert said == [("a", "first")]


def test_what_can_wait_wakes_a_leader_that_sleeps(poller: Poller) -> None:
    said: Future[str] = Future(poller)
    poller.on_late = lambda _peer, message: said._resolve(message)
    asleep = threading.Event()
    poller.call_later(0.01, asleep.set)

    def say() -> None:
        assert asleep.wait(DEADLINE)
        poller.say_late("a", "now")

    thread = threading.Thread(target=say)
    thread.start()
    assert said.get(DEADLINE) == "now"
    thread.join(DEADLINE)


def test_what_waits_for_one_peer_is_not_given_to_another(poller: Poller) -> None:
    for peer, message in (("a", 1), ("b", 2), ("a", 3)):
        poller.late.append((peer, message))
    assert poller.late_for("a") == [1, 3]
    assert list(poller.late) == [("b", 2)]


def test_gathered_futures(poller: Poller) -> None:
    parts: list[Future[int]] = [Future(poller) for _ in range(3)]
    whole = gathered(poller, parts)
    for k in (2, 0, 1):
        assert not whole.done()
        parts[k]._resolve(k)
    assert whole.get() == [0, 1, 2]
    failing: list[Future[int]] = [Future(poller), Future(poller)]
    broken = gathered(poller, failing)
    failing[1]._reject(ValueError("one"))
    with pytest.raises(ValueError, match="one"):
        broken.get()
    assert gathered(poller, []).get() == []


def test_an_answer_that_comes_while_a_wait_gives_up_is_kept_apart_from_its_timeout(poller: Poller) -> None:
    class Late(Future[str]):
        """Its answer comes between the end of the wait and the exception of that."""

        def _waiting(self) -> str:
            self._resolve("late")
            return ""

    future = Late(poller, "late")
    with pytest.raises(TimeoutError):
        future.exception(0)
    assert future.exception() is None and future.get() == "late"


def test_an_event_loop_that_became_ready_before_it_has_the_lead_does_not_sleep() -> None:
    class Loop:
        ready = True

    poller = Poller()
    try:
        polls = threading.Thread(target=poller.lead_once, args=(-1, Loop()))
        polls.start()
        polls.join(patience(20))
        assert not polls.is_alive()
    finally:
        poller.wake()
        poller.close()


def test_calls_of_an_event_loop_get_through_whoever_leads() -> None:
    """The background thread and the loop take the lead from each other; no wake-up of the loop is lost."""
    poller = Poller()
    poller.start_background()
    loop = new_loop(poller)
    turns = threading.Thread(target=loop.run_forever)
    turns.start()
    try:
        for turn in range(3000):
            here = threading.Event()
            loop.call_soon_threadsafe(here.set)
            assert here.wait(patience(20)), turn
            if turn % 3 == 0:  # the background thread takes the lead meanwhile
                poller.wake()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        turns.join(patience(20))
        loop.close()
        poller.close()
