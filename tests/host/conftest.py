"""A bare controller for tests of the host agent: a node and real processes, no actors."""

from __future__ import annotations

import os
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import msgspec
import psutil
import pytest

from monarch_kernel.protocol import output_records
from monarch_kernel.protocol.messages import (
    OK,
    Bootstrap,
    GetLogs,
    GetStatus,
    KillProcs,
    LogText,
    OutputChunk,
    OutputEnd,
    ProcExited,
    ProcRef,
    ProcSpec,
    ProcStarted,
    ProcStatus,
    Shutdown,
    SpawnProcs,
    StopProcs,
)
from monarch_kernel.protocol.serialize import dumps, loads
from monarch_kernel.runtime.host import launch
from monarch_kernel.runtime.node.node import Node
from tests.waiting import patience

DEADLINE = patience(60.0)


class Answer:
    """The sink of one call."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.status: int | None = None
        self.body = b""
        self.death: Any = None
        self.peer = ""

    def on_reply(self, _rank: int, status: int, body: Any, _buffers: tuple[int, ...]) -> None:
        self.status, self.body = status, bytes(body)
        self._host.poke()

    def on_peer_dead(self, proc: str, death: Any) -> None:
        if proc == self.peer:
            self.death = death
            self._host.poke()

    @property
    def done(self) -> bool:
        return self.status is not None or self.death is not None


class Host:
    """A controller's node, its agent, and all that the agent has told."""

    def __init__(self) -> None:
        self.run_dir = launch.new_run_dir()
        self.node = Node("controller-test", "controller", self.run_dir, socket.gethostname())
        self.node.listen()
        self.started: dict[str, int] = {}
        self.exits: dict[str, ProcExited] = {}
        self.ended: set[str] = set()
        self.chunks: dict[str, list[tuple[int, bytes]]] = {}
        self.deaths: dict[str, Any] = {}
        self._news = threading.Condition()
        on_started = self.node.handlers[ProcStarted]
        on_exited = self.node.handlers[ProcExited]
        self.node.handlers.update(
            {
                ProcStarted: lambda link, m, b: (on_started(link, m, b), self._note(self.started, m.proc, m.pid)),
                ProcExited: lambda link, m, b: (self._note(self.exits, m.proc, m), on_exited(link, m, b)),
                OutputChunk: self._on_chunk,
                OutputEnd: lambda _link, m, _b: (self.ended.add(m.proc), self.poke()),
            }
        )
        self.node.on_peer_dead.append(lambda proc, death: self._note(self.deaths, proc, death))
        self.agent = launch.launch_local_agent(self.node)
        self._made = 0

    def _note(self, table: dict[str, Any], key: str, value: Any) -> None:
        table[key] = value
        self.poke()

    def _on_chunk(self, _link: Any, message: OutputChunk, body: Any) -> None:
        self.chunks.setdefault(message.proc, []).append((message.stream, bytes(body)))
        self.poke()

    def poke(self) -> None:
        with self._news:
            self._news.notify_all()

    def wait(self, what: Callable[[], Any], why: str = "") -> Any:
        """Until ``what()`` is true; every message of the agent looks again."""
        end = time.monotonic() + DEADLINE
        with self._news:
            while not (value := what()):
                left = end - time.monotonic()
                assert left > 0, f"not within {DEADLINE} s: {why or what}\n{self.agent._last_words()}"
                self._news.wait(min(left, 1.0))
        return value

    def spawn(self, count: int = 1, wait: bool = True, **options: Any) -> list[str]:
        """Start ranks; returns their ids."""
        self._made += 1
        refs: list[ProcRef] = []
        for rank in range(count):
            proc = f"test{self._made}.{rank}"
            address = os.path.join(self.run_dir, proc + ".sock")
            ref = self.agent.ref.beside(proc, address)
            self.node.expect(ref)
            refs.append(ref)
        fields = {"env": {}, "cwd": os.getcwd(), "sys_path": __import__("sys").path, **options}
        self.node.send(
            self.agent.ref.id,
            SpawnProcs(
                mesh="test",
                procs=[ProcSpec(ref.id, ref.address, rank) for rank, ref in enumerate(refs)],
                owner=self.node.ref,
                root=self.node.ref,
                labels=("gpus",),
                sizes=(count,),
                **fields,
            ),
        )
        names = [ref.id for ref in refs]
        if wait:
            self.wait(lambda: all(n in self.started or n in self.exits for n in names), "ranks start")
        return names

    def ask(self, peer: str, message: Callable[[int], Any], body: Any = b"") -> Answer:
        answer = Answer(self)
        answer.peer = peer
        self.node.send(peer, message(self.node.new_call(answer)), body)
        return answer

    def run(self, proc: str, function: Callable[[], Any]) -> Answer:
        """Begin to run a function in a rank (its globals are not available there: import inside)."""
        # By value, as a notebook's would go.
        plain = types.FunctionType(function.__code__, {"__builtins__": __builtins__}, "f", None, function.__closure__)
        plain.__module__ = "__main__"
        body = cloudpickle.dumps(plain)
        return self.ask(proc, lambda call: Bootstrap(call, 0, ("gpus",), (1,)), body)

    def call(self, proc: str, function: Callable[[], Any]) -> None:
        """Run a function in a rank, to its end."""
        answer = self.run(proc, function)
        self.wait(lambda: answer.done, "the function ends")
        assert answer.status == OK, answer.death or answer.body

    def kill(self, procs: list[str], reason: str = "") -> Answer:
        return self.ask(self.agent.ref.id, lambda call: KillProcs(call, procs, reason))

    def stop(self, procs: list[str], grace: float = 10.0) -> Answer:
        return self.ask(self.agent.ref.id, lambda call: StopProcs(call, procs, "test over", grace))

    def status(self, procs: list[str]) -> list[ProcStatus]:
        answer = self.ask(self.agent.ref.id, lambda call: GetStatus(call, procs))
        self.wait(lambda: answer.done, "status")
        return msgspec.msgpack.decode(loads(answer.body, ()), type=list[ProcStatus])

    def logs(self, procs: list[str]) -> list[LogText]:
        answer = self.ask(self.agent.ref.id, lambda call: GetLogs(call, procs))
        self.wait(lambda: answer.done, "logs")
        return msgspec.msgpack.decode(loads(answer.body, ()), type=list[LogText])

    def text(self, proc: str) -> str:
        return output_records.plain_text(self.chunks.get(proc, []))

    def exit_of(self, proc: str) -> ProcExited:
        return self.wait(lambda: self.exits.get(proc), f"{proc} exits")

    def shutdown(self) -> None:
        if self.agent.ref.id not in self.node.deaths:
            answer = self.ask(self.agent.ref.id, lambda call: Shutdown(call, 5.0))
            self.wait(lambda: answer.done, "shutdown")
        self.close()

    def close(self) -> None:
        self.node.close()
        self.agent.close()


@pytest.fixture
def host() -> Iterator[Host]:
    """An agent of its own; at the end nothing of it may be left."""
    made = Host()
    below = psutil.Process(made.agent.pid)
    try:
        yield made
    finally:
        family = [below, *_children(below)]
        made.shutdown()
        _gone, alive = psutil.wait_procs(family, timeout=DEADLINE)
        assert not alive, f"left behind: {alive}"
        assert not os.path.exists(made.run_dir)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


__all__ = ["DEADLINE", "Host", "dumps"]
