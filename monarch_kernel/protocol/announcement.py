"""The announcement of a worker to the process that started it: one line of JSON, written in one piece.

A launcher finds it in a pipe, a file or a log, which may contain other text. It contains no secret.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

#: The maximum length of an error in an announcement (bytes): a line of this size is written to a pipe in one piece.
_LONGEST_ERROR = 2000
_START = b'{"monarch_kernel":'


class WorkerAnnouncement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that listens, or the reason why it cannot.

    Attributes:
        monarch_kernel: its version of this package.
        url: the URL to attach to; "" if the worker could not start.
        host: the name of its host.
        pid: its process id.
        id: the id of the worker, which is different after every start.
        python: its version of Python, such as "3.11.7".
        devices: the GPUs that the provider assigned to this worker, as their runtime names them (index, UUID, MIG
            UUID); None: the environment names none.
        ends_at: when its walltime ends (Unix time); 0: unknown.
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
        """Encode the announcement as one line, short enough for a pipe to accept it in one piece."""
        error = self.error.encode()[:_LONGEST_ERROR].decode(errors="ignore")
        return msgspec.json.encode(msgspec.structs.replace(self, error=error)) + b"\n"


def find_announcement(text: bytes | Iterable[bytes]) -> WorkerAnnouncement | None:
    """Find the first announcement in the output of a worker's start; None if there is none yet.

    Args:
        text: the output, or its lines. Other output, such as login messages, and an incomplete line are ignored.
    """
    lines = text.splitlines(keepends=True) if isinstance(text, bytes) else text
    for line in lines:
        if line.startswith(_START) and line.endswith(b"\n"):
            try:
                return msgspec.json.decode(line, type=WorkerAnnouncement)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return None
