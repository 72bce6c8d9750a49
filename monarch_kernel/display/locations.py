"""Name files in views of a controller, with the front end's labels: `Cell In[3]` for the file of a cell."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable

_label: Callable[[str], str | None] = lambda _file: None  # noqa: E731  # until there is a front end


def use_label(label: Callable[[str], str | None] | None) -> None:
    """Set the function that labels files, for a front end. None: files keep their own names."""
    global _label
    _label = label or (lambda _file: None)


def label_of(file: str) -> str | None:
    """Return `Cell In[3]` for the file of a cell; None for another file."""
    return _label(file)


def shown_location(file: str, line: int) -> str:
    """Format a location: `Cell In[3]:2`, `train.py:12`."""
    return f"{_label(file) or os.path.basename(file) or file}:{line}"


def source_line(file: str, line: int, width: int | None = None) -> str:
    """Return a line of source without its indentation, cut to `width` characters; "" if it is unknown.

    Cells are found through `linecache`, like in tracebacks.
    """
    text = linecache.getline(file, line).strip() if line > 0 else ""
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"
