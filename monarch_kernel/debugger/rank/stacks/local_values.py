"""Local variables as short texts, without running user code: never the `repr` of an object of a user's class."""

from __future__ import annotations

import types
from types import FrameType
from typing import Any

#: How many variables of a frame are reported, and how long a text may be.
MOST, LENGTH = 12, 60
_ITEMS = 4

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_SELF = ("self", "cls")  # the function's name tells the class
_DULL = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def local_values(frame: FrameType) -> tuple[tuple[str, str], ...]:
    """The variables of a frame as names and texts; of a module or a cell, those that its code mentions."""
    code = frame.f_code
    values: dict[str, Any] = frame.f_locals
    names = [*code.co_varnames, *code.co_cellvars, *code.co_freevars] if code.co_flags & 1 else [*code.co_names]
    told: list[tuple[str, str]] = []
    for name in dict.fromkeys(names):
        if name in values and not name.startswith("__") and name not in _SELF and not isinstance(values[name], _DULL):
            told.append((name, text_of(values[name])))
    return tuple(told[:MOST])


def text_of(value: Any, depth: int = 2) -> str:
    """A value as text of at most `LENGTH` characters."""
    return _cut(_text(value, depth))


def _text(value: Any, depth: int) -> str:
    kind = type(value)
    if kind in (str, bytes):
        return repr(value if len(value) <= LENGTH else value[:LENGTH])
    if kind is int and value.bit_length() > 4 * LENGTH:
        return f"an int of {value.bit_length()} bits"
    if kind in _ATOMS:
        return repr(value)
    if kind in (list, tuple, set, frozenset, dict):
        return _container(value, depth)
    shape = _array(value)
    return shape or f"<{kind.__qualname__}>"


def _container(value: Any, depth: int) -> str:
    kind, size = type(value), len(value)
    if not size:
        return repr(value)
    if not depth:
        return f"<{kind.__name__} of {size}>"
    try:
        items = list(value.items() if kind is dict else value)[:_ITEMS]
    except RuntimeError:  # its thread has changed it during the copy
        return f"<{kind.__name__} of {size}>"
    more = ", …" if size > len(items) else ""
    if kind is dict:
        return "{" + ", ".join(f"{_text(k, 0)}: {_text(v, depth - 1)}" for k, v in items) + more + "}"
    inside = ", ".join(_text(item, depth - 1) for item in items) + more
    if kind is tuple:
        return f"({inside}{',' if size == 1 else ''})"
    return f"[{inside}]" if kind is list else f"{{{inside}}}"


def _array(value: Any) -> str:
    """An array or a tensor: `Tensor float32 [3, 4] cuda:0`; '' for anything else."""
    described = getattr(type(value), "_short_form_", None)
    if callable(described):  # a handle of a tensor on a mesh
        return str(described(value))
    module = type(value).__module__.partition(".")[0]
    if module not in ("torch", "numpy", "jax", "jaxlib"):
        return ""
    try:
        shape, dtype = value.shape, str(value.dtype).removeprefix("torch.")
        device = str(getattr(value, "device", ""))
        where = "" if device in ("", "cpu") else f" {device}"
        return f"<{type(value).__name__} {dtype} [{', '.join(map(str, shape))}]{where}>"
    except Exception:  # not an array, or one whose shape cannot be read
        return ""


def _cut(text: str) -> str:
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 1]}…"
