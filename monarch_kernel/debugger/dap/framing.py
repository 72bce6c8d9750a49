"""Frame Debug Adapter Protocol messages in a stream of bytes: a header with the length, then JSON."""

from __future__ import annotations

import json
from typing import Any

_END = b"\r\n\r\n"


def frame(message: dict[str, Any]) -> bytes:
    """Encode a message."""
    body = json.dumps(message).encode()
    return b"Content-Length: %d%s%s" % (len(body), _END, body)


class Frames:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._held = b""

    @property
    def rest(self) -> bytes:
        """The beginning of an incomplete message."""
        return self._held

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are now complete, each with its header.

        Raises:
            ValueError: the data does not follow this protocol.
        """
        self._held += data
        found: list[bytes] = []
        while (end := self._held.find(_END)) >= 0:
            length = _length(self._held[:end])
            size = end + len(_END) + length
            if len(self._held) < size:
                break
            found.append(self._held[:size])
            self._held = self._held[size:]
        return found


def content(message: bytes) -> dict[str, Any]:
    """Parse the JSON of a framed message."""
    return dict(json.loads(message.partition(_END)[2]))


def _length(header: bytes) -> int:
    for line in header.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    raise ValueError(f"no Content-Length in {header[:80]!r}: that is not the Debug Adapter Protocol")
