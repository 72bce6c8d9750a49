"""Calls of actors in the order of a stream: it goes on when the endpoint has ended, and takes what that gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map

from monarch_kernel.runtime.tensor.rank.values import EndedCall, awaited_end, end_call
from monarch_kernel.runtime.tensor.rank.worker import here

Tensors = Sequence[tuple[str, int]]


class TensorLike(NamedTuple):
    """Size, stride and dtype of a tensor on a rank."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def keep_result(tensors: Tensors, result: Any) -> None:
    """An endpoint has ended whose result stays here; called by its actor."""
    engine, token = tensors[-1]
    kept = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, result)
    end_call(engine, token, EndedCall(kept))


def call_ended(tensors: Tensors, error: BaseException | str | None = None) -> None:
    """An endpoint has ended, or will never run; called by its process."""
    for engine, token in tensors:
        end_call(engine, token, EndedCall(error=error))


class WaitForCall:
    """The operation that waits for the end of a call on the ranks that were called."""

    def __init__(self, label: str, ranks: tuple[int, ...]) -> None:
        self.__name__ = label
        self._ranks = ranks

    def __call__(self, token: float) -> None:
        worker = here()
        if worker.rank in self._ranks:
            awaited_end(worker.engine, int(token))


class TakeResult:
    """The operation that gives what an endpoint did: the tensors among it.

    Args:
        label: what the endpoint is called.
        expected: what it should give, by position.
        count: how many values it should give, others included.
        key: of the sharded mesh that they are on; None for plain tensors.
    """

    def __init__(self, label: str, expected: tuple[tuple[int, TensorLike], ...], count: int, key: Any) -> None:
        self.__name__ = label
        self._expected = expected
        self._count = count
        self._key = key

    def __call__(self, token: float) -> list[Any]:
        leaves = tree_flatten(_result(self.__name__, awaited_end(here().engine, int(token))))[0]
        if not self._expected:
            return []
        if len(leaves) != self._count:
            raise TypeError(f"{self.__name__} gave {len(leaves)} values, where its propagate says {self._count}")
        taken: list[Any] = []
        for position, (size, _, dtype) in self._expected:
            value = leaves[position]
            if not isinstance(value, torch.Tensor) or (tuple(value.shape), value.dtype) != (size, dtype):
                what = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
                raise TypeError(f"{self.__name__} gave {what}, where its propagate says {dtype} {list(size)}")
            taken.append(self._of_stream(value))
        return taken

    def _of_stream(self, value: torch.Tensor) -> torch.Tensor:
        """What an actor gave, for operations of the stream: a DTensor of a sharded mesh, or a plain tensor."""
        if (type(value) is torch.Tensor) != (self._key is None):
            raise TypeError(
                f"{self.__name__} gave a {type(value).__name__}: a reference to a tensor in parts is to a DTensor, and "
                "asked for where its arguments say the mesh; one to a tensor of each rank, under mesh.activate()"
            )
        if self._key is None:
            return value
        from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of

        return rules_of(here().store.extras).from_actors(value, self._key)


def described(label: str, token: int) -> Any:
    """What an endpoint gave, with descriptions in the places of tensors; it can still be taken."""
    return description(_result(label, awaited_end(here().engine, token, keep=True)))


def description(result: Any) -> Any:
    """A result with descriptions in the places of tensors."""
    return tree_map(
        lambda x: TensorLike(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x, result
    )


def _result(label: str, ended: EndedCall) -> Any:
    if isinstance(ended.error, str):
        raise RuntimeError(f"{label} did not run: {ended.error}")
    if ended.error is not None:
        raise ended.error
    return ended.result
