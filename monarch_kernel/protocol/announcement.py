"""What a worker tells the process that started it: one line of JSON, written in one piece.

A launcher reads it from a pipe, a file or a log, where other text may stand around it. It has no secret.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

#: The longest error in an announcement (bytes): a line of this size reaches a pipe in one piece.
_LONGEST_ERROR = 2000
_START = b'{"monarch_kernel":'


class WorkerAnnouncement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that listens, or why it cannot.

    Attributes:
        monarch_kernel: the version of this package there.
        url: the URL to attach to; "" if the worker could not start.
        host: the name of its host.
        pid: its process there.
        id: names the worker; it is another one after every start.
        python: the version of Python there, such as "3.11.7".
        devices: the GPUs that the engine gave this worker, as their runtime names them (index, UUID, MIG UUID);
            None: the environment names none.
        ends_at: when its walltime ends (Unix time); 0: not known.
        error: why the worker could not start; "" if it listens.
    """

    monarch_kernel: str
    url: str = ""
    host: str = ""
    pid: int = 0
    id: str = ""
    python: str = ""
    devices: tuple[str, ...] | None = None
    ends_at: float = 0.0
    error: str = ""

    def line(self) -> bytes:
        """The announcement as one line, short enough for a pipe to take it in one piece."""
        error = self.error.encode()[:_LONGEST_ERROR].decode(errors="ignore")
        return msgspec.json.encode(msgspec.structs.replace(self, error=error)) + b"\n"


def find_announcement(text: bytes | Iterable[bytes]) -> WorkerAnnouncement | None:
    """The first announcement in the output of a worker's start; None if there is none yet.

    Args:
        text: the output, or its lines. What logins print around it is ignored, and so is a line that is not complete.
    """
    lines = text.splitlines(keepends=True) if isinstance(text, bytes) else text
    for line in lines:
        if line.startswith(_START) and line.endswith(b"\n"):
            try:
                return msgspec.json.decode(line, type=WorkerAnnouncement)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return None
