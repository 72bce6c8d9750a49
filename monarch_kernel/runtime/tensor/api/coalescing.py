"""``with coalescing():`` sends the operations of a block in few messages."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from monarch_kernel.runtime.tensor.api.activation import active_target, engine_of
from monarch_kernel.runtime.tensor.controller.engine import TensorEngine

#: Records in one message, within a block.
COALESCED = 4096


@contextmanager
def coalescing() -> Generator[None]:
    """Operations in this block go to the ranks in few messages, and all are on their way when it ends.

    Operations are sent together anyway, so this changes little: the controller is through with a long block a little
    sooner, and the ranks begin later. Values can be fetched in it. `compile` sends a function as one operation.
    """
    before = TensorEngine.batch
    TensorEngine.batch = COALESCED
    try:
        yield
    finally:
        TensorEngine.batch = before
        mesh = active_target()[0]
        if mesh is not None and before != COALESCED:
            engine_of(mesh).flush()
