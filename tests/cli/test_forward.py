"""`monarch-kernel forward`: connections through it, to a server that listens on a host."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cli.conftest import Cli
from tests.waiting import patience


class Server:
    """Answers each connection with the digest of all that it sent, once it has ended its direction."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            while True:
                try:
                    connection = self._listener.accept()[0]
                except OSError:
                    return
                pool.submit(self._answer, connection)

    @staticmethod
    def _answer(connection: socket.socket) -> None:
        with connection:
            seen = hashlib.sha256()
            while data := connection.recv(65536):
                seen.update(data)
            connection.sendall(seen.hexdigest().encode() * 1000)

    def close(self) -> None:
        """Stop listening; may be called twice."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(patience(20))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def asked(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)  # the other direction stays
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_connections(run: Cli, job: str, server: Server) -> None:
    line = run.line("forward", job, f"{server.port}:0", "--rank", "3", "--per-host", "gpus=2", "--json")
    with subprocess.Popen(
        line, env=run.env, cwd=run.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        said = json.loads(process.stdout.readline())
        assert (said["listen"], said["host"], said["port"]) == ("127.0.0.1", 1, server.port)
        pieces = [os.urandom(3_000_000) for _ in range(4)]
        with ThreadPoolExecutor(len(pieces)) as pool:
            answers = list(pool.map(lambda data: asked(said["local"], data), pieces))
        assert answers == [hashlib.sha256(data).hexdigest().encode() * 1000 for data in pieces]
        assert asked(said["local"], b"") == hashlib.sha256().hexdigest().encode() * 1000

        server.close()
        with pytest.raises(ConnectionResetError):
            asked(said["local"], b"x")
        assert "refused a connection: Connection refused" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(30)) == 0
    with pytest.raises(ConnectionRefusedError):
        asked(said["local"], b"x")


def test_ports_that_cannot_be_had(run: Cli, job: str, server: Server) -> None:
    taken = run("forward", job, str(server.port))
    assert taken.returncode == 1 and f"{server.port}:0 takes any" in taken.stderr
    assert run("forward", job, "http").returncode == 2
    server.close()
    nothing = run("forward", job, f"{server.port}:0")
    assert nothing.returncode == 1 and "nothing listens at port" in nothing.stderr, nothing.stderr
