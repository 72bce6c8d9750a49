"""Ports of the loopback interface, which every user of the machine can connect to."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import monarch_kernel
from monarch_kernel.launchers import tunnel
from monarch_kernel.launchers.tunnel import Tunnels
from tests.conftest import children, wait_until
from tests.otheruser import OtherUser

ROOT = Path(monarch_kernel.__file__).parent.parent
#: What listens at TCP ports, by what it asks of who connects.
LISTENERS = {
    "monarch_kernel/launchers/tunnel.py": "is_own",
    "monarch_kernel/launchers/port_forward.py": "is_own",
    "monarch_kernel/debugger/dap/gateway.py": "is_own",  # and a token
    "monarch_kernel/watch/admin.py": "is_own",
    "monarch_kernel/watch/metrics.py": "compare_digest",  # Prometheus may be another user's
    "monarch_kernel/runtime/node/tcp/listener.py": "admitted",
    "monarch_kernel/runtime/transfer/tcp.py": "admit",  # a token
    "monarch_kernel/runtime/spmd/member.py": "TCPStore",  # it only holds a port for torch's store, which asks nothing
}
_SERVERS = {"create_server", "start_server", "ThreadingHTTPServer", "HTTPServer"}
_LISTENING = re.compile("|".join([*_SERVERS, "listen"]).encode())
_OF_TCP = {"AF_INET", "AF_INET6"}

CONNECT = """
port = int(sys.argv[1])
for number in range(40):
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(20)
        sock.sendall(b"hello")
        print(sock.recv(1000))
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"hello")  # and closes first: the system forgets whose that was
"""


def names_in(module: Path) -> set[str]:
    """Every name and attribute that a module uses."""
    nodes = list(ast.walk(ast.parse(module.read_bytes())))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


def test_each_listener_asks_who_connects() -> None:
    modules = [path for package in ("monarch_kernel", "workspace_sync") for path in (ROOT / package).rglob("*.py")]
    listening = [path for path in modules if _LISTENING.search(path.read_bytes())]
    used = {str(path.relative_to(ROOT)): names_in(path) for path in listening}
    tcp = {path for path, names in used.items() if names & _SERVERS or (names & _OF_TCP and "listen" in names)}
    assert tcp == set(LISTENERS)
    assert {path: LISTENERS[path] for path in tcp if LISTENERS[path] not in used[path]} == {}


@pytest.fixture
def tunnels() -> Iterator[Tunnels]:
    made = Tunnels()
    yield made
    made.close()


def echoed(sock: socket.socket) -> bytes:
    sock.settimeout(60)
    sock.sendall(b"hello")
    return sock.recv(1000)


def test_a_tunnel_carries_nothing_of_another_user(tunnels: Tunnels, other_user: OtherUser) -> None:
    url = tunnels.to("tcp://node0:1", ["tee", "/dev/null"])  # as ssh -W would, to a server that echoes
    port = int(url.rpartition(":")[2])
    before = children(os.getpid())
    assert set(other_user.run(CONNECT, port).splitlines()) <= {"b''"}
    assert children(os.getpid()) == before
    with socket.create_connection(("127.0.0.1", port)) as sock:
        assert echoed(sock) == b"hello"


def test_a_tunnel_carries_so_many_at_a_time(tunnels: Tunnels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "MOST", 3)
    port = int(tunnels.to("tcp://node0:1", ["tee", "/dev/null"]).rpartition(":")[2])
    before = children(os.getpid())
    with ExitStack() as open_ones:
        socks = [open_ones.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]
        answers = [echoed_or_not(sock) for sock in socks]
        assert answers == [b"hello"] * 3 + [b""] * 5
        assert len(children(os.getpid()) - before) == 3

    def carries_again() -> bool:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            return echoed_or_not(sock) == b"hello"

    wait_until(carries_again, "there is room again")


def echoed_or_not(sock: socket.socket) -> bytes:
    try:
        return echoed(sock)
    except ConnectionError:
        return b""
