"""Errors of calls as a notebook shows them: the user's lines and the remote traceback, without the frames in between.

IPython renders an exception with its `_render_traceback_`, if it has one. The runtime does not depend on IPython, so
this module adds the method to the runtime's two error classes.
"""

from __future__ import annotations

from typing import Any

from monarch_kernel.errors import ActorError, SupervisionError
from monarch_kernel.kernel.traceback_frames import cut

_CLASSES = (ActorError, SupervisionError)
_METHOD = "_render_traceback_"


def install(ip: Any) -> None:
    """Show errors of calls in this shell's own traceback style, cut where the runtime begins."""

    def render(error: BaseException) -> list[str]:
        traceback = cut(error.__traceback__)
        style = ip.InteractiveTB
        return list(style.structured_traceback(type(error), error, traceback, tb_offset=style.tb_offset))

    for cls in _CLASSES:
        setattr(cls, _METHOD, render)


def remove() -> None:
    """Undo `install`."""
    for cls in _CLASSES:
        if _METHOD in vars(cls):
            delattr(cls, _METHOD)
