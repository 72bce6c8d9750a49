"""Errors of calls and tensors as a notebook shows them: the user's lines, without the frames of the runtime below them.

IPython renders an exception with its `_render_traceback_`, if it has one. The runtime does not depend on IPython, so
this module adds the method to the runtime's error classes.
"""

from __future__ import annotations

import os
from typing import Any

from monarch_kernel.introspection import after_import
from monarch_kernel.kernel.traceback_frames import cut
from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError

_METHOD = "_render_traceback_"
_TORCH = (f"{os.sep}torch{os.sep}",)
#: The modules with tensors, which load torch.
_OF_TENSORS = ("monarch_kernel.tensor", "monarch_kernel.distributed")

_changed: set[type[BaseException]] = set()
_shell: Any = None


def install(ip: Any) -> None:
    """Show these errors in this shell's own traceback style, cut where the runtime begins."""
    global _shell
    _shell = ip
    for cls in (ActorError, SupervisionError):
        _change(cls, ())
    for name in _OF_TENSORS:
        after_import(name, _change_errors_of_tensors)


def _change_errors_of_tensors(_module: Any) -> None:
    from monarch_kernel.tensor import MixedTensorsError

    _change(MixedTensorsError, _TORCH)


def _change(cls: type[BaseException], within: tuple[str, ...]) -> None:
    def render(error: BaseException) -> list[str]:
        traceback = cut(error.__traceback__, within=within)
        style = _shell.InteractiveTB
        return list(style.structured_traceback(type(error), error, traceback, tb_offset=style.tb_offset))

    if _shell is not None:  # else the extension was unloaded before the module was loaded
        setattr(cls, _METHOD, render)
        _changed.add(cls)


def remove() -> None:
    """Undo `install`."""
    global _shell
    _shell = None
    for cls in _changed:
        delattr(cls, _METHOD)
    _changed.clear()
