"""A temporary status line in the running cell."""

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
    """Show a status line in the running cell after a short delay, and remove it at the end of the block.

    Args:
        notebook: the notebook in which the cell runs.
        line: the initial text.
        wanted: whether to show anything.

    Returns:
        A function that replaces the line, on any thread.
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

    timer = threading.Timer(QUIET, begin)  # shows the line even if no update arrives, as when a host does not answer
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
