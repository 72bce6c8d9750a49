"""Find the executor of a stream from functions that run on its thread: ``here``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.rank.tensor_executor import TensorExecutor

# Each stream's executor has a separate thread.
_local = threading.local()


def here() -> TensorExecutor:
    """Return the executor that runs the current operation."""
    worker = getattr(_local, "worker", None)
    if worker is None:
        raise RuntimeError("no tensor worker runs on this thread: this function is for the ranks of a mesh")
    return worker


def runs_one() -> bool:
    """Return whether an executor runs on this thread."""
    return getattr(_local, "worker", None) is not None


def runs_here(worker: TensorExecutor) -> None:
    """Record the executor of this thread."""
    _local.worker = worker
