"""What runs in a stopped frame of a rank for a front end; the standard library is all it needs."""

from __future__ import annotations

import builtins
import linecache
import rlcompleter
from collections.abc import Callable
from types import FrameType
from typing import Any

_MOST_NAMES = 200


def read_source(path: str, _frame: FrameType) -> str:
    """The text of a file, or of a cell, as this process knows it; "" if it does not."""
    return "".join(linecache.getlines(path))


def rich_value(name: str, bundle: Callable[[Any], Any], frame: FrameType) -> Any:
    """What `bundle` makes of a variable."""
    return bundle(_variable(name, frame))


def copy_to_globals(name: str, target: str, frame: FrameType) -> None:
    """Have a variable of the frame live on in the globals of its module, or of its cells."""
    frame.f_globals[target] = _variable(name, frame)


def _variable(name: str, frame: FrameType) -> Any:
    for names in (frame.f_locals, frame.f_globals, vars(builtins)):
        if name in names:
            return names[name]
    raise NameError(f"name {name!r} is not defined")


def complete(text: str, frame: FrameType) -> list[str]:
    """How the dotted name `text` may go on."""
    completer = rlcompleter.Completer({**frame.f_globals, **frame.f_locals})
    found: list[str] = []
    while len(found) < _MOST_NAMES and (match := completer.complete(text, len(found))) is not None:
        found.append(match.rstrip("() "))
    return list(dict.fromkeys(found))
