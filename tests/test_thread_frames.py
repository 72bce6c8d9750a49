"""Looking at the frames of other threads allocates nothing in them: Python 3.11 may collect garbage at that moment."""

from __future__ import annotations

import gc
import threading
from types import FrameType

from monarch_kernel.thread_frames import current_frames
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
