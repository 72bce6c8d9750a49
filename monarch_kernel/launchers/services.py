"""Telemetry, admin server and dashboard of a job: declared on it, started by ``state``, and stopped by ``kill``.

They belong to the program of the job, and end with it. Until then, other programs of the user on this machine find them
through a file beside that of the job.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.private_files import read_own_file, write_own_file

if TYPE_CHECKING:
    from monarch_kernel.watch.admin import AdminServer

log = logging.getLogger(__name__)

#: The file with the address, beside the file of the job.
_FILE = "telemetry.json"
_QUERY_TIME = 10.0


@dataclass
class TelemetryConfig:
    """The recording of a job's actors for SQL.

    Attributes:
        retention_secs: the maximum age of the events that a query sees (seconds); 0: limited only by the available
            space.
        include_dashboard: whether to serve a page with its meshes.
        dashboard_port: the port of the page, if it is free; otherwise any.
        snapshot_interval_secs: an option of Monarch's; here, snapshot tables show the moment of the query.
    """

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0


@dataclass
class MeshAdminConfig:
    """The configuration of the admin server of a job.

    Attributes:
        admin_addr: its address, such as ``127.0.0.1:1729``; None: any free port. Only its port is used: the server
            listens only on loopback, for programs of this user.
    """

    admin_addr: str | None = None


class QueryEngineClient:
    """Queries the telemetry of a job, in this program or in another one of this user on this machine.

    Args:
        base_url: the URL of the server.
        timeout: the time limit for an answer (seconds).
    """

    def __init__(self, base_url: str, timeout: float = _QUERY_TIME) -> None:
        self.base_url = base_url
        self._timeout = timeout

    def query(self, sql: str, timeout: float | None = None) -> dict[str, list[dict[str, object]]]:
        """Return the rows of a query, as ``{"rows": [...]}``; docs/telemetry.md lists Monarch's tables.

        Raises:
            urllib.error.HTTPError: the query is invalid; the text describes the error.
            urllib.error.URLError: the program with the telemetry has ended.
            TimeoutError: it took too long.
        """
        return json.loads(self._answer("/v1/query", {"sql": sql}, self._timeout if timeout is None else timeout))

    def profile(self, seconds: float) -> bytes:
        """Record a trace of all ranks over the next seconds: compressed JSON, for ui.perfetto.dev.

        Raises:
            urllib.error.HTTPError: another trace is being recorded, or this one would take too long.
            urllib.error.URLError: the program has ended.
        """
        return self._answer("/v1/profile", {"seconds": seconds}, seconds + 60.0)

    def tree(self) -> str:
        """Return the whole tree of hosts, procs and actors, as text.

        Raises:
            urllib.error.URLError: the program has ended.
        """
        return self._answer("/v1/tree", None, self._timeout).decode()

    def _answer(self, path: str, asked: dict[str, object] | None, timeout: float) -> bytes:
        import urllib.error  # not with the module, which every job loads: this import takes 50 ms
        import urllib.request

        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy
        data = None if asked is None else json.dumps(asked).encode()
        request = urllib.request.Request(self.base_url + path, data, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode("utf-8", "replace")
            raise urllib.error.HTTPError(error.url, error.code, f"{error.msg}: {text}", error.hdrs, None) from None


@dataclass
class JobServices:
    """The declared services, and the running ones."""

    telemetry: TelemetryConfig | None = None
    admin: MeshAdminConfig | None = None
    _servers: list[AdminServer] = field(default_factory=list["AdminServer"])
    _file: str = ""

    def __reduce__(self) -> tuple[type[JobServices], tuple[TelemetryConfig | None, MeshAdminConfig | None]]:
        return JobServices, (self.telemetry, self.admin)  # running services belong to this process

    @property
    def admin_url(self) -> str | None:
        """The address of the admin server; None: it was not requested."""
        return self._servers[0].url if self._servers else None

    @property
    def telemetry_url(self) -> str | None:
        """The address for queries; None: there is no telemetry."""
        return self.admin_url if self.telemetry is not None else None

    @property
    def dashboard_url(self) -> str | None:
        """The address of the page; None: it was not requested."""
        return self._servers[1].url if len(self._servers) > 1 else None

    def start(self, apply_id: str, cached_path: str | os.PathLike[str] | None) -> None:
        """Start declared services that are not running.

        Args:
            apply_id: the id of the job; ``cached_path`` is its file, beside which the address is written; None:
                nowhere.

        Raises:
            OSError: the port of the admin server is in use.
            ValueError: its address has no port.
        """
        if self._servers or (self.telemetry is None and self.admin is None):
            return
        from monarch_kernel.watch.admin import PERIOD, AdminServer
        from monarch_kernel.watch.history.recorder import History

        history = None if self.telemetry is None else History(period=PERIOD)
        retention = 0.0 if self.telemetry is None else float(self.telemetry.retention_secs)
        port = 0 if self.admin is None else _port(self.admin.admin_addr)
        try:
            server = AdminServer(port, history, retention)
        except OSError as e:
            raise OSError(e.errno, f"port {port} of the mesh admin server cannot be had: {e.strerror}") from None
        self._servers.append(server)
        atexit.register(self.stop)
        if history is not None:
            history.start()
        if self.telemetry is not None and self.telemetry.include_dashboard:
            try:
                page = AdminServer(self.telemetry.dashboard_port, history, retention)
            except OSError:
                page = AdminServer(0, history, retention)
            self._servers.append(page)
        if cached_path is not None and self.telemetry is not None:
            self._file = _file_beside(cached_path)
            about = {"apply_id": apply_id, "process": registry.this_process(), "url": server.url}
            write_own_file(self._file, json.dumps(about).encode())
        log.info("mesh admin server listening on %s", server.url)

    def stop(self) -> None:
        """Stop everything; recorded data is lost."""
        atexit.unregister(self.stop)
        history = self._servers[0].history if self._servers else None
        while self._servers:
            self._servers.pop().close()
        if history is not None:
            history.stop()
        if self._file:
            file, self._file = self._file, ""
            with suppress(OSError, ValueError):
                if json.loads(read_own_file(file))["process"] == registry.this_process():
                    os.unlink(file)

    def client(self, apply_id: str | None, cached_path: str | os.PathLike[str]) -> QueryEngineClient:
        """Return a client for the telemetry in this process, or for that of an equal job in the program that uses it.

        Raises:
            LaunchError: there is no such telemetry.
            PermissionError: another user wrote the file with its address, or could have written it.
        """
        if self.telemetry_url is not None:
            return QueryEngineClient(self.telemetry_url)
        try:
            about = json.loads(read_own_file(_file_beside(cached_path)))
        except FileNotFoundError:
            about = {}
        if about.get("apply_id") != apply_id or not registry.lives(about.get("process", "")):
            raise LaunchError(
                "the active job has no distributed telemetry, or the program that had it has ended: call "
                "job.enable_telemetry() before job.state()"
            )
        return QueryEngineClient(about["url"])


def _file_beside(cached_path: str | os.PathLike[str]) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(cached_path)), _FILE)


def _port(address: str | None) -> int:
    if address is None:
        return 0
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ValueError(f"admin_addr={address!r} has no port: write it as 127.0.0.1:1729")
    if host not in ("127.0.0.1", "localhost"):
        log.warning(
            "the mesh admin server of %s listens on 127.0.0.1:%s, for this user's programs alone", address, port
        )
    return int(port)
