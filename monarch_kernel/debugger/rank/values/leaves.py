"""Leaves of what has no parts: numbers, texts, functions, types, and objects that only print themselves."""

from __future__ import annotations

import os
import re
import types
from typing import Any

from monarch_kernel.debugger.model.readings import Leaf, digest_of, short

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain_leaf(value: Any, path: str = "") -> Leaf:
    """A number, a text, None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = repr(value)
        try:
            number = float(value)
        except OverflowError:
            number = None
        return Leaf(path, "number", type(value).__name__, short(text), content_of(text), number=number)
    content = bytes(value) if isinstance(value, bytes | bytearray) else None
    if content is None:
        content = (value if isinstance(value, str) else repr(value)).encode("utf-8", "surrogatepass")
    text = short(repr(value[:400] if isinstance(value, str | bytes | bytearray) else value))
    if isinstance(value, str | bytes | bytearray) and len(value) > 400:
        text = f"{text}  length {len(value):,}"
    return Leaf(path, "text", type(value).__name__, text, digest_of(content))


def object_leaf(value: Any, path: str = "") -> Leaf:
    """An object without parts: its `repr` without addresses, which differ from rank to rank."""
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        code = function.__code__
        text = f"function {function.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        return Leaf(path, "text", "function", text, _code_digest(code, function.__defaults__))
    if isinstance(value, type):
        return text_leaf(path, "type", type_name(value))
    if isinstance(value, types.ModuleType):
        return text_leaf(path, "module", f"module {value.__name__}")
    if isinstance(value, os.PathLike):
        return text_leaf(path, type(value).__name__, repr(os.fspath(value)))
    text = plain_repr(value)
    return Leaf(path, "text", type_name(type(value)), short(text), content_of(text))


def _code_digest(code: types.CodeType, defaults: Any) -> bytes:
    """Equal for functions that do the same, so that edited code that has not reached a rank differs."""
    inner = [_code_digest(const, None) for const in code.co_consts if isinstance(const, types.CodeType)]
    consts = plain_repr([const for const in code.co_consts if not isinstance(const, types.CodeType)])
    names = repr((code.co_names, code.co_varnames, code.co_freevars))
    return digest_of(code.co_code, consts.encode(), names.encode(), plain_repr(defaults).encode(), *inner)


def text_leaf(path: str, facts: str, text: str) -> Leaf:
    """A part that is compared by its text."""
    return Leaf(path.lstrip(), "text", facts, short(text), content_of(text))


def content_of(text: str) -> bytes:
    """The digest of a text."""
    return digest_of(text.encode("utf-8", "surrogatepass"))


def module_text(module: Any) -> str:
    """A module of torch in one line, without its submodules."""
    mode = "training" if module.training else "eval"
    return f"{type(module).__name__}({' '.join(module.extra_repr().split())}), {mode}"


def type_name(kind: type) -> str:
    """The name of a type with its module, unless that is Python's or the notebook's."""
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def plain_repr(value: Any) -> str:
    """`repr` without addresses; never raises."""
    try:
        return _ADDRESS.sub("", repr(value))
    except Exception as error:  # user code
        return f"<{type(value).__qualname__} whose repr raised {type(error).__name__}>"
