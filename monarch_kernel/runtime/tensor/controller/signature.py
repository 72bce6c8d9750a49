"""`Signature`: one operation with all that is fixed about it. Its first use finds out what comes out of it."""

from __future__ import annotations

from typing import Any

from monarch_kernel.runtime.tensor.controller.spec import Spec


class Signature:
    """What the controller must know to issue an operation again with one lookup.

    Attributes:
        number: of its definition on the ranks; ANSWERED where none need be asked; COMPOSED where it is made of others.
        spec: of its result, if that is a single new tensor.
        outs: else for each result: a spec if it is new, the position of an input that it is, or None.
        tree: how `outs` are nested; None if there is one.
        shared: the position of the input of which the result is another handle (detach), or None.
        answer: the result that needs no rank, or the function that issues other operations; of a function of the ranks
            whose result is nested, what that looks like.
        label: the operation's name.
        template: ``(args, kwargs)`` with slots.
        inputs, floats: how many there are.
        mutates: positions of the inputs that it writes.
        views: for each result, the position of the input whose memory it has, or -1; empty if there are none.
        follows: whether it may change what is known here of values (see `constants`).
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


#: Numbers of signatures that ranks do not know.
ANSWERED = -1
COMPOSED = -2
