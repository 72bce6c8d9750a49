"""Looking at the frames of other threads allocates nothing in them: Python 3.11 may collect garbage at that moment."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

import pytest

from monarch_kernel.thread_frames import current_frames, raise_in_thread
from tests.waiting import patience


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
