"""Sample one number of a rank repeatedly, for a plot, on a thread of the debug agent."""

from __future__ import annotations

from functools import lru_cache
from types import CodeType
from typing import Any

from monarch_kernel.debugger.rank.values.evaluation import FILE, user_actors
from monarch_kernel.introspection import main_names


def sample(expression: str) -> float:
    """Evaluate an expression to a number, in the namespace of the rank's cells, or else of its actors.

    Raises:
        TypeError: its value is not a number, nor a tensor or an array with one element.
    """
    code = _compiled(expression)
    names: dict[str, Any] = main_names()
    try:
        value = eval(code, names)
    except NameError as error:
        actors = dict(user_actors())
        if getattr(error, "name", None) not in actors:
            raise
        value = eval(code, {**names, **actors})
    return _number(value)


@lru_cache(maxsize=64)
def _compiled(expression: str) -> CodeType:
    return compile(expression, FILE, "eval")


def _number(value: Any) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    if getattr(value, "is_meta", False) or isinstance(value, str | bytes | complex):
        raise TypeError(f"a {type(value).__name__} is no number")
    size = getattr(value, "numel", None)  # for a tensor
    count = size() if callable(size) else getattr(value, "size", 1)  # for an array
    if count != 1:
        raise TypeError(f"a {type(value).__name__} with {count} elements is no number: reduce it, as with .mean()")
    detached = value.detach() if hasattr(value, "detach") else value
    return float(detached)
