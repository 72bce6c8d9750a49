"""Publish the output of a cell as messages to a front end, or as text in a terminal."""

from __future__ import annotations

import sys
import uuid
from functools import cached_property
from typing import Any, Protocol

from monarch_kernel.kernel.output.transcript import MimeBundle


class Publisher(Protocol):
    """Shows output in one cell. May be called on any thread, by one thread at a time."""

    #: Whether displayed output can be replaced.
    live: bool

    def show(self, key: int, data: MimeBundle, metadata: dict[str, Any], *, update: bool) -> None:
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

    def __init__(self, shell: Any, parent: dict[str, Any]) -> None:
        #: The header of the request that runs the cell.
        self.parent = _header(parent)
        self._shell = shell
        self._id = uuid.uuid4().hex

    @cached_property
    def _display(self) -> Any:
        # Cached at the first output: %%capture may be active for this cell, but no longer when its last output arrives.
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
        one = line.replace("\n", " · ")  # it must overwrite the previous line
        sys.stderr.write(f"\r\x1b[2K{one}")
        sys.stderr.flush()
        self._progress = bool(line)


def publisher_for(shell: Any) -> Publisher:
    """Return the publisher for the running cell."""
    if hasattr(shell, "get_parent") and hasattr(shell.display_pub, "publish") and hasattr(shell, "kernel"):
        return NotebookPublisher(shell, shell.get_parent())
    return TerminalPublisher()


def _header(parent: dict[str, Any]) -> dict[str, Any]:
    from jupyter_client.session import extract_header

    header: dict[str, Any] = extract_header(parent) if parent else {}
    return header
