"""Serves metrics to Prometheus: HTTP on loopback, for those that have a token.

Other users share the machine, and any of them can connect to a port of loopback. So each request must carry
``Authorization: Bearer TOKEN``. The token is in a file that only this user can read, which Prometheus' configuration
names (``credentials_file``); it stays the same when a kernel restarts.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from monarch_kernel.private_files import read_own_file, write_own_file
from monarch_kernel.watch.metrics.collector import CONTENT_TYPE

log = logging.getLogger(__name__)

#: How long a client may take to show the token, however it sends its request (seconds).
PATIENCE = 5.0
#: How many clients may be there that have not shown it; the oldest makes room for the next.
MOST = 8


def token_file() -> str:
    """The file with this user's token: ``~/.config/monarch_kernel/metrics.token``, made if there is none.

    Raises:
        OSError: it cannot be made or read, or another user could have written it.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.config")
    path = os.path.join(base, "monarch_kernel", "metrics.token")
    if not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        write_own_file(path, secrets.token_urlsafe(32).encode())
    return path


class MetricsEndpoint:
    """Serves ``/metrics`` on loopback until it is closed.

    Args:
        text: makes the metrics.
        port: 0: any that is free.

    Attributes:
        port: where it listens.
        token_file: the file that has its token.

    Raises:
        OSError: the port is taken, or the token cannot be read.
    """

    def __init__(self, text: Callable[[], bytes], port: int = 0) -> None:
        self.token_file = token_file()
        token = read_own_file(self.token_file).strip()
        if len(token) < 16:
            raise OSError(f"{self.token_file} holds no token: remove it, and another one is made")
        self._server = _Server(("127.0.0.1", port), text, token)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="monarch-metrics", daemon=True).start()

    @property
    def url(self) -> str:
        """Where the metrics are."""
        return f"http://127.0.0.1:{self.port}/metrics"

    @property
    def scrape_config(self) -> str:
        """What Prometheus' configuration needs."""
        return (
            "scrape_configs:\n"
            "  - job_name: monarch\n"
            f'    static_configs: [{{targets: ["127.0.0.1:{self.port}"]}}]\n'
            f"    authorization: {{credentials_file: {self.token_file}}}"
        )

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], text: Callable[[], bytes], token: bytes) -> None:
        self.text = text
        self.expected = b"Bearer " + token
        self._strangers: dict[socket.socket, threading.Timer] = {}  # the oldest first, with what ends each
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        timer = threading.Timer(PATIENCE, self._send_away, [request])
        timer.daemon = True
        with self._lock:
            oldest = next(iter(self._strangers)) if len(self._strangers) >= MOST else None
            self._strangers[request] = timer
        if oldest is not None:
            self._send_away(oldest)
        timer.start()
        super().process_request(request, client_address)

    def _send_away(self, stranger: socket.socket) -> None:
        if self.forget(stranger):
            with suppress(OSError):
                stranger.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def forget(self, request: socket.socket) -> bool:
        """Count a client among the strangers no more, as it has shown the token or is gone; returns whether it was."""
        with self._lock:
            timer = self._strangers.pop(request, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.forget(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report faults; that a client has gone, or was sent away, is none."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("metrics could not be served", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server_version, sys_version = "monarch", ""

    def do_GET(self) -> None:  # the name that http.server calls
        server: Any = self.server
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, server.expected):
            self._answer(401, b"a token is needed\n", {"WWW-Authenticate": "Bearer"})
            return
        server.forget(self.connection)
        if self.path.partition("?")[0] != "/metrics":
            self._answer(404, b"there is only /metrics\n", {})
        else:
            self._answer(200, server.text(), {"Content-Type": CONTENT_TYPE})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name that http.server uses
        """Requests are not logged."""
