"""The process of a pipe, beside a rank. It runs the generator ahead of the rank, up to a maximum number of values.

It ends when the rank or the connection to the rank ends.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import inspect
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any

from monarch_kernel.protocol.serialize import loads
from monarch_kernel.runtime.tensor.rank.pipe_messages import (
    END,
    FAILED,
    LOST,
    VALUE,
    PipeClosed,
    packed,
    receive,
    send,
)

#: The time for the generator to end after its rank has ended (seconds).
GRACE = 2.0
_PR_SET_PDEATHSIG = 1


class ProcessPipe:
    """The generator's pipe to the program.

    Attributes:
        ranks: the coordinates of this process's rank, by dimension of the mesh.
        sizes: the sizes of those dimensions.
    """

    def __init__(self, ranks: dict[str, int], sizes: dict[str, int], max_messages: int) -> None:
        self.ranks = ranks
        self.sizes = sizes
        self._out: queue.Queue[list[object] | None] = queue.Queue(max(1, max_messages))
        self._in: queue.SimpleQueue[tuple[int, bytearray, tuple[int, ...]]] = queue.SimpleQueue()

    def send(self, obj: object) -> None:
        """Send a value to the program's `recv`. Blocks while `max_messages` values are pending."""
        self._out.put(packed(VALUE, obj))

    def recv(self) -> Any:
        """Wait for the next value that the program has sent.

        Raises:
            RuntimeError: the value could not be computed.
        """
        kind, body, buffers = self._in.get()
        value = loads(body, buffers)  # here instead of on arrival: the imports of a value must not run on two threads
        if kind == LOST:
            raise RuntimeError(f"what the program sent could not be computed:\n{value}")
        return value


def main(fd: int, parent: int) -> None:
    """Run the generator that the first message names, and end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    atexit.register(_end_children)  # runs last: the generator's libraries have ended their own children by then
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt concerns the program, which decides
    link = socket.socket(fileno=fd)
    try:
        begin = loads(*receive(link)[1:])
    except PipeClosed:
        return
    pipe = ProcessPipe(begin["ranks"], begin["sizes"], begin["max_messages"])
    sender = threading.Thread(target=_send_all, args=(link, pipe), name="monarch-pipe-send", daemon=True)
    sender.start()
    threading.Thread(target=_take_all, args=(link, pipe), name="monarch-pipe-take", daemon=True).start()
    try:
        _run(begin, pipe)
        last = packed(END)
    except Exception as e:
        last = packed(FAILED, "".join(traceback.format_exception(e)))
    pipe._out.put(last)
    pipe._out.put(None)
    sender.join()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process is ending


def _end(*_: object) -> None:
    """Unwind once, after the rank has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _run(begin: dict[str, Any], pipe: ProcessPipe) -> None:
    function = begin["function"]
    if isinstance(function, str):
        module, _, name = function.rpartition(".")
        function = getattr(importlib.import_module(module), name)
    elif isinstance(function, bytes):
        import cloudpickle

        function = cloudpickle.loads(function)
    args, kwargs = begin["arguments"]
    result = function(pipe, *args, **kwargs)
    if inspect.isgenerator(result):
        for value in result:
            pipe.send(value)


def _send_all(link: socket.socket, pipe: ProcessPipe) -> None:
    while (message := pipe._out.get()) is not None:
        try:
            send(link, message)
        except PipeClosed:  # the other thread detects it too
            return


def _take_all(link: socket.socket, pipe: ProcessPipe) -> None:
    try:
        while True:
            pipe._in.put(receive(link))
    except PipeClosed:
        os.kill(os.getpid(), signal.SIGTERM)  # the main thread unwinds
        time.sleep(GRACE)
        _end_children()
        os._exit(1)


def _end_children() -> None:
    """End child processes that the generator has left."""
    import psutil  # the import takes 20 ms, and nothing waits for it here

    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            each.kill()
