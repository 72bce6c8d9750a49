"""Frames of other threads, and exceptions that are raised in them."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, SimpleNamespace

import pytest

from monarch_kernel.thread_frames import LockGuard, current_frames, raise_in_thread
from tests.waiting import patience, wait_until


def test_outer_frames_of_other_threads_are_made_before_anybody_reads_them() -> None:
    there, over = threading.Event(), threading.Event()

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            there.set()
            over.wait()

    thread = threading.Thread(target=deep, args=(50,))
    thread.start()
    try:
        assert there.wait(patience(10)) and thread.ident is not None
        innermost = current_frames()[thread.ident]
        gc.disable()
        before = gc.get_count()[0]
        levels = 0
        frame: FrameType | None = innermost
        while frame is not None:
            levels += frame.f_code is deep.__code__
            frame = frame.f_back
        made = gc.get_count()[0] - before
        assert levels == 51 and made < 10
    finally:
        gc.enable()
        over.set()
        thread.join()


@pytest.mark.parametrize("withdrawn", [False, True])
def test_an_exception_for_a_thread_in_c_stops_no_traced_thread(withdrawn: bool) -> None:
    """Python 3.11 kept them at the beginning of the next function for ever."""
    reader, writer = os.pipe()
    arrived: list[type[BaseException]] = []
    called = threading.Event()
    end = False

    def waiting() -> None:
        try:
            os.read(reader, 1)  # in C
            for _ in range(1000):
                pass
        except ArithmeticError as error:
            arrived.append(type(error))

    def called_function() -> None:
        called.set()

    def traced() -> None:
        sys.settrace(lambda *_: None)
        while not end:
            called_function()

    threads = [threading.Thread(target=waiting, daemon=True), threading.Thread(target=traced, daemon=True)]
    for thread in threads:
        thread.start()
    try:
        assert called.wait(patience(10)) and threads[0].ident is not None
        raise_in_thread(threads[0].ident, ArithmeticError)
        if withdrawn:
            raise_in_thread(threads[0].ident, None)
        called.clear()
        assert called.wait(patience(10))
        os.write(writer, b"x")
        threads[0].join(patience(10))
        assert arrived == ([] if withdrawn else [ArithmeticError])
    finally:
        end = True
        threads[1].join(patience(10))
        os.close(reader)
        os.close(writer)


def test_an_exception_waits_until_a_lock_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LockGuard, "TIMES", 10**6)  # however slow the machine
    gate, left = threading.Lock(), threading.Event()
    # Its `__enter__` is written in C, as that of a real lock.
    lock = SimpleNamespace(acquire=None, release=None, __enter__=gate.acquire, __exit__=lambda *_: left.set())
    gate.acquire()

    def take() -> None:
        with suppress(ArithmeticError), threading.Condition(lock):  # type: ignore[arg-type]
            while True:
                pass

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    wait_until(lambda: _is_in(taker, threading.Condition.__enter__), "it takes the lock")
    raiser = threading.Thread(target=raise_in_thread, args=(taker.ident, ArithmeticError))
    raiser.start()
    wait_until(lambda: not raiser.is_alive() or _is_in(raiser, raise_in_thread), "the exception waits")
    gate.release()
    raiser.join(patience(10))
    taker.join(patience(10))
    assert left.is_set()


def _is_in(thread: threading.Thread, function: Callable[..., object]) -> bool:
    frame = current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None
