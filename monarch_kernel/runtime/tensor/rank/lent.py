"""Values of this rank for its actors: arguments of endpoints that are tensors of the controller."""

from __future__ import annotations

from typing import Any

import torch

from monarch_kernel.runtime.tensor.rank.values import awaited_store
from monarch_kernel.runtime.tensor.wire.failures import FailedValue, OperationFailed


def lent_value(engine: str, token: int, index: int, requires_grad: bool | None = None) -> Any:
    """One of the values of a call, when the stream has come to it. The last that is taken ends the loan.

    Args:
        requires_grad: of a parameter, whether it does; None for what is none.

    Raises:
        OperationFailed: there is a failure in its place.
        RuntimeError: the engine has ended here, or so many calls came later that this one's values were let go of.
    """
    store = awaited_store(engine)
    with store.changed:
        store.changed.wait_for(lambda: token in store.lent or store.closed or token <= store.let_go)
        if token not in store.lent:
            raise RuntimeError("the tensors of this call are gone: their mesh was stopped, or too many calls wait")
        values = store.lent[token]
        value = values.pop(index)
        if not values or isinstance(value, FailedValue):
            del store.lent[token]
    if isinstance(value, FailedValue):
        raise OperationFailed(value)
    return value if requires_grad is None else torch.nn.Parameter(value, requires_grad)
