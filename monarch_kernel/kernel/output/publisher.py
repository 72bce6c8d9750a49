"""Publish the output of a cell as messages to a front end, or as text in a terminal."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


# Detect when a cell's own code shows output, so that earlier output of ranks can be shown above it.
#
# All output of the cell goes through `sys.stdout` or `sys.stderr`: text is written to them, while displays, results
# and tracebacks flush both first. This module therefore wraps `write` and `flush` on the thread that runs the cell.


class OwnOutput:
    """Watches the streams of a shell while a cell runs.

    Args:
        before: called before the cell's own code writes or shows something. Must be fast if there is nothing to do.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._put: list[tuple[object, str, Callable[..., object], Callable[..., object]]] = []
        self._thread = 0
        self._pid = 0
        self._busy = False

    def watch(self) -> None:
        """Begin to watch: a cell begins on this thread."""
        self.stop()
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            for name in ("write", "flush"):
                method = getattr(stream, name)
                watched = self._watched(method)
                with suppress(AttributeError):  # a stream that does not accept attributes is not watched
                    setattr(stream, name, watched)
                    self._put.append((stream, name, watched, method))

    def stop(self) -> None:
        """Stop watching at the end of the cell. A method that has replaced the wrapper, as IPython may do, stays."""
        while self._put:
            stream, name, watched, method = self._put.pop()
            if getattr(stream, name) is watched:
                setattr(stream, name, method)

    def _watched(self, method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            if threading.get_ident() == self._thread and not self._busy and os.getpid() == self._pid:
                self._busy = True
                try:
                    self._before()
                finally:
                    self._busy = False
            return method(*args)

        return call


# Folded output as plain data: the output of a cell with the ranks that wrote each part.
#
# `render.py` converts it to text and HTML; other views (a panel, a widget) may read it directly.

#: A rich result: data by MIME type, as in Jupyter.
MimeBundle = dict[str, Any]


class Source(NamedTuple):
    """The origin of output: the name of a mesh, and a rank in it."""

    mesh: str
    rank: int


@dataclass(frozen=True, slots=True)
class Block:
    """Adjacent lines of the same ranks and the same stream."""

    sources: frozenset[Source]
    stream: str  # "stdout", "stderr", "result", "label" or "notice"
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TextView:
    """The current state of a text section; without blocks it shows nothing."""

    id: int
    blocks: tuple[Block, ...]
    progress: str = ""


@dataclass(frozen=True, slots=True)
class RichView:
    """The current state of a rich result; without data it has been removed."""

    id: int
    sources: frozenset[Source]
    data: MimeBundle
    metadata: dict[str, object]


View = TextView | RichView


@dataclass(frozen=True, slots=True)
class CutOutput:
    """Output of some ranks that exceeds their limits and is not shown.

    Attributes:
        sources: the ranks, all with the same cut.
        lines: the number of lines.
        bytes: the size of these lines.
        rich: the number of rich results.
        tail: the last of these lines.
    """

    sources: frozenset[Source]
    lines: int
    bytes: int
    rich: int
    tail: tuple[str, ...]


class Publisher(Protocol):
    """Shows output in one cell. May be called on any thread, by one thread at a time."""

    #: Whether displayed output can be replaced.
    live: bool

    def show(self, key: int, data: MimeBundle, metadata: dict[str, object], *, update: bool) -> None:
        """Show a MIME bundle, or replace the one shown under the same key."""
        ...

    def write(self, stream: str, text: str) -> None:
        """Write text to the cell's stdout or stderr."""
        ...

    def progress(self, line: str) -> None:
        """Show a temporary line that is not output; does nothing if `live` is true."""
        ...


class NotebookPublisher:
    """Sends Jupyter messages that belong to one cell, even if another cell is running."""

    live = True

    def __init__(self, shell: InteractiveShell, parent: dict[str, object]) -> None:
        #: The header of the request that runs the cell.
        self.parent = _header(parent)
        self._shell = shell
        self._id = uuid.uuid4().hex

    @cached_property
    def _display(self) -> Any:
        # Cached at the first output: %%capture may be active for this cell, but no longer when its last output arrives.
        return self._shell.display_pub

    def show(self, key: int, data: MimeBundle, metadata: dict[str, object], *, update: bool) -> None:
        """See `Publisher`."""
        transient = {"display_id": f"{self._id}-{key}"}
        session = getattr(self._display, "session", None)
        if session is None:
            self._display.publish(data=data, metadata=metadata, transient=transient, update=update)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        content = {"data": data, "metadata": metadata, "transient": transient}
        kind = "update_display_data" if update else "display_data"
        message = session.msg(kind, content, parent=self.parent)
        session.send(self._display.pub_socket, message, ident=self._display.topic)

    def write(self, stream: str, text: str) -> None:
        """See `Publisher`."""
        target: Any = sys.stderr if stream == "stderr" else sys.stdout
        thread = getattr(target, "pub_thread", None)
        if thread is None or getattr(self._display, "session", None) is None:
            target.write(text)
            target.flush()
            return
        target.flush()
        message = target.session.msg("stream", {"name": stream, "text": text}, parent=self.parent)
        target.session.send(thread, message, ident=target.topic)

    def progress(self, line: str) -> None:
        """See `Publisher`."""


class TerminalPublisher:
    """Prints to the terminal; printed text cannot be replaced."""

    live = False

    def __init__(self) -> None:
        self._progress = False

    def show(self, key: int, data: MimeBundle, metadata: dict[str, object], *, update: bool) -> None:
        """See `Publisher`."""
        if not update and (text := data.get("text/plain")):
            self.write("stdout", f"{text}\n")

    def write(self, stream: str, text: str) -> None:
        """See `Publisher`."""
        self.progress("")
        target = sys.stderr if stream == "stderr" else sys.stdout
        try:
            target.write(text)
            target.flush()
        except (OSError, ValueError):  # closed
            pass

    def progress(self, line: str) -> None:
        """See `Publisher`."""
        if not sys.stderr.isatty() or not (line or self._progress):
            return
        one = line.replace("\n", " · ")  # it must overwrite the previous line
        sys.stderr.write(f"\r\x1b[2K{one}")
        sys.stderr.flush()
        self._progress = bool(line)


def publisher_for(shell: Any) -> Publisher:
    """Return the publisher for the running cell."""
    if hasattr(shell, "get_parent") and hasattr(shell.display_pub, "publish") and hasattr(shell, "kernel"):
        return NotebookPublisher(shell, shell.get_parent())
    return TerminalPublisher()


def _header(parent: dict[str, object]) -> dict[str, object]:
    from jupyter_client.session import extract_header

    header: dict[str, object] = extract_header(parent) if parent else {}
    return header
