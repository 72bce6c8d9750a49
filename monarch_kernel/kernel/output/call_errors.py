"""Show errors of calls and tensors in a notebook with the user's lines only, without the frames of the runtime.

IPython renders an exception with its `_render_traceback_` method, if it has one. The runtime does not depend on
IPython, so this module adds the method to the runtime's error classes.
"""

from __future__ import annotations

import os
from typing import Any

from monarch_kernel.introspection import after_import
from monarch_kernel.kernel.traceback_frames import cut
from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError

_METHOD = "_render_traceback_"
_TORCH = (f"{os.sep}torch{os.sep}",)
#: Modules with tensors; importing them loads torch.
_OF_TENSORS = ("monarch_kernel.tensor", "monarch_kernel.distributed")

_changed: set[type[BaseException]] = set()
_shell: Any = None


def install(ip: Any) -> None:
    """Show these errors in the shell's own traceback style, without the frames of the runtime."""
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

    if _shell is not None:  # otherwise the extension was unloaded before the module was loaded
        setattr(cls, _METHOD, render)
        _changed.add(cls)


def remove() -> None:
    """Undo `install`."""
    global _shell
    _shell = None
    for cls in _changed:
        delattr(cls, _METHOD)
    _changed.clear()
