"""Every kind of death, in one place: an actor that dies on request, and what the death should look like."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from monarch_kernel.actor import Actor, endpoint

#: Deaths of the whole process.
PROCESS_KINDS = ("sigkill", "segfault", "os_exit", "lost_socket")
#: Deaths of the actor alone.
ACTOR_KINDS = ("sys_exit", "base_exception", "broadcast_exception")
KINDS = PROCESS_KINDS + ACTOR_KINDS


class Fatal(BaseException):
    """No Exception, so it ends the actor that raises it."""


class Mortal(Actor):
    """Answers, and dies in the way that one asks for."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def sleep(self, seconds: float) -> None:
        import time

        time.sleep(seconds)

    @endpoint
    def hold(self, gate: Any) -> str:
        """Stay busy until a message arrives at the port that it hands out."""
        from monarch_kernel.actor import Channel

        port, receiver = Channel.open()
        gate.send(port)
        receiver.recv().get()
        return "held"

    @endpoint
    def die(self, kind: str) -> None:
        die(kind)


def die(kind: str) -> None:
    """Die in this way, in an endpoint."""
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "os_exit":
        os._exit(3)
    elif kind == "lost_socket":
        _close_all_sockets()
    elif kind == "sys_exit":
        sys.exit(4)
    elif kind == "base_exception":
        raise Fatal("enough")
    elif kind == "broadcast_exception":
        raise ValueError("nobody asked")
    elif kind == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise ValueError(f"no such death: {kind}")


def _close_all_sockets() -> None:
    """What a broken network does, as far as a process on one host can feel it."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


@dataclass(frozen=True)
class Death:
    """One way to die."""

    kind: str

    @property
    def of_process(self) -> bool:
        """Whether the whole process goes, and not the actor alone."""
        return self.kind in PROCESS_KINDS

    def strike(self, mesh: Any) -> None:
        """Have every actor of a mesh (or slice) of ``Mortal`` die, without waiting."""
        if self.kind == "broadcast_exception" or self.of_process:
            mesh.die.broadcast(self.kind)
        else:
            mesh.die.call(self.kind)
