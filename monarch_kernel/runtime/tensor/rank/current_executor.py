"""``here``: the worker of a stream, for functions that run on its thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.rank.tensor_executor import TensorExecutor

# A stream's worker has a thread of its own.
_local = threading.local()


def here() -> TensorExecutor:
    """The worker that runs the current operation, for functions of the ranks."""
    worker = getattr(_local, "worker", None)
    if worker is None:
        raise RuntimeError("no tensor worker runs on this thread: this function is for the ranks of a mesh")
    return worker


def runs_one() -> bool:
    """Whether a worker has this thread."""
    return getattr(_local, "worker", None) is not None


def runs_here(worker: TensorExecutor) -> None:
    """Note that a worker has this thread."""
    _local.worker = worker
