"""Whether a worker can be reached from this machine without a tunnel."""

from __future__ import annotations

import socket


def reaches(url: str, seconds: float) -> bool:
    """Whether something listens at a URL (``tcp://HOST:PORT``), and answers in time."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except OSError:
        return False
    return True
