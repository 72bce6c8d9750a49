"""Run source in a frame: conditions, input of the user at a stop, assignments to variables."""

from __future__ import annotations

import ast
import ctypes
import inspect
import string
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

_FILE = "<debugger>"

Names = dict[str, Any]


def value_of(frame: FrameType, source: str, extra: Names | None = None) -> Any:
    """Evaluate an expression in a frame.

    Args:
        frame: provides the names; it may have ended.
        source: one expression.
        extra: further names, hidden by those of the function.

    Raises:
        BaseException: raised by the expression; SyntaxError if it is not one.
    """
    code = _compiled(source.strip())
    if not extra and not any(isinstance(constant, CodeType) for constant in code.co_consts):
        return eval(code, frame.f_globals, frame.f_locals)
    # Lambdas and comprehensions see only globals.
    return eval(code, _merged(frame, extra))


def run(frame: FrameType, source: str, extra: Names) -> tuple[bool, Any]:
    """Run statements or an expression in a frame. Return whether the last one is an expression, and its value.

    Names that statements bind become variables of the function if it has such variables, and go to `extra` otherwise.
    At the top level of a module or cell, they become globals.

    Raises:
        BaseException: raised by the source. The statements before it have taken effect.
    """
    body = ast.parse(textwrap.dedent(source).strip(), _FILE)
    last: CodeType | None = None
    declared = {name for node in body.body if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    body.body = [node for node in body.body if not isinstance(node, ast.Nonlocal)]
    if body.body and isinstance(body.body[-1], ast.Expr):
        expression = body.body.pop()
        assert isinstance(expression, ast.Expr)
        last = compile(ast.Expression(expression.value), _FILE, "eval", dont_inherit=True)
    code = compile(body, _FILE, "exec", dont_inherit=True)
    with names_of(frame, extra, declared) as names:
        exec(code, names)
        return last is not None, None if last is None else eval(last, names)


@contextmanager
def names_of(frame: FrameType, extra: Names, declared: Collection[str] = ()) -> Generator[Names]:
    """Provide all names of a frame as globals to run code with.

    Names that the code binds are stored in the frame, or in `extra`.

    Args:
        declared: the names that the code declares as global.
    """
    if frame.f_locals is frame.f_globals:
        yield frame.f_globals
        return
    names = _merged(frame, extra)
    before = dict(names)
    try:
        yield names
    finally:
        _keep(frame, before, names, declared, extra)


def assign(frame: FrameType, name: str, value: Any) -> None:
    """Set a variable of a frame.

    Raises:
        NameError: the function has no such variable.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals[name] = value
        return
    if name not in code.co_varnames and name not in code.co_cellvars and name not in code.co_freevars:
        raise NameError(f"{code.co_qualname} has no variable {name!r}")
    names = frame.f_locals
    names[name] = value
    if sys.version_info < (3, 13):
        # Until Python 3.13, the dictionary was a copy (PEP 667).
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def fill(frame: FrameType, template: str, show: Callable[[Any], str]) -> str:
    """Format a log point: each `{expression}` is replaced by its value, as `show` formats it, or by its error.

    Format specifications and `!r` work as in f-strings; `{{` is a literal brace.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:  # an unmatched brace
        return template
    text: list[str] = []
    for literal, source, specification, conversion in parts:
        text.append(literal)
        if source is None:
            continue
        try:
            value = value_of(frame, source)
            if conversion or specification:
                converted = {"r": repr, "a": ascii}.get(conversion or "s", str if conversion else lambda it: it)(value)
                text.append(format(converted, specification or ""))
            else:
                text.append(value if isinstance(value, str) else show(value))
        except Exception as error:
            text.append(f"<{summary(error)}>")
    return "".join(text)


def summary(error: BaseException) -> str:
    """Format an exception in one line, like the last line of a traceback."""
    try:
        lines = traceback.format_exception_only(error)
    except Exception:  # its own __str__ failed
        return type(error).__name__
    text = lines[-1].strip() if isinstance(error, SyntaxError) else "".join(lines).strip()
    return " ".join(text.split("\n")[:1]) or type(error).__name__


@lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    return compile(source, _FILE, "eval", dont_inherit=True)


def _merged(frame: FrameType, extra: Names | None) -> Names:
    """Merge all names of a frame into one set of globals."""
    return {**frame.f_globals, **(extra or {}), **frame.f_locals}


def _keep(frame: FrameType, before: Names, after: Names, declared: Collection[str], extra: Names) -> None:
    """Store the names that statements have bound."""
    missing = object()
    for name, value in after.items():
        if before.get(name, missing) is value or name == "__builtins__":
            continue
        if name in declared and name not in frame.f_locals:
            frame.f_globals[name] = value
            continue
        try:
            assign(frame, name, value)
        except NameError:
            extra[name] = value
    for name in before.keys() - after.keys():
        extra.pop(name, None)
        if name in declared:
            frame.f_globals.pop(name, None)


__all__ = ["Names", "assign", "fill", "names_of", "run", "summary", "value_of"]
