"""Order calls of actors in a stream: lend them values, wait for their end and take their results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.rank.objects import ResultLike, description, detached
from monarch_kernel.runtime.tensor.rank.values import EndedCall, awaited_end, awaited_store, end_call
from monarch_kernel.runtime.tensor.wire import FailedValue, OperationFailed

Tensors = Sequence[tuple[str, int]]


def keep_result(tensors: Tensors, result: object) -> None:
    """Store the result of an endpoint that has ended. Its actor calls this."""
    engine, token = tensors[-1]
    end_call(engine, token, EndedCall(detached(result)))


def call_ended(tensors: Tensors, error: BaseException | str | None = None) -> None:
    """Note that an endpoint has ended, or will never run. Its process calls this."""
    for engine, token in tensors:
        end_call(engine, token, EndedCall(error=error))


class WaitForCall:
    """The operation that waits for the end of a call, on the called ranks."""

    def __init__(self, label: str, ranks: tuple[int, ...]) -> None:
        self.__name__ = label
        self._ranks = ranks

    def __call__(self, token: float) -> None:
        worker = here()
        if worker.rank in self._ranks:
            awaited_end(worker.engine, int(token))


class TakeResult:
    """The operation that returns the values of an endpoint's result that stay here.

    Args:
        label: the name of the endpoint.
        like: the expected form of the result.
        key: the key of the sharded mesh of the tensors; None for plain tensors.
    """

    def __init__(self, label: str, like: ResultLike, key: object) -> None:
        self.__name__ = label
        self._like = like
        self._key = key

    def __call__(self, token: float) -> list[object]:
        label = self.__name__
        taken = self._like.taken(label, _result(label, awaited_end(here().engine, int(token))))
        return [self._of_stream(x) if isinstance(x, torch.Tensor) else x for x in taken]

    def _of_stream(self, value: torch.Tensor) -> torch.Tensor:
        """Convert a tensor of an actor for operations of the stream: a DTensor of a sharded mesh, or a plain tensor."""
        if (type(value) is torch.Tensor) != (self._key is None):
            raise TypeError(
                f"{self.__name__} gave a {type(value).__name__}: a reference to a tensor in parts is to a DTensor, and "
                "asked for where its arguments say the mesh; one to a tensor of each rank, under mesh.activate()"
            )
        if self._key is None:
            return value
        from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of

        return rules_of(here().store.extras).from_actors(value, self._key)


def described(label: str, token: int) -> object:
    """Return the result of an endpoint with descriptions in place of tensors. The result stays available."""
    return description(_result(label, awaited_end(here().engine, token, keep=True)))


def _result(label: str, ended: EndedCall) -> object:
    if isinstance(ended.error, str):
        raise RuntimeError(f"{label} did not run: {ended.error}")
    if ended.error is not None:
        raise ended.error
    return ended.result


def lent_value(engine: str, token: int, index: int, requires_grad: bool | None = None) -> object:
    """Return one of the values of a call, when the stream has reached it. Taking the last value ends the loan.

    Args:
        requires_grad: the flag of a parameter; None for values that are not parameters.

    Raises:
        OperationFailed: the value is a failure.
        RuntimeError: the engine has ended here, or this call's values were dropped because of too many later calls.
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
