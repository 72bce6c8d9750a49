"""Connections between hosts that can be silenced, mended and reset: a forwarder in a process of its own.

Each host has a door here, at which all others reach it, and behind which its worker listens. A connection is one of
those between two hosts, known by the process that made it. While they are silenced, nothing of it is passed on and
no process is notified; what was sent meanwhile arrives when the wires are mended, unless a side has given up by then.

``python -m tests.chaos.wires`` takes commands as lines of JSON, answers each with one, and ends with its stdin.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import subprocess
import sys
from typing import Any

LOOPBACK = "127.0.0.1"
#: How much of one direction is kept here (bytes); more waits with its sender.
KEPT = 1 << 20
_RESET = struct.pack("ii", 1, 0)


class Wires:
    """The forwarder, as seen by the test that cuts connections."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _do(self, what: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def open(self, host: str) -> int:
        """A door for a host; gives its port."""
        return self._do("open", host)

    def aim(self, host: str, port: int) -> None:
        """What comes to a host's door goes to this port."""
        self._do("aim", host, port)

    def belongs(self, host: str, pid: int) -> None:
        """Connections of this process are those of a host."""
        self._do("belongs", host, pid)

    def silence(self, host: str, other: str = "") -> None:
        """Nothing passes any more between two hosts, or between a host and all others."""
        self._do("silence", host, other)

    def mend(self, host: str, other: str = "") -> None:
        """Undo ``silence``."""
        self._do("mend", host, other)

    def reset(self, host: str, other: str = "") -> int:
        """Reset all connections of a host (to one other host); gives how many there were."""
        return self._do("reset", host, other)

    def close(self) -> None:
        """End the forwarder, and all connections with it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


class _Wire:
    """One connection: from the process that made it to the worker behind the forwarder."""

    def __init__(self, near: socket.socket, source: str, target: str) -> None:
        self.ends: list[socket.socket | None] = [near, None]
        self.hosts = frozenset({source, target})
        self.target = target
        self.waiting = [bytearray(), bytearray()]  # for each end: what it has not taken yet
        self.over = [False, False]  # for each end: nothing more comes from it


class _Forwarder:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.doors: dict[str, socket.socket] = {}
        self.targets: dict[str, int] = {}
        self.owners: dict[int, str] = {}
        self.silent: set[tuple[str, str]] = set()
        self.wires: set[_Wire] = set()

    def run(self) -> None:
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is sys.stdin:
                    line = sys.stdin.readline()
                    if not line:
                        return
                    what, *arguments = json.loads(line)
                    print(json.dumps(getattr(self, what)(*arguments)), flush=True)
                elif isinstance(key.data, str):
                    self.accept(key.data)
                elif key.fileobj in key.data.ends:  # it may have ended in this very turn
                    self.move(key.data)

    # -- commands -----------------------------------------------------------------------------------

    def open(self, host: str) -> int:
        door = socket.create_server((LOOPBACK, 0))
        door.setblocking(False)
        self.doors[host] = door
        self.selector.register(door, selectors.EVENT_READ, host)
        return door.getsockname()[1]

    def aim(self, host: str, port: int) -> None:
        self.targets[host] = port

    def belongs(self, host: str, pid: int) -> None:
        self.owners[pid] = host

    def silence(self, host: str, other: str) -> None:
        self.silent.add((host, other))
        for wire in self.wires:
            self.look(wire)

    def mend(self, host: str, other: str) -> None:
        self.silent.discard((host, other))
        for wire in list(self.wires):
            self.look(wire)

    def reset(self, host: str, other: str) -> int:
        mine = [wire for wire in self.wires if {host, *filter(None, [other])} <= wire.hosts]
        for wire in mine:
            self.end(wire, reset=True)
        return len(mine)

    # -- connections --------------------------------------------------------------------------------

    def is_silent(self, wire: _Wire) -> bool:
        return any({host, *filter(None, [other])} <= wire.hosts for host, other in self.silent)

    def accept(self, host: str) -> None:
        try:
            near, peer = self.doors[host].accept()
        except OSError:
            return
        near.setblocking(False)
        wire = _Wire(near, self.owner_of(peer[1], near.getsockname()[1]), host)
        self.wires.add(wire)
        self.look(wire)

    def owner_of(self, port: int, door: int) -> str:
        """The host of the process that has connected from this port."""
        here, there = (f"0100007F:{number:04X}" for number in (port, door))
        with open("/proc/net/tcp") as table:
            rows = [line.split() for line in table]
        inode = next((row[9] for row in rows if row[1:3] == [here, there]), "")
        for pid, host in self.owners.items():
            try:
                if any(_link(f"/proc/{pid}/fd/{fd}") == f"socket:[{inode}]" for fd in os.listdir(f"/proc/{pid}/fd")):
                    return host
            except OSError:  # that process has ended
                continue
        return "?"

    def look(self, wire: _Wire) -> None:
        """Wait for what can be moved on a connection now."""
        silent = self.is_silent(wire)
        if not silent and wire.ends[1] is None:
            far = socket.socket()
            try:
                far.connect((LOOPBACK, self.targets[wire.target]))
            except OSError:
                far.close()
                self.end(wire, reset=True)
                return
            far.setblocking(False)
            wire.ends[1] = far
        for at, end in enumerate(wire.ends):
            if end is None:
                continue
            events = 0
            if not silent:
                if wire.waiting[at]:
                    events |= selectors.EVENT_WRITE
                if not wire.over[at] and len(wire.waiting[1 - at]) < KEPT:
                    events |= selectors.EVENT_READ
            known = self.selector.get_map().get(end)
            if known is not None and not events:
                self.selector.unregister(end)
            elif known is None and events:
                self.selector.register(end, events, wire)
            elif known is not None and known.events != events:
                self.selector.modify(end, events, wire)

    def move(self, wire: _Wire) -> None:
        """Read and write what can be."""
        for at in (0, 1):
            end, other = wire.ends[at], wire.waiting[1 - at]
            if end is None or wire.over[at] or len(other) >= KEPT:
                continue
            try:
                data = end.recv(1 << 16)
                other += data
                wire.over[at] = not data
            except BlockingIOError:
                pass
            except OSError:
                self.end(wire, reset=True)
                return
        for at in (0, 1):
            end, mine = wire.ends[at], wire.waiting[at]
            if end is None or not mine:
                continue
            try:
                del mine[: end.send(mine)]
            except BlockingIOError:
                pass
            except OSError:
                self.end(wire, reset=True)
                return
        if any(wire.over[at] and not wire.waiting[1 - at] for at in (0, 1)):
            self.end(wire)
        else:
            self.look(wire)

    def end(self, wire: _Wire, reset: bool = False) -> None:
        self.wires.discard(wire)
        for at, end in enumerate(wire.ends):
            if end is not None:
                if end in self.selector.get_map():
                    self.selector.unregister(end)
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()
                wire.ends[at] = None


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


if __name__ == "__main__":
    _Forwarder().run()
