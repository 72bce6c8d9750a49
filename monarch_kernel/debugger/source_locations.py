"""Represent source locations, and classify code as user code, library code, or code of this package.

User code is all code outside this package and outside the folders where Python and its packages are installed: cells,
scripts, and projects that are used from their folder. Only the path decides, so frames of another host, and frames that
another program has read, are classified in the same way. Standard library only.
"""

from __future__ import annotations

import linecache
import os
import re
import stat
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

from monarch_kernel import programs
from monarch_kernel.debugger.frontend import current_frontend
from monarch_kernel.thread_frames import current_frames

USER, LIBRARY, RUNTIME = "user", "library", "runtime"

#: The packages of this distribution. They are in the same folder.
PACKAGES = ("monarch_kernel", "workspace_sync")
#: The files that call the user's endpoints, and the one that runs cells.
ENDPOINT_RUNNERS = (
    "monarch_kernel/runtime/actor/execution/instance.py",
    "monarch_kernel/runtime/actor/execution/async_instance.py",
)
CELL_RUNNER = "monarch_kernel/kernel/rank/cell_runner.py"
_DEBUGGER = "monarch_kernel/debugger/"

_OURS = tuple(os.path.join(programs.ROOT, package, "") for package in PACKAGES)
_INSTALLED = (os.path.dirname(os.path.abspath(os.__file__)) + os.sep, os.path.dirname(os.__file__) + os.sep)
# The same for paths of any host.
_FOLDERS = r"[/\\](?:site-packages|dist-packages|lib(?:64)?[/\\]python3\.?\d*)[/\\]"
_ANY_INSTALLED = re.compile(_FOLDERS)
_OURS_INSTALLED = re.compile(rf"{_FOLDERS}(?:{'|'.join(PACKAGES)})[/\\]")
# Code of Python without a file: `<frozen importlib._bootstrap>`. A `<string>` may be user code.
_PYTHONS = ("<frozen ", "<attrs ", "<template>", "<__array_function__")

# Code that the tensor engine generates on ranks.
_MADE = "<monarch "

# The outermost frame of a rank's process. Its file name does not identify it as code of this package.
_START = ("<string>", "<module>")

#: Returns the name to show for a file, such as `Cell In[3]` for the file of a cell; None: the file's own name. Also
#: accepts the identity of a cell, which calls carry along.
Label = Callable[[str], str | None]


class SourceLocation(NamedTuple):
    """A line of code.

    Attributes:
        file: the file name in the code object.
        line: the line, from 1; 0 if unknown.
        name: the function's `co_qualname` (`Model.forward`); `<module>` outside of any function.
        kind: `USER`, `LIBRARY` or `RUNTIME` (this package).
    """

    file: str
    line: int
    name: str
    kind: str = USER

    @property
    def user(self) -> bool:
        """Whether it is user code."""
        return self.kind == USER

    def where(self, label: Label | None = None) -> str:
        """Format the location briefly: `train.py:12`, `Cell In[3]:2`."""
        return f"{shown_file(self.file, label)}:{self.line}" if self.line else shown_file(self.file, label)

    def text(self, label: Label | None = None) -> str:
        """Format the location with its function: `train.py:12 in Model.forward`; a nested function as `outer.inner`."""
        where = self.where(label)
        return where if self.name in ("", "<module>") else f"{where} in {self.name.replace('.<locals>', '')}"


@lru_cache(maxsize=4096)
def kind_of(file: str) -> str:
    """Return the kind of code in a file: `USER`, `LIBRARY` (Python, installed packages) or `RUNTIME` (this package)."""
    if file.startswith((*_OURS, _MADE)) or _OURS_INSTALLED.search(file):
        return RUNTIME
    if _checked_out().search(file) and not os.path.exists(file):
        return RUNTIME  # a package of this distribution, at its path on another host
    if file.startswith((*_PYTHONS, *_INSTALLED)) or _ANY_INSTALLED.search(file):
        return LIBRARY
    return USER


@lru_cache(maxsize=1)
def _checked_out() -> re.Pattern[str]:
    """Build the pattern of the last parts of paths in a checkout of this package."""
    entries: list[str] = []
    for package in PACKAGES:
        folder = os.path.join(programs.ROOT, package)
        for entry in os.scandir(folder) if os.path.isdir(folder) else ():
            end = r"[/\\]" if entry.is_dir() else "$"
            entries.append(rf"{package}[/\\]{re.escape(entry.name)}{end}")
    return re.compile(rf"[/\\](?:{'|'.join(entries) or '(?!)'})")


@lru_cache(maxsize=4096)
def is_debugger(file: str) -> bool:
    """Return whether a file belongs to this debugger, on any host."""
    return _DEBUGGER in file and kind_of(file) == RUNTIME


def is_user(file: str) -> bool:
    """Return whether a file is user code."""
    return kind_of(file) == USER


@lru_cache(maxsize=4096)
def matching_parts(asked: str, loaded: str) -> int:
    """Return how many components two paths share, counted from their ends; 0 if they are different files.

    The same file matches best, followed by the one with the most shared components.
    """
    if asked == loaded:
        return _SAME
    if asked.startswith("<") or loaded.startswith("<"):
        return 0
    if os.path.isabs(asked) and os.path.exists(asked) and os.path.exists(loaded):
        return _SAME if os.path.realpath(asked) == os.path.realpath(loaded) else 0
    parts = zip(reversed(asked.split(os.sep)), reversed(loaded.split(os.sep)), strict=False)
    count = 0
    for one, other in parts:
        if one != other:
            break
        count += 1
    return count


_SAME = 1000


def kind_of_code(code: CodeType) -> str:
    """Return the kind of a code object, as `kind_of`; generated dataclass and named tuple methods are library code."""
    if code.co_filename == "<string>" and (
        code.co_qualname.startswith("__create_fn__.") or "_tuple_new" in code.co_names
    ):
        return LIBRARY
    return kind_of(code.co_filename)


def is_user_code(code: CodeType) -> bool:
    """Return whether it is user code."""
    return kind_of_code(code) == USER


def is_user_frame(frame: FrameType) -> bool:
    """Return whether a frame runs user code, and is not the outermost frame of a process."""
    code = frame.f_code
    return is_user_code(code) and (code.co_filename, code.co_name) != _START


def location_of(frame: FrameType) -> SourceLocation:
    """Return the location of a frame."""
    code = frame.f_code
    return SourceLocation(code.co_filename, frame.f_lineno or 0, code.co_qualname, kind_of_code(code))


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of user code, from `frame` outward; None if there is none."""
    return next(filter(is_user_frame, outwards(frame)), None)


def user_location(thread: int) -> SourceLocation | None:
    """Return the location of user code in a thread (by its identifier) of this process; None if none runs there."""
    frame = user_frame(current_frames().get(thread))
    return None if frame is None else location_of(frame)


def user_line(frame: FrameType | None) -> str:
    """Return the innermost line of user code from `frame` outward, such as "train.py:42"; "" if there is none."""
    found = user_frame(frame)
    return "" if found is None else f"{shown_file(found.f_code.co_filename)}:{found.f_lineno}"


def is_readable_source(file: str) -> bool:
    """Return whether a file may be shown as the source of a frame, which may come from another user's report.

    It must be a cell of this notebook or a regular Python file: no pipe or device, and no other file of this user.
    """
    if file in linecache.cache:
        return True
    try:
        return file.endswith(".py") and stat.S_ISREG(os.stat(file).st_mode)
    except (OSError, ValueError):  # ValueError: the path contains a NUL
        return False


def shown_file(file: str, label: Label | None = None) -> str:
    """Return the name to show for a file: from `label`, else from this process's front end, else its base name."""
    named = (label or current_frontend().label)(file)
    return named or os.path.basename(file) or file


def shown_cell(cell: str, label: Label | None = None) -> str:
    """Return the name to show for a cell, by its identity; '' if it is no longer known."""
    return (label or current_frontend().label)(cell) or ""
