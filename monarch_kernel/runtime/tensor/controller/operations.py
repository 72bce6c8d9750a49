"""Operations of torch: what ranks call them, what they write; and FakeTensor without its log."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from monarch_kernel.runtime.tensor.controller.handle import Tensor

_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


def operation_name(func: Any) -> str:
    """``aten::add.Tensor`` of an operation.

    Raises:
        TypeError: it is no operation of torch's that ranks could look up.
    """
    if not isinstance(func, torch._ops.OpOverload):  # pyright: ignore[reportPrivateUsage]  # no public name
        raise TypeError(f"{func} is not an operation that can run on ranks: use remote() for a function of your own")
    return f"{func._schema.name}.{func._overloadname or 'default'}"


def mutated(func: Any, args: Any, kwargs: Any, ins: list[Tensor]) -> tuple[int, ...]:
    """Positions of the inputs that the operation's schema says it writes."""
    if not func._schema.is_mutable:
        return ()
    found: list[int] = []
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[n] if n < len(args) else kwargs.get(argument.name)
            for x in value if isinstance(value, (list, tuple)) else [value]:
                found += [i for i, a in enumerate(ins) if a is x]
    return tuple(found)


@contextmanager
def quiet() -> Generator[None]:
    """FakeTensor logs what it raises: the program gets the error, and that is enough."""
    before, _fake_log.disabled = _fake_log.disabled, True
    try:
        yield
    finally:
        _fake_log.disabled = before
