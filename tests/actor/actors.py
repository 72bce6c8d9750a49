"""Actors that many tests use. A module of its own, without pytest: every rank that hosts one imports it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from monarch_kernel.actor import (
    Actor,
    Channel,
    Future,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_host,
)
from tests.waiting import patience

#: How long a test waits for what must happen (seconds); never reached when things work.
PATIENCE = patience(30.0)


class Basic(Actor):
    """A sync actor: answers, remembers, raises, and stays busy until somebody lets it go."""

    def __init__(self, tag: str = "") -> None:
        self.tag = tag
        self.notes: list[Any] = []

    @endpoint
    def echo(self, value: Any = None) -> Any:
        return value

    @endpoint
    def incremented(self, given: dict[str, Any]) -> dict[str, Any]:
        given["a"] += 1
        given["b"][1] = 2
        return given

    @endpoint
    def add(self, a: int, b: int = 1, *, c: int = 0) -> int:
        return a + b + c

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def get_tag(self) -> str:
        return self.tag

    @endpoint
    def where(self) -> dict[str, Any]:
        """All that the context tells of the running message."""
        here = context()
        return {
            "message_rank": current_rank().rank,
            "coords": dict(current_rank()),
            "size": current_size(),
            "spawn_rank": here.actor_instance.rank.rank,
            "spawn_coords": dict(here.actor_instance.rank),
            "name": here.actor_instance.name,
            "class_name": here.actor_instance.class_name,
            "actor_name": current_actor_name(),
            "proc_id": here.actor_instance.proc_id,
        }

    @endpoint
    def boom(self, message: str = "boom") -> None:
        raise ValueError(message)

    @endpoint
    def boom_at(self, ranks: list[int]) -> int:
        """Raises on some ranks of the addressed slice, answers on the others."""
        rank = current_rank().rank
        if rank in ranks:
            raise ValueError(f"boom on {rank}")
        return rank * 10

    @endpoint
    def note(self, value: Any) -> None:
        self.notes.append(value)

    @endpoint
    def get_notes(self) -> list[Any]:
        return self.notes

    @endpoint
    def sleep(self, started: Any, seconds: float = 600.0) -> str:
        """Says that it runs, then blocks in a system call."""
        started.send(os.getpid())
        time.sleep(seconds)
        return "slept"

    @endpoint
    def spin(self, started: Any) -> None:
        """Says that it runs, then computes for ever."""
        started.send(os.getpid())
        n = 0
        while True:
            n += 1

    @endpoint
    def thread(self) -> tuple[str, bool]:
        current = threading.current_thread()
        return current.name, current is threading.main_thread()


class AsyncBasic(Actor):
    """The async counterpart."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.events: dict[str, asyncio.Event] = {}

    @endpoint
    async def echo(self, value: Any = None) -> Any:
        return value

    @endpoint
    async def boom(self, message: str = "boom") -> None:
        raise ValueError(message)

    @endpoint
    async def step(self, name: str) -> None:
        """Gives way several times between its beginning and its end."""
        self.notes.append(f"start {name}")
        for _ in range(5):
            await asyncio.sleep(0)
        self.notes.append(f"end {name}")

    @endpoint
    async def get_notes(self) -> list[Any]:
        return self.notes

    @endpoint
    async def sleep(self, started: Any, seconds: float = 600.0) -> str:
        started.send(os.getpid())
        await asyncio.sleep(seconds)
        return "slept"


class Concurrent(Actor):
    """Endpoints that overlap."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.inside = 0
        self.most = 0
        self.cancelled = 0

    @concurrent_endpoint
    async def wait_open(self) -> int:
        """Returns once ``open`` was called; the actor takes other messages meanwhile."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1
        return self.most

    @concurrent_endpoint
    async def boom(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("concurrent boom")

    @concurrent_endpoint(explicit_response_port=True)
    async def boom_port(self, port: Any) -> None:
        await asyncio.sleep(0)
        raise ValueError("nobody catches this")

    @endpoint
    async def count(self) -> int:
        return self.inside

    @endpoint
    async def open(self) -> None:
        self.opened.set()


class MainThread(Actor):
    """Runs on the main thread of its proc."""

    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    def spin(self, started: Any) -> None:
        started.send(os.getpid())
        n = 0
        while True:
            n += 1

    @endpoint
    def sleep(self, started: Any) -> None:
        started.send(os.getpid())
        time.sleep(600)

    @endpoint
    def on_main(self) -> bool:
        return threading.current_thread() is threading.main_thread()


class Cleaned(Actor):
    """Says through a port when and how it is cleaned up."""

    def __init__(self, port: Any, name: str) -> None:
        self.port = port
        self.name = name

    @endpoint
    def ping(self) -> str:
        return self.name

    @endpoint
    def exit(self) -> None:
        raise SystemExit(3)

    def __cleanup__(self, error: BaseException | None) -> None:
        self.port.send((self.name, None if error is None else type(error).__name__))


class Parent(Actor):
    """Spawns, calls and owns actors of its own."""

    def __init__(self) -> None:
        self.children: list[Any] = []

    @endpoint
    def spawn_on(self, procs: Any, cls: type, *args: Any) -> Any:
        mesh = procs.spawn("child", cls, *args)
        mesh.initialized.get()
        self.children.append(mesh)
        return mesh

    @endpoint
    def spawn_here(self, cls: type, *args: Any) -> Any:
        mesh = context().actor_instance.proc.spawn("local", cls, *args)
        self.children.append(mesh)
        return mesh

    @endpoint
    def spawn_procs(self, n: int, cls: type, *args: Any) -> Any:
        """A mesh of processes of this actor's own, with an actor on it."""
        procs = this_host().spawn_procs(per_host={"sub": n}, name="sub")
        self.children.append(procs)
        return procs.spawn("grandchild", cls, *args)

    @endpoint
    def call(self, mesh: Any, name: str, *args: Any) -> Any:
        return list(getattr(mesh, name).call(*args).get(PATIENCE).values())

    @endpoint
    def forward(self, port: Any, value: Any) -> None:
        port.send(value)

    def __supervise__(self, failure: Any) -> bool:
        return True


def started(mesh: Any, endpoint: str = "sleep", *args: Any) -> Future[Any]:
    """A pending call that is known to run on every rank of the mesh."""
    port, receiver = Channel.open()
    call = getattr(mesh, endpoint).call(port, *args)
    for _ in range(len(mesh)):
        receiver.recv().get(PATIENCE)
    return call


@contextmanager
def hook(function: Any) -> Iterator[None]:
    """The unhandled fault hook replaced, for a while."""
    import monarch_kernel.actor as actor

    before = actor.unhandled_fault_hook
    actor.unhandled_fault_hook = function
    try:
        yield
    finally:
        actor.unhandled_fault_hook = before
