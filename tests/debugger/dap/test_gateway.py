"""debugpy in a rank, reached through the runtime by an IDE."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, endpoint, this_host
from monarch_kernel.debugger.dap import gateway as gateways
from monarch_kernel.debugger.dap.gateway import Gateway, belongs_to
from tests.conftest import wait_until
from tests.debugger.dap.client import Ide
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


def attach(ide: Ide, line: int | None = None) -> None:
    ide.ask("initialize", clientID="test", adapterID="debugpy", linesStartAt1=True, columnsStartAt1=True)
    attached = ide.send("attach", justMyCode=False)
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
    attach(ide, line_of("y = x + 1"))
    called = workers.work.call(20)
    thread = ide.event("stopped")["threadId"]
    frame = ide.ask("stackTrace", threadId=thread)["stackFrames"][0]
    assert (frame["name"], frame["line"]) == ("work", line_of("y = x + 1"))
    assert ide.ask("evaluate", expression="x + 22", frameId=frame["id"])["result"] == "42"
    assert procs.slice(gpus=1).spawn("more", Worker).debugged.call_one().get(20)  # the runtime goes on meanwhile
    ide.ask("next", threadId=thread)
    ide.event("stopped")
    frame = ide.ask("stackTrace", threadId=thread)["stackFrames"][0]
    assert ide.ask("evaluate", expression="y", frameId=frame["id"])["result"] == "21"
    ide.ask("continue", threadId=thread)
    assert [value for _, value in called.get(20)] == [42, 42]
    assert [value for _, value in workers.debugged.call().get(20)] == [False, True]
    ide.close()
    gateway.close()


def test_a_lost_ide_strands_nobody_and_another_may_come() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    workers = procs.spawn("workers", Worker)
    gateway = Gateway(procs, 0)
    for _ in range(2):
        ide = Ide(gateway.address)
        attach(ide, line_of("return y * 2"))
        called = workers.work.call_one(1)
        ide.event("stopped")
        ide.close()
        assert called.get(20) == 4
    gateway.close()
    assert workers.work.call_one(2).get(20) == 6


def test_closing_the_gateway_lets_the_rank_go_on() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    workers = procs.spawn("workers", Worker)
    gateway = Gateway(procs, 0)
    ide = Ide(gateway.address)
    attach(ide, line_of("return y * 2"))
    called = workers.work.call_one(1)
    ide.event("stopped")
    address = gateway.address
    gateway.close()
    assert called.get(20) == 4
    assert ide.ended()
    ide.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    assert workers.work.call_one(2).get(20) == 6


def test_the_gateway_ends_with_its_rank(faults: Any) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    gateway = Gateway(procs, 1)
    ide = Ide(gateway.address)
    attach(ide)
    os.kill(gateway.begun.pid, 9)
    assert ide.ended()
    ide.close()
    wait_until(lambda: not gateway.is_open, "the gateway has ended")
    gateway.close()
    assert "SIGKILL" in str(faults.get(timeout=20).report())


def test_strangers_are_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    gateway = Gateway(procs, 0)
    monkeypatch.setattr(gateways, "belongs_to", lambda *_: False)
    ide = Ide(gateway.address)
    assert ide.ended()
    ide.close()
    gateway.close()


def test_the_users_of_loopback_connections_are_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted: list[socket.socket] = []
        thread = threading.Thread(target=lambda: accepted.append(server.accept()[0]))
        thread.start()
        with socket.create_connection(server.getsockname()) as client:
            thread.join()
            here, peer = server.getsockname(), client.getsockname()
            assert belongs_to(peer, here, {os.getuid()})
            assert not belongs_to(peer, here, {os.getuid() + 1})
            assert not belongs_to((peer[0], 1), here, {os.getuid()})
        accepted[0].close()


def test_a_rank_of_another_host_is_reached_through_the_runtime(workers: Start) -> None:
    procs = workers(2, "tcp").attach().spawn_procs({"gpus": 1})
    actors = procs.spawn("workers", Worker)
    gateway = Gateway(procs, 1)
    assert gateway.address[0] == "127.0.0.1"
    ide = Ide(gateway.address)
    attach(ide, line_of("return y * 2"))
    called = actors.work.call(1)
    thread = ide.event("stopped")["threadId"]
    assert ide.ask("stackTrace", threadId=thread)["stackFrames"][0]["name"] == "work"
    ide.ask("continue", threadId=thread)
    assert list(called.get(20).values()) == [4, 4]
    ide.close()
    gateway.close()
