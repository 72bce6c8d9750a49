"""Find the executor of a stream from functions that run on its thread: ``here``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch

from monarch_kernel.runtime.tensor.wire import FailedValue, OperationFailed

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.rank.values import RankStore


# The device of a rank: its GPU if it has one, otherwise the CPU.


@cache
def of_rank() -> torch.device:
    """Return ``cuda:LOCAL_RANK`` (modulo the number of visible devices), or ``cpu``."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Operations bypass torch's Python binding, which would initialise CUDA. Without this, an earlier seed would stay
    # pending and have no effect.
    torch.cuda.init()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local % torch.cuda.device_count())


@cache
def keep_device(is_function_of_ranks: Callable[[], bool]) -> None:
    """Make functions of the ranks fail with an explanation if they select a device other than their rank's.

    Operations name the rank's device, but the function would create tensors on another. Other threads are not
    restricted.
    """
    plain = torch.cuda.set_device

    @wraps(plain)
    def set_device(device: Any) -> None:
        if is_function_of_ranks():
            mine = of_rank()
            wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            if mine.type != "cuda" or wanted.index not in (None, mine.index):
                raise ValueError(
                    f"torch.cuda.set_device({device}) in a function of the ranks: this rank computes on {mine}, and on "
                    "nothing else. Leave the call away; which devices a process sees is said when it is spawned "
                    "(CUDA_VISIBLE_DEVICES in its environment)"
                )
        plain(device)

    torch.cuda.set_device = set_device


class StreamState:
    """What functions of the ranks may use of the executor that runs them: `tensor_executor.TensorExecutor`.

    Attributes:
        engine, stream: the keys of the tensor engine and of the stream.
        rank: this rank in the engine's world.
        store: the values of the engine on this rank.
        standing_in: the failure for which zeros take part in a collective; None outside of such a collective.
        at: the running record.
        unseen: the first failure that no check has raised yet.
    """

    def __init__(self, engine: str, stream: str, rank: int, store: RankStore) -> None:
        self.engine = engine
        self.stream = stream
        self.rank = rank
        self.store = store
        self.standing_in: FailedValue | None = None
        self.at = 0
        self.unseen: FailedValue | None = None

    def value(self, number: int) -> Any:
        """Return a value of this rank.

        Raises:
            OperationFailed: the value is a failure. This reports it, so that later checks do not.
        """
        value = self.store.values[number]
        if isinstance(value, FailedValue):
            if self.unseen is not None and self.unseen.record == value.record:
                self.unseen = None
            raise OperationFailed(value)
        return value


# Each stream's executor has a separate thread.
_local = threading.local()


def here() -> StreamState:
    """Return the executor that runs the current operation."""
    worker = getattr(_local, "worker", None)
    if worker is None:
        raise RuntimeError("no tensor worker runs on this thread: this function is for the ranks of a mesh")
    return worker


def runs_one() -> bool:
    """Return whether an executor runs on this thread."""
    return getattr(_local, "worker", None) is not None


def runs_here(worker: StreamState) -> None:
    """Record the executor of this thread."""
    _local.worker = worker
