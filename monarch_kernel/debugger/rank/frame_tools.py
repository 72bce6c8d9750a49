"""Functions that a viewer runs in a frame of a stopped rank, on the stopped thread. Standard library only."""

from __future__ import annotations

import builtins
import linecache
import reprlib
import rlcompleter
from collections.abc import Callable
from types import FrameType, FunctionType, ModuleType
from typing import Any

_MOST_NAMES = 200
_MOST_VARIABLES = 100
_LONGEST = 200


def read_source(path: str, _frame: FrameType) -> str:
    """Return the text of a file or a cell, as this process knows it; "" if it does not."""
    return "".join(linecache.getlines(path))


def rich_value(name: str, bundle: Callable[[object], object], frame: FrameType) -> Any:
    """Apply `bundle` to a variable, and return the result."""
    return bundle(_variable(name, frame))


def copy_to_globals(name: str, target: str, frame: FrameType) -> None:
    """Copy a variable of the frame into the globals of its module, or of its cells."""
    frame.f_globals[target] = _variable(name, frame)


def _variable(name: str, frame: FrameType) -> object:
    for names in (frame.f_locals, frame.f_globals, vars(builtins)):
        if name in names:
            return names[name]
    raise NameError(f"name {name!r} is not defined")


def complete(text: str, frame: FrameType) -> list[str]:
    """Return the completions of the dotted name `text`."""
    completer = rlcompleter.Completer({**frame.f_globals, **frame.f_locals})
    found: list[str] = []
    while len(found) < _MOST_NAMES and (match := completer.complete(text, len(found))) is not None:
        found.append(match.rstrip("() "))
    return list(dict.fromkeys(found))


def local_values(names: tuple[str, ...], frame: FrameType) -> dict[str, str]:
    """Return the variables of a frame with short forms of their values: the named ones, or all that user code defined.

    Names that the frame does not have are left out.
    """
    found: dict[str, str] = {}
    for name, value in list(frame.f_locals.items()):
        if names:
            if name not in names:
                continue
        elif name.startswith(("__", "@")) or isinstance(value, ModuleType | FunctionType | type):
            continue
        found[name] = _short(value)
        if len(found) == _MOST_VARIABLES:
            break
    return found


def _short(value: object) -> str:
    limited = reprlib.Repr()
    limited.maxstring = limited.maxother = _LONGEST
    limited.maxdict = limited.maxlist = limited.maxtuple = limited.maxset = 10
    try:
        return limited.repr(value)
    except Exception as error:
        return f"<{type(value).__name__}; its repr raised {type(error).__name__}>"
