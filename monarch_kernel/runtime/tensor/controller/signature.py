"""An operation with all its fixed properties: `Signature`. Its first use determines the results.

This module also has the names of operations, the inputs that they write, and values that the controller knows without a
query (`follow`).
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.spec import Spec
from monarch_kernel.runtime.tensor.rank.program import written
from monarch_kernel.runtime.tensor.wire import FloatSlot, TensorSlot

# Count the costs of a program's lines beyond their operations: `Plan`.


@dataclass(slots=True)
class LineCost:
    """The costs of one line of the program.

    Attributes:
        synchronisations: how often the controller waited for a value, by cause.
        redistributions: how often the layout of a sharded tensor changed, by old and new layout.
        fallbacks: operations without a rule for their layout, which ran on the whole tensor, by name.
        sent: bytes of data from the controller to ranks.
        fetched: bytes of data from ranks to the controller.
        moved: bytes exchanged between ranks.
    """

    synchronisations: dict[str, int] = field(default_factory=dict[str, int])
    redistributions: dict[str, int] = field(default_factory=dict[str, int])
    fallbacks: dict[str, int] = field(default_factory=dict[str, int])
    sent: int = 0
    fetched: int = 0
    moved: int = 0


class Plan:
    """Costs by line of the program: ``(file, line, function)``.

    Attributes:
        lines: the costs.
        since: the number of the first record that counts.
    """

    def __init__(self) -> None:
        self.lines: dict[tuple[str, int, str], LineCost] = {}
        self.since = 0

    def line(self, place: tuple[str, int, str] | None = None) -> LineCost:
        """Return the costs of a line; by default the current user line."""
        place = frames.here() if place is None else place
        cost = self.lines.get(place)
        if cost is None:
            cost = self.lines[place] = LineCost()
        return cost

    def synchronised(self, why: str) -> None:
        """Count a wait of the controller for the ranks."""
        cost = self.line()
        cost.synchronisations[why] = cost.synchronisations.get(why, 0) + 1

    def clear(self) -> None:
        """Delete all counts."""
        self.lines.clear()


class Signature:
    """The data with which the controller issues an operation again after one lookup.

    Attributes:
        number: the number of its definition on the ranks; ANSWERED if no rank is needed; COMPOSED if it consists of
            other operations.
        spec: the spec of its result, if that is a single new tensor.
        outs: otherwise, for each result: a spec if it is new, the position of the input that it is, or None.
        tree: the structure of `outs`; None for a single result.
        shared: the position of the input of which the result is another handle (detach), or None.
        answer: the result that needs no rank, or the function that issues other operations; for a function of the ranks
            with a nested result, the form of that result.
        label: the operation's name.
        template: ``(args, kwargs)`` with slots.
        inputs, floats: the numbers of inputs and floats.
        mutates: positions of the inputs that it writes.
        views: for each result, the position of the input whose memory it has, or -1; empty if there are none.
        follows: whether it may change values that are known here (see `constants`).
        draws: whether it draws random numbers.
    """

    __slots__ = (
        "answer",
        "draws",
        "floats",
        "follows",
        "inputs",
        "label",
        "mutates",
        "number",
        "outs",
        "shared",
        "spec",
        "template",
        "tree",
        "views",
    )

    number: int
    spec: Spec | None
    outs: list[Spec | int | None] | None
    tree: Any
    shared: int | None
    answer: Any
    label: str
    template: Any
    inputs: int
    floats: int
    mutates: tuple[int, ...]
    views: tuple[int, ...]
    follows: bool
    draws: bool


#: Numbers of signatures without a definition on the ranks.
ANSWERED = -1
COMPOSED = -2


_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


def operation_name(func: object) -> str:
    """Return the name of an operation, like ``aten::add.Tensor``.

    Raises:
        TypeError: it is not an operation of torch that ranks can look up.
    """
    if not isinstance(func, torch._ops.OpOverload):  # pyright: ignore[reportPrivateUsage]  # no public name
        raise TypeError(f"{func} is not an operation that can run on ranks: use remote() for a function of your own")
    return f"{func._schema.name}.{func._overloadname or 'default'}"


def mutated(func: object, args: Any, kwargs: Any, ins: list[Tensor]) -> tuple[int, ...]:
    """Return the positions of the inputs that the operation writes, according to its schema."""
    return tuple(i for x in written(func, args, kwargs) for i, a in enumerate(ins) if a is x)


@contextmanager
def quiet() -> Generator[None]:
    """Silence the log of FakeTensor in this block. Its exceptions still reach the program."""
    before, _fake_log.disabled = _fake_log.disabled, True
    try:
        yield
    finally:
        _fake_log.disabled = before


#: Operations on known numbers whose results are also known.
FOLLOWED = frozenset(
    {
        "aten::add_.Tensor",
        "aten::add_.Scalar",
        "aten::add.Tensor",
        "aten::sub.Tensor",
        "aten::mul.Tensor",
        "aten::mul_.Tensor",
        "aten::clone.default",
        "aten::_to_copy.default",
    }
)


def follow(operation: Any, signature: Signature, ins: list[Tensor], floats: list[float], result: object) -> None:
    """Compute the results of an operation on known numbers here; forget values that are overwritten with unknown ones.

    Examples are the step counters of optimizers: an optimizer reads its step at every parameter, and each read would
    cost a round trip.
    """
    if signature.label in FOLLOWED and all(a._constant is not None for a in ins):
        tensors, numbers = iter(ins), iter(floats)

        def fill(slot: object) -> object:
            if type(slot) is TensorSlot:
                return next(tensors)._constant
            return next(numbers) if type(slot) is FloatSlot else slot

        args, kwargs = tree_map(fill, signature.template)
        with _disable_current_modes(), torch.no_grad():
            out = operation(*args, **kwargs)
        if type(result) is Tensor:
            result._constant = out
        return
    for position in signature.mutates:
        ins[position]._constant = None
