"""Serve metrics to Prometheus over HTTP on the loopback interface, protected by a token.

Any user of the machine can connect to a loopback port. Each request must therefore have the header ``Authorization:
Bearer TOKEN``. The token is in a file that only this user can read. Prometheus' configuration refers to the file
(``credentials_file``). The token stays the same when a kernel restarts.
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

#: The time for a client to send the token (seconds).
PATIENCE = 5.0
#: The maximum number of clients that have not sent it; a new one replaces the oldest.
MOST = 8


def token_file() -> str:
    """Return the file with this user's token: ``~/.config/monarch_kernel/metrics.token``, created if it is missing.

    Raises:
        OSError: it cannot be created or read, or another user could have written it.
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
        text: returns the metrics.
        port: the port; 0: any free port.

    Attributes:
        port: the port it listens on.
        token_file: the file with its token.

    Raises:
        OSError: the port is in use, or the token cannot be read.
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
        """The URL of the metrics."""
        return f"http://127.0.0.1:{self.port}/metrics"

    @property
    def scrape_config(self) -> str:
        """The settings for Prometheus' configuration."""
        return (
            "scrape_configs:\n"
            "  - job_name: monarch\n"
            f'    static_configs: [{{targets: ["127.0.0.1:{self.port}"]}}]\n'
            f"    authorization: {{credentials_file: {self.token_file}}}"
        )

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], text: Callable[[], bytes], token: bytes) -> None:
        self.text = text
        self.expected = b"Bearer " + token
        self._strangers: dict[socket.socket, threading.Timer] = {}  # oldest first, with the timer that ends each
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
        """Remove a client that has sent the token or is gone. Return whether it was unauthenticated."""
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
        """Report faults, but not clients that have disconnected or were disconnected."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("metrics could not be served", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server_version, sys_version = "monarch", ""

    def do_GET(self) -> None:  # name required by http.server
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
        """Do not log requests."""
