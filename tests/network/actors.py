"""Actors that these tests put on hosts. A module of its own, without pytest: every rank imports it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

from monarch_kernel.actor import Actor, Channel, current_rank, endpoint, get_or_spawn_controller


class Remote(Actor):
    """Answers, remembers, calls others, and dies in the way that one asks for."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    @endpoint
    def host(self) -> str:
        return socket.gethostname()

    @endpoint
    def echo(self, value: Any = None) -> Any:
        return value

    @endpoint
    def size_of(self, value: Any) -> int:
        return len(value)

    @endpoint
    def note(self, value: Any) -> None:
        self.notes.append(value)

    @endpoint
    def get_notes(self) -> list[Any]:
        return self.notes

    @endpoint
    def boom(self, ranks: list[int]) -> str:
        if current_rank().rank in ranks:
            raise ValueError(f"no luck on {socket.gethostname()}")
        return "fine"

    @endpoint
    def ask(self, others: Any, value: Any) -> list[Any]:
        """What other actors echo."""
        return list(others.echo.call(value).get().values())

    @endpoint
    def relay(self, other: Any, size: int) -> int:
        """Send another actor so many bytes; how many it got."""
        return other.size_of.call_one(bytes(size)).get(60)

    @endpoint
    def tell_in_turn(self, others: Any, rounds: int) -> None:
        """Casts and direct calls to the same actors, in turn."""
        each = [others.slice(hosts=n) for n in range(others.size("hosts"))]
        for n in range(0, rounds, 2):
            others.note.broadcast(n)
            for one in each:
                one.note.broadcast(n + 1)
        others.echo.call().get(30)

    @endpoint
    def send(self, port: Any, value: Any) -> None:
        port.send(value)

    @endpoint
    def meet(self, ports: Any) -> Any:
        """Hand out a port; what somebody sends to it."""
        port, receiver = Channel.open()
        ports.send(port)
        return receiver.recv().get(30)

    @endpoint
    def hold(self, ports: Any) -> str:
        """Busy until somebody sends to the port that it hands out."""
        port, receiver = Channel.open()
        ports.send((current_rank().rank, socket.gethostname(), port))
        receiver.recv().get()
        return "held"

    @endpoint
    def shout(self, text: str) -> None:
        print(f"{text} from {socket.gethostname()}", flush=True)
        print(f"{text} complains from {socket.gethostname()}", file=sys.stderr, flush=True)

    @endpoint
    def breed(self) -> None:
        """Start children that would outlive this process if nobody looked after them."""
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"], check=True)

    @endpoint
    def common_pid(self) -> int:
        """Of the process that holds an actor which the whole job shares."""
        return get_or_spawn_controller("common", Remote).get(30).pid.call_one().get(30)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait_for(self, other: Any, ports: Any) -> str:
        """Call another actor, which stays busy; why that failed."""
        try:
            return f"it did not fail: {other.hold.call(ports).get(60)}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    @endpoint
    def own(self, hosts: Any, ports: Any) -> None:
        """Start procs on hosts that it was given, and keep them."""
        self.owned = hosts.spawn_procs(per_host={"inner": 1}).spawn("inner", Remote)
        ports.send(list(self.owned.host.call().get(30).values()))

    @endpoint
    def spawn_beside(self, hosts: Any) -> list[str]:
        """Procs of its own, on hosts that it was given: their host names."""
        mesh = hosts.spawn_procs(per_host={"inner": 1})
        names = list(mesh.spawn("inner", Remote).host.call().get(30).values())
        mesh.stop().get(30)
        return names

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def python(self) -> str:
        return os.environ.get("OTHER_PYTHON", "")

    @endpoint
    def modules(self) -> list[str]:
        return sorted(sys.modules)
