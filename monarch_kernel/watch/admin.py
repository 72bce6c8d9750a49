"""An HTTP server with the state of meshes for local programs of this user, in the terms of Monarch's admin server.

It listens on the loopback interface, where any user of the machine can connect. A connection of another user is closed
before any data is read. To keep web pages in this user's browser out, requests must name the loopback interface as
their host, and requests with a body must be JSON, which a page of another origin cannot send.
"""

from __future__ import annotations

import html
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from monarch_kernel.display.tables import table_html
from monarch_kernel.private_files import is_own
from monarch_kernel.watch.history import monarch_tables
from monarch_kernel.watch.history.monarch_tables import TopologyNode, as_text, topology
from monarch_kernel.watch.history.query import HistoryQueryError, ask
from monarch_kernel.watch.history.recorder import History
from monarch_kernel.watch.model import Snapshot
from monarch_kernel.watch.status_table import status_tables
from monarch_kernel.watch.tracing import Trace
from monarch_kernel.watch.watcher import Watch

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
#: The interval of reports from ranks (seconds).
PERIOD = 0.5
#: The time limit for a client to send its request (seconds), the maximum size of a request (bytes), and the maximum
#: duration of a trace (seconds).
PATIENCE, MOST, LONGEST = 10.0, 1 << 20, 600.0

_ABOUT = """# The admin server of monarch_kernel

- `GET /v1/root`: the root; then `GET /v1/{reference}` of each of its `children`: hosts, procs, actors
- `GET /v1/tree`: all of it as text
- `POST /v1/query` with `{"sql": "..."}`, `Content-Type: application/json`: rows of telemetry
- `POST /v1/profile` with `{"seconds": 10}`: a Perfetto trace of all ranks
- `GET /`: meshes and ranks as a page

It answers programs of its own user on its own machine.
"""


class AdminServer:
    """An admin server, which runs until it is closed.

    Args:
        port: the port; 0: any free port.
        history: answers queries; None: queries are refused.
        retention: the maximum age of events in query results (seconds); 0: any age.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, port: int = 0, history: History | None = None, retention: float = 0.0) -> None:
        self.history = history
        self._retention = retention
        self._started = round(time.time() * 1e6)
        self._server = _Server((LOOPBACK, port), self)
        self.watch = Watch(PERIOD)
        threading.Thread(target=self._server.serve_forever, name="monarch-admin", daemon=True).start()

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://{LOOPBACK}:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self.watch.close()

    def nodes(self) -> dict[str, TopologyNode]:
        """Return all nodes by identity."""
        return self._nodes_of(self.watch.snapshot())

    def _nodes_of(self, snapshot: Snapshot) -> dict[str, TopologyNode]:
        return topology(snapshot, self._started, f"process {os.getpid()}")

    def node(self, identity: str) -> dict[str, Any] | None:
        """Return a node as JSON-compatible values; None if it does not exist."""
        found = self.nodes().get(identity)
        if found is None:
            return None
        return {
            "identity": identity,
            "properties": {found.kind: found.properties},
            "children": found.children,
            "parent": found.parent or None,
            "as_of": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def query(self, sql: str) -> list[dict[str, object]]:
        """Return the rows of a query of Monarch's tables.

        Raises:
            HistoryQueryError: the query is invalid.
        """
        if self.history is None:
            raise HistoryQueryError("there is no telemetry: call job.enable_telemetry() before job.state()")
        words = sql.strip().rstrip(";").split()
        if [word.lower() for word in words] == ["show", "tables"]:
            return [
                {"table_catalog": "monarch", "table_schema": "public", "table_name": name, "table_type": "BASE TABLE"}
                for name in monarch_tables.COLUMNS
            ]
        if len(words) == 2 and words[0].lower() == "describe" and words[1] in monarch_tables.COLUMNS:
            kinds = {"integer": "Int64", "real": "Float64", "text": "Utf8"}
            return [
                {"column_name": name, "data_type": kinds[monarch_tables.kind_of(name)], "is_nullable": "NO"}
                for name in monarch_tables.COLUMNS[words[1]]
            ]
        since = round((time.time() - self._retention) * 1e6) if self._retention else 0
        snapshot = self.watch.snapshot()
        wanted = monarch_tables.named(sql)
        tables = monarch_tables.tables_of(wanted, self.history.tables(), snapshot, self._nodes_of(snapshot), since)
        try:
            found = ask(tables, sql, known=tuple(monarch_tables.COLUMNS))
        except HistoryQueryError as error:
            if re.search(r"\b(sent_)?messages?\b|\bmessage_status_events\b|\bspans?\b|\bspan_events\b", sql.lower()):
                raise HistoryQueryError(f"{error}; {monarch_tables.ELSEWHERE}") from None
            raise
        return [dict(zip(found.columns, row, strict=True)) for row in found.rows]

    def page(self) -> bytes:
        """Return an HTML page with meshes and ranks that refreshes itself."""
        tables = "".join(table_html(table.view) for table in status_tables(self.watch.snapshot(), time.time()))
        title = html.escape(f"Meshes of process {os.getpid()}")
        return (
            f"<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=2><title>{title}</title>"
            f"<body style='font-family: sans-serif'><h1>{title}</h1>{tables or '<p>There is no mesh.</p>'}"
        ).encode()


def recorded(seconds: float) -> bytes:
    """Return a compressed trace of all ranks over the next seconds.

    Raises:
        RuntimeError: another trace is on.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json.gz")
        with Trace(path):
            time.sleep(seconds)
        with open(path, "rb") as file:
            return file.read()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], admin: AdminServer) -> None:
        self.admin = admin
        super().__init__(address, _Handler)

    def verify_request(self, request: Any, client_address: object) -> bool:
        return is_own(request)

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a request to the admin server failed: %s", sys.exception())


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server_version, sys_version = "monarch", ""

    def _admin(self) -> AdminServer | None:
        """Return the server, if the request does not come from a web page."""
        server: Any = self.server
        if re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d+)?", self.headers.get("Host", "")):
            return server.admin
        self._answer(403, {"error": "requests name 127.0.0.1 as their host"})
        return None

    def do_GET(self) -> None:  # name required by http.server
        path = unquote(self.path.partition("?")[0])
        if (admin := self._admin()) is None:
            return
        if path in ("", "/"):
            self._answer(200, admin.page(), "text/html; charset=utf-8")
        elif path == "/SKILL.md":
            self._answer(200, _ABOUT.encode(), "text/markdown; charset=utf-8")
        elif path == "/v1/tree":
            self._answer(200, as_text(admin.nodes(), admin.url).encode(), "text/plain; charset=utf-8")
        elif path.startswith("/v1/") and (found := admin.node(path[4:])) is not None:
            self._answer(200, found)
        else:
            self._answer(404, {"error": f"there is no {path}; /SKILL.md lists all requests"})

    def do_POST(self) -> None:  # name required by http.server
        if (admin := self._admin()) is None:
            return
        if self.headers.get_content_type() != "application/json":
            self._answer(415, {"error": "send JSON, with Content-Type: application/json"})
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST:
            self._answer(413, {"error": f"a request has a length, of {MOST} bytes at most"})
            return
        try:
            asked = json.loads(self.rfile.read(int(length)))
            if self.path == "/v1/query":
                self._answer(200, {"rows": admin.query(str(asked["sql"]))})
            elif self.path == "/v1/profile":
                seconds = float(asked["seconds"])
                if not 0 < seconds <= LONGEST:
                    raise ValueError(f"a profile takes up to {LONGEST:g} seconds, not {seconds:g}")
                self._answer(200, recorded(seconds), "application/gzip")
            else:
                self._answer(404, {"error": f"there is no {self.path}; /SKILL.md lists all requests"})
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            self._answer(400, {"error": str(error)})

    def _answer(self, status: int, body: object, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body, default=str).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name that http.server uses
        """Do not log requests."""
