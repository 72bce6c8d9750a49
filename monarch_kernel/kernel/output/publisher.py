"""How the output of a cell reaches the user: as messages to a front end, or as text in a terminal."""

from __future__ import annotations

import sys
import uuid
from functools import cached_property
from typing import Any, Protocol

from monarch_kernel.kernel.output.transcript import MimeBundle


class Publisher(Protocol):
    """Shows things in one cell; called on any thread, by one thread at a time."""

    #: Whether what was shown can be replaced.
    live: bool

    def show(self, key: int, data: MimeBundle, metadata: dict[str, Any], *, update: bool) -> None:
        """Show a MIME bundle, or replace the one shown under the same key."""
        ...

    def write(self, stream: str, text: str) -> None:
        """Write text to the cell's stdout or stderr."""
        ...

    def progress(self, line: str) -> None:
        """Show a line that is not output and goes away again; does nothing where `live` is true."""
        ...


class NotebookPublisher:
    """Sends Jupyter messages that belong to one cell, whatever cell runs when they are sent."""

    live = True

    def __init__(self, shell: Any, parent: dict[str, Any]) -> None:
        self._parent = _header(parent)
        self._shell = shell
        self._id = uuid.uuid4().hex

    @cached_property
    def _display(self) -> Any:
        # Kept from the first output on: %%capture may be in place for this cell, and gone when its last output comes.
        return self._shell.display_pub

    def show(self, key: int, data: MimeBundle, metadata: dict[str, Any], *, update: bool) -> None:
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
        message = session.msg(kind, content, parent=self._parent)
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
        message = target.session.msg("stream", {"name": stream, "text": text}, parent=self._parent)
        target.session.send(thread, message, ident=target.topic)

    def progress(self, line: str) -> None:
        """See `Publisher`."""


class TerminalPublisher:
    """Prints to the terminal; printed text stays."""

    live = False

    def __init__(self) -> None:
        self._progress = False

    def show(self, key: int, data: MimeBundle, metadata: dict[str, Any], *, update: bool) -> None:
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
        one = line.replace("\n", " · ")  # it overwrites the line before
        sys.stderr.write(f"\r\x1b[2K{one}")
        sys.stderr.flush()
        self._progress = bool(line)


def publisher_for(shell: Any) -> Publisher:
    """The publisher for the cell that runs now."""
    if hasattr(shell, "get_parent") and hasattr(shell.display_pub, "publish") and hasattr(shell, "kernel"):
        return NotebookPublisher(shell, shell.get_parent())
    return TerminalPublisher()


def _header(parent: dict[str, Any]) -> dict[str, Any]:
    from jupyter_client.session import extract_header

    header: dict[str, Any] = extract_header(parent) if parent else {}
    return header
