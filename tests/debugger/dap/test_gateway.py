"""debugpy in a rank, reached through the runtime by an IDE."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, endpoint, this_host
from monarch_kernel.debugger.dap import gateway as gateways
from monarch_kernel.debugger.dap.gateway import Gateway
from monarch_kernel.debugger.dap.messages import frame
from monarch_kernel.protocol import socket_peers
from monarch_kernel.protocol.socket_peers import belongs_to
from tests.conftest import wait_until
from tests.debugger.dap.client import Ide
from tests.otheruser import OtherUser
from tests.waiting import patience
from tests.workers import Start


class Worker(Actor):
    """Has a line to stop at."""

    @endpoint
    def work(self, x: int) -> int:
        y = x + 1
        return y * 2

    @endpoint
    def debugged(self) -> bool:
        return "pydevd" in sys.modules


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def attach(ide: Ide, gateway: Gateway, line: int | None = None) -> None:
    ide.ask("initialize", clientID="test", adapterID="debugpy", linesStartAt1=True, columnsStartAt1=True)
    attached = ide.send("attach", justMyCode=False, token=gateway.token)
    ide.event("initialized")
    if line is not None:
        ide.ask("setBreakpoints", source={"path": __file__}, breakpoints=[{"line": line}])
    ide.ask("configurationDone")
    ide.reply(attached)


def test_an_ide_stops_a_rank_steps_and_goes_on() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)
    gateway = Gateway(procs, 1)
    ide = Ide(gateway.address)
    attach(ide, gateway, line_of("y = x + 1"))
    called = workers.work.call(20)
    thread = ide.event("stopped")["threadId"]
    frame = ide.ask("stackTrace", threadId=thread)["stackFrames"][0]
    assert (frame["name"], frame["line"]) == ("work", line_of("y = x + 1"))
    assert ide.ask("evaluate", expression="x + 22", frameId=frame["id"])["result"] == "42"
    assert (
        procs.slice(gpus=1).spawn("more", Worker).debugged.call_one().get(patience(20))
    )  # the runtime goes on meanwhile
    ide.ask("next", threadId=thread)
    ide.event("stopped")
    frame = ide.ask("stackTrace", threadId=thread)["stackFrames"][0]
    assert ide.ask("evaluate", expression="y", frameId=frame["id"])["result"] == "21"
    ide.ask("continue", threadId=thread)
    assert [value for _, value in called.get(patience(20))] == [42, 42]
    assert [value for _, value in workers.debugged.call().get(patience(20))] == [False, True]
    ide.close()
    gateway.close()


def test_a_lost_ide_leaves_no_thread_stopped_and_another_may_connect() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    workers = procs.spawn("workers", Worker)
    gateway = Gateway(procs, 0)
    for _ in range(2):
        ide = Ide(gateway.address)
        attach(ide, gateway, line_of("return y * 2"))
        called = workers.work.call_one(1)
        ide.event("stopped")
        ide.close()
        assert called.get(patience(20)) == 4
    gateway.close()
    assert workers.work.call_one(2).get(patience(20)) == 6


def test_closing_the_gateway_lets_the_rank_go_on() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    workers = procs.spawn("workers", Worker)
    gateway = Gateway(procs, 0)
    ide = Ide(gateway.address)
    attach(ide, gateway, line_of("return y * 2"))
    called = workers.work.call_one(1)
    ide.event("stopped")
    address = gateway.address
    gateway.close()
    assert called.get(patience(20)) == 4
    assert ide.ended()
    ide.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    assert workers.work.call_one(2).get(patience(20)) == 6


def test_the_gateway_ends_with_its_rank(faults: Any) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    gateway = Gateway(procs, 1)
    ide = Ide(gateway.address)
    attach(ide, gateway)
    os.kill(gateway.begun.pid, 9)
    assert ide.ended()
    ide.close()
    wait_until(lambda: not gateway.is_open, "the gateway has ended")
    gateway.close()
    assert "SIGKILL" in str(faults.get(timeout=20).report())


def stranger(gateway: Gateway, token: object = None, command: str = "attach") -> Ide:
    """A client that goes on without the token; what it is told."""
    ide = Ide(gateway.address)
    said = ide.ask("initialize", adapterID="debugpy")
    assert said["supportsConfigurationDoneRequest"], "the answer is debugpy's own"
    given = {} if token is None else {"token": token}
    reply = ide.refused(ide.send(command, justMyCode=False, **given))
    assert 'as the property "token" of the launch configuration' in reply["message"]
    assert reply["body"]["error"]["showUser"]
    assert ide.ended()
    return ide


def test_a_client_without_the_token_does_not_reach_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "HANDOVER", 0.05)
    procs = this_host().spawn_procs({"gpus": 1})
    workers = procs.spawn("workers", Worker)
    gateway = Gateway(procs, 0)
    owner = Ide(gateway.address)
    attach(owner, gateway, line_of("y = x + 1"))
    called = workers.work.call_one(20)
    thread = owner.event("stopped")["threadId"]
    for given, command in ((None, "attach"), ("x", "attach"), (7, "attach"), (gateway.token, "evaluate")):
        stranger(gateway, given, command).close()
    idle = [socket.create_connection(gateway.address) for _ in range(3 * gateways.MOST_UNKNOWN)]
    idle[0].sendall(b"Content-Length: -1\r\n\r\n")
    idle[1].sendall(b"Content-Length: 6\r\n\r\n[[[[[[")
    idle[2].sendall(b"x" * (gateways._MOST_BYTES + 1))
    second = Ide(gateway.address)
    refused = second.refused(second.send("attach", token=gateway.token))
    assert refused["message"] == "another client debugs this rank: end its session first"
    second.close()
    # The owner's session has gone on all the while.
    top = owner.ask("stackTrace", threadId=thread)["stackFrames"][0]
    assert owner.ask("evaluate", expression="x + 22", frameId=top["id"])["result"] == "42"
    owner.ask("continue", threadId=thread)
    assert called.get(patience(20)) == 42
    owner.close()
    for sock in idle:
        sock.close()
    gateway.close()


def test_debugpy_listens_at_no_port() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    gateway = Gateway(procs, 0)
    folder = Path(f"/proc/{gateway.begun.pid}/fd")
    names = [os.readlink(entry) for entry in folder.iterdir()]
    inodes = {name.removeprefix("socket:[").rstrip("]") for name in names if name.startswith("socket:")}
    for table in ("tcp", "tcp6"):
        listed = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        assert not [line for line in listed if line[9] in inodes]
    gateway.close()


def test_another_user_is_hung_up_on(other_user: OtherUser) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    gateway = Gateway(procs, 0)
    say = frame({"type": "request", "seq": 1, "command": "initialize", "arguments": {}}).decode()
    code = """
    port, say = int(sys.argv[1]), sys.argv[2].encode()
    for _ in range(20):
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as sock:
            sock.settimeout(20)
            sock.sendall(say)
            print(sock.recv(1000))
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(say)  # and closes first: the system forgets whose that was
    """
    assert set(other_user.run(code, gateway.address[1], say).splitlines()) <= {"b''"}
    ide = Ide(gateway.address)
    attach(ide, gateway)
    ide.close()
    gateway.close()


def test_the_users_of_loopback_connections_are_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted = server.accept()[0]
        here, peer = server.getsockname(), client.getsockname()
        assert belongs_to(peer, here, {os.getuid()})
        assert not belongs_to(peer, here, {os.getuid() + 1})
        assert not belongs_to((peer[0], 1), here, {os.getuid()})
        client.close()
        accepted.close()
        state = [line.split()[3] for line in Path("/proc/net/tcp").read_text().splitlines() if _is(line, peer, here)]
        assert state == ["06"], "it is in TIME_WAIT, listed with uid 0"
        assert not belongs_to(peer, here, {0, os.getuid()})


def _is(line: str, peer: tuple[str, int], here: tuple[str, int]) -> bool:
    return line.split()[1:3] == [socket_peers._hex(peer), socket_peers._hex(here)]


def test_a_rank_of_another_host_is_reached_through_the_runtime(workers: Start) -> None:
    procs = workers(2, "tcp").attach().spawn_procs({"gpus": 1})
    actors = procs.spawn("workers", Worker)
    gateway = Gateway(procs, 1)
    assert gateway.address[0] == "127.0.0.1"
    ide = Ide(gateway.address)
    attach(ide, gateway, line_of("return y * 2"))
    called = actors.work.call(1)
    thread = ide.event("stopped")["threadId"]
    assert ide.ask("stackTrace", threadId=thread)["stackFrames"][0]["name"] == "work"
    ide.ask("continue", threadId=thread)
    assert list(called.get(patience(20)).values()) == [4, 4]
    ide.close()
    gateway.close()
