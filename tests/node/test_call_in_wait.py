"""What runs in the main thread while it waits: in time, whole, and without costing the wait anything."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.poller import Poller


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()


def test_an_errand_runs_in_the_main_thread_and_the_wait_goes_on(poller: Poller) -> None:
    future: Future[int] = Future(poller, "a value")
    threads: list[threading.Thread] = []

    def errand() -> None:
        threads.append(threading.current_thread())
        threading.Timer(0.05, future._resolve, (7,)).start()

    threading.Timer(0.05, poller.call_in_wait, (errand,)).start()
    assert future.get(timeout=20) == 7
    assert threads == [threading.main_thread()]


def test_an_errand_that_comes_before_the_wait_is_not_lost(poller: Poller) -> None:
    future: Future[int] = Future(poller, "a value")
    poller.call_in_wait(lambda: future._resolve(1))
    assert future.get(timeout=20) == 1


def test_an_errand_may_wait_itself(poller: Poller) -> None:
    outer: Future[int] = Future(poller, "outer")
    inner: Future[int] = Future(poller, "inner")

    def errand() -> None:
        threading.Timer(0.05, inner._resolve, (3,)).start()
        outer._resolve(inner.get(timeout=20) + 1)

    threading.Timer(0.05, poller.call_in_wait, (errand,)).start()
    assert outer.get(timeout=20) == 4


def test_its_time_does_not_count(poller: Poller) -> None:
    future: Future[int] = Future(poller, "a value")

    def errand() -> None:
        time.sleep(0.6)  # longer than the wait may take: what is tested is that this is no part of it
        threading.Timer(0.05, future._resolve, (5,)).start()

    poller.call_in_wait(errand)
    assert future.get(timeout=0.5) == 5


def test_what_it_raises_ends_the_wait_and_the_value_can_still_be_had(poller: Poller) -> None:
    future: Future[int] = Future(poller, "a value")

    def errand() -> None:
        raise LookupError("enough")

    threading.Timer(0.05, poller.call_in_wait, (errand,)).start()
    with pytest.raises(LookupError, match="enough"):
        future.get(timeout=20)
    future._resolve(2)
    assert future.get(timeout=20) == 2


def test_an_interrupt_meanwhile_is_not_lost(poller: Poller) -> None:
    future: Future[int] = Future(poller, "a value")
    ran: list[int] = []

    def both() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        poller.call_in_wait(lambda: ran.append(1))

    threading.Timer(0.05, both).start()
    with pytest.raises(KeyboardInterrupt):
        future.get(timeout=20)
    # If the interrupt came first, the errand runs in the next wait.
    poller.call_in_wait(lambda: future._resolve(2))
    assert future.get(timeout=20) == 2
