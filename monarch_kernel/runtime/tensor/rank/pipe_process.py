"""The process of a pipe, beside a rank: it runs the generator, ahead of the rank by so many values as it may be.

It ends with the rank: when the connection to it ends, or the rank itself does.
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

#: How long the generator may take to end when the rank has gone (seconds).
GRACE = 2.0
_PR_SET_PDEATHSIG = 1


class ProcessPipe:
    """What the generator gets: the pipe to the program.

    Attributes:
        ranks: the coordinates of the rank beside which this process is, by dimension of the mesh.
        sizes: the sizes of those dimensions.
    """

    def __init__(self, ranks: dict[str, int], sizes: dict[str, int], max_messages: int) -> None:
        self.ranks = ranks
        self.sizes = sizes
        self._out: queue.Queue[list[Any] | None] = queue.Queue(max(1, max_messages))
        self._in: queue.SimpleQueue[tuple[int, bytearray, tuple[int, ...]]] = queue.SimpleQueue()

    def send(self, obj: Any) -> None:
        """Give a value to the program: what its next `recv` is. Waits while `max_messages` were not taken."""
        self._out.put(packed(VALUE, obj))

    def recv(self) -> Any:
        """The next value that the program has sent; waits for it.

        Raises:
            RuntimeError: what it has sent could not be computed.
        """
        kind, body, buffers = self._in.get()
        value = loads(body, buffers)  # here, and not as it comes: what it imports must not be imported on two threads
        if kind == LOST:
            raise RuntimeError(f"what the program sent could not be computed:\n{value}")
        return value


def main(fd: int, parent: int) -> None:
    """Run the generator that the first message names, and end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    atexit.register(_end_children)  # it runs last: what the generator's libraries end by themselves is gone then
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a press concerns the program, which decides
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
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending


def _end(*_: Any) -> None:
    """The rank has gone: unwind, once."""
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
        except PipeClosed:  # the other thread sees it, too
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
    """End what the generator has started and left."""
    import psutil  # takes 20 ms to import, which nothing waits for here

    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            each.kill()
