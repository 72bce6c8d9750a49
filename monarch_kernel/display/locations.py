"""Names of files in views of a controller: `Cell In[3]` for the file of a cell, as the front end calls it."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable

_label: Callable[[str], str | None] = lambda _file: None  # noqa: E731  # until there is a front end


def use_label(label: Callable[[str], str | None] | None) -> None:
    """Set what names files: a front end does; None: their own names are shown."""
    global _label
    _label = label or (lambda _file: None)


def label_of(file: str) -> str | None:
    """`Cell In[3]` for the file of a cell; None for another file."""
    return _label(file)


def shown_location(file: str, line: int) -> str:
    """`Cell In[3]:2`, `train.py:12`."""
    return f"{_label(file) or os.path.basename(file) or file}:{line}"


def source_line(file: str, line: int, width: int | None = None) -> str:
    """A line of source without its indentation, cut to `width` characters; "" if it is not known.

    Cells are found as tracebacks find them.
    """
    text = linecache.getline(file, line).strip() if line > 0 else ""
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"
