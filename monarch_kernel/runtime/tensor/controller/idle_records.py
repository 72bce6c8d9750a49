"""`send_what_waits`: the thread that sends records which no others follow."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine

#: Records that wait so long without company are sent (seconds).
IDLE = 0.001
#: The same while a program goes on issuing operations: looking more often would hold it up.
BUSY = 0.004


def send_what_waits(weak: weakref.ref[TensorEngine], wake: threading.Event) -> None:
    """The thread that sends records without company; it sleeps while there are none, and ends with the engine."""
    wait = IDLE
    while True:
        if not wake.wait(10.0):
            engine = weak()
            if engine is None or engine._closed:
                return
            with suppress(Exception):  # the program's next operation or fetch raises it
                engine.send_idle(0)
            del engine
            continue
        engine = weak()
        sent = engine.sent if engine is not None else 0
        del engine
        time.sleep(wait)
        engine = weak()
        if engine is None or engine._closed:
            return
        if engine.sent != sent:  # the program goes on issuing operations: they are company
            wait = BUSY
        else:
            wait = IDLE
            wake.clear()
            if engine.pending:  # looked at after clear(), as a program counts its record before it sets the event
                with suppress(Exception):  # as above
                    engine.send_idle()
        del engine
