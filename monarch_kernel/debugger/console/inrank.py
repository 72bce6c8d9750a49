"""What the console runs in a stopped thread of a rank. Standard library only."""

from __future__ import annotations

import reprlib
from types import FrameType, FunctionType, ModuleType

_MOST = 100
_LONGEST = 200


def local_values(names: tuple[str, ...], frame: FrameType) -> dict[str, str]:
    """The variables of a frame with short forms of their values: those named, or all that a person made.

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
        if len(found) == _MOST:
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
