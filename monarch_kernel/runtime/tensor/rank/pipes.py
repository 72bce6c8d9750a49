"""A rank's end of a pipe: `PipeEnd`. It is a value of the rank; when the last handle is deleted, the process ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import cloudpickle
import psutil
import torch
from torch.utils._pytree import tree_flatten, tree_map

from monarch_kernel import programs
from monarch_kernel.protocol.serialize import loads
from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.rank.groups import refuse_failed
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
from monarch_kernel.runtime.tensor.wire import FailedValue, OperationFailed, PipeMesh, PipeYield, TensorSlot

#: The time for a process to end by itself when its pipe is closed, before it is killed (seconds).
GRACE = 3.0


class PipeEnd:
    """The process of a generator and the connection to it. The executor of one stream uses it."""

    def __init__(self, place: PipeMesh, function: str | bytes, arguments: object) -> None:
        self._name = place.name
        self._taken = 0
        self._over: str | None = None  # the reason why nothing more can be received
        self._link, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from monarch_kernel.runtime.tensor.rank.pipe_process import main; "
            f"main({theirs.fileno()!r}, {os.getpid()!r})"
        )
        with theirs:
            self._process = programs.start(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        self._link.setblocking(False)
        begin = {
            "ranks": place.coordinates(here().rank),
            "sizes": dict(zip(place.labels, place.sizes)),
            "max_messages": place.max_messages,
            "function": function,
            "arguments": arguments,
        }
        self._send(VALUE, begin)

    def receive(self) -> Any:
        """Return the next value of the generator.

        Raises:
            RuntimeError: the generator has ended or raised, or its process has died.
        """
        if self._over is None:
            try:
                kind, body, buffers = receive(self._link, self._wait)
            except PipeClosed:
                self._over = self._death()
            else:
                value = loads(body, buffers)
                if kind == VALUE:
                    self._taken += 1
                    return value
                self._over = (
                    f"the generator {self._name} has ended: it gave {self._taken} values"
                    if kind == END
                    else f"the generator {self._name} raised, after {self._taken} values:\n{value}"
                )
                assert kind in (END, FAILED), kind
        raise RuntimeError(self._over)

    def send(self, value: object) -> None:
        """Send a value to the generator. A failure is raised by the generator's `recv`.

        Raises:
            RuntimeError: the generator's process has ended.
        """
        if isinstance(value, FailedValue):
            self._send(LOST, value.text)
        else:
            self._send(VALUE, value)

    def _send(self, kind: int, value: object) -> None:
        try:
            send(self._link, packed(kind, value), self._wait)
        except PipeClosed:
            raise RuntimeError(self._over or self._death()) from None

    def _wait(self, write: bool) -> None:
        """Wait until the connection is ready or the process has died. Data sent before its death is available."""
        self._poll.register(self._link, select.POLLOUT if write else select.POLLIN)
        ready = dict(self._poll.poll())
        if self._link.fileno() not in ready:
            raise PipeClosed

    def _death(self) -> str:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has exited with code {code}"
        return f"the process of the generator {self._name} (pid {self._process.pid}) {how}, after {self._taken} values"

    def close(self) -> None:
        """End the process. It ends by itself when it detects the end of the connection; otherwise it is killed."""
        if self._link.fileno() < 0:
            return
        self._link.close()
        os.close(self._pidfd)
        if self._process.poll() is None:
            threading.Thread(target=_reap, args=(self._process,), name="monarch-pipe-reap", daemon=True).start()

    def __del__(self) -> None:
        if hasattr(self, "_pidfd"):
            self.close()


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE)
        return
    except subprocess.TimeoutExpired:
        pass
    with suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


# -- what the controller calls ----------------------------------------------------------------------


def opened(payload: torch.Tensor, *values: object) -> PipeEnd:
    """Start the generator's process."""
    refuse_failed(payload, *values)
    place, function, template = _unpacked(payload)
    return PipeEnd(place, function, _filled(template, values))


def sent(end: Any, payload: torch.Tensor, *values: Any) -> None:
    """Send a value to the generator."""
    refuse_failed(end, payload)
    failed = next((v for v in values if isinstance(v, FailedValue)), None)
    if failed is not None:
        end.send(failed)
        raise OperationFailed(failed)
    end.send(_filled(_unpacked(payload), values))


def received(end: Any, like: PipeYield) -> list[torch.Tensor]:
    """Return the tensors of the generator's next value, which must match the shape function."""
    refuse_failed(end)
    leaves, tree = tree_flatten(end.receive())
    if repr(tree) != like.tree:
        raise TypeError(f"the generator {end._name} gave {tree}, and its shape function {like.tree}")
    tensors: list[torch.Tensor] = []
    for leaf, kind in zip(leaves, like.leaves, strict=True):
        if kind is None:
            continue
        if not isinstance(leaf, torch.Tensor) or (tuple(leaf.shape), leaf.dtype) != kind:
            given = f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise TypeError(
                f"the generator {end._name} gave {given}, and its shape function says {list(kind[0])} {kind[1]}: they "
                "must agree, as the program goes by the shape function"
            )
        tensors.append(leaf.detach().to(current_executor.of_rank()))
    return tensors


def closed(end: object) -> None:
    """End the generator's process."""
    if isinstance(end, PipeEnd):
        end.close()


def _unpacked(payload: torch.Tensor) -> Any:
    return cloudpickle.loads(payload.cpu().numpy().tobytes())


def _filled(template: Any, values: tuple[Any, ...]) -> object:
    return tree_map(lambda x: values[x.index].cpu() if type(x) is TensorSlot else x, template)
