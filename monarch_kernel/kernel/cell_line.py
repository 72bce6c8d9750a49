"""A line in the running cell that says what is waited for, and disappears."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from monarch_kernel.kernel.progress import QUIET

if TYPE_CHECKING:
    from monarch_kernel.kernel.notebook import Notebook


@contextmanager
def shown_line(notebook: Notebook, line: str, wanted: bool = True) -> Generator[Callable[[str], None]]:
    """Show a line in the running cell once a moment has passed, until the block ends.

    Args:
        notebook: in which the cell runs.
        line: at first.
        wanted: whether a cell waits; otherwise nothing is shown.

    Returns:
        A function that replaces the line; called on any thread.
    """
    output = notebook.progress_output() if wanted else None
    lock = threading.Lock()
    due, ended = False, False

    def update() -> None:
        if output is not None and due and not ended and output.progress(line):
            notebook.router.touch(output)

    def begin() -> None:
        nonlocal due
        with lock:
            due = True
            update()

    def tell(text: str) -> None:
        nonlocal line
        with lock:
            line = text
            update()

    timer = threading.Timer(QUIET, begin)  # also if nothing is told in that time, as while a host does not answer
    timer.daemon = True
    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
        with lock:
            ended = True
        if output is not None and output.progress(""):
            output.show()
