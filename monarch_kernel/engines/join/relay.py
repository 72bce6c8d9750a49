"""Connect a viewer to the ranks of another machine through the standard streams of a remote command.

The viewer starts ``python -m monarch_kernel.engines.join.relay`` on the machine by ssh, srun or the like, which
authenticate the user and protect the connection. Nothing listens on the network. The relay ends with the connection.
(At a meeting point, ``gateway_caller`` has a relay for each viewer.) Frames are as in ``frame_loop``, and begin with
the number of the rank that they are from or for; 0 is the relay itself, with JSON.

For a fast start, this module imports only the standard library and small modules of this package.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from monarch_kernel._version import __version__
from monarch_kernel.engines.join.announcements import RankAnnouncement, announcements
from monarch_kernel.engines.join.frame_loop import FrameLink, FrameLoop
from monarch_kernel.engines.join.rank_machines import Asked, greet, read_stacks, refreshed

CHANNEL = struct.Struct("<I")
_CHUNK = 1 << 16


class JoinRelay:
    """The ranks of this machine, for one viewer.

    Args:
        send: sends a frame with these parts to the viewer.
        loop: carries messages of the ranks; ``on_frame`` and ``close`` are called on its thread.
        meet: include only ranks that were prepared for this meeting point; "": all ranks of this user.
    """

    def __init__(self, send: Callable[..., None], loop: FrameLoop, meet: str = "") -> None:
        self._send = send
        self._loop = loop
        self._meet = meet
        self._asked: Asked = {}
        self._links: dict[int, FrameLink] = {}
        self._last = 0
        self._closed = False
        self._tell({"version": __version__, "host": socket.gethostname()})

    def _tell(self, message: dict[str, object]) -> None:
        self._send(CHANNEL.pack(0), json.dumps(message).encode())

    def _is_open_to(self, each: RankAnnouncement) -> bool:
        return self._meet in ("", each.meet)

    def on_frame(self, frame: bytes) -> None:
        """Handle a frame of the viewer."""
        (channel,) = CHANNEL.unpack_from(frame)
        body = frame[CHANNEL.size :]
        if channel:
            link = self._links.get(channel)
            if link is not None:
                link.send(body)
            return
        asked = json.loads(body)
        match asked["do"]:
            case "find":
                found = [asdict(each) for each in refreshed(self._asked) if self._is_open_to(each)]
                self._tell({"call": asked["call"], "found": found})
            case "connect":
                threading.Thread(target=self._connect, args=(asked,), name="monarch-join-greet", daemon=True).start()
            case "stacks":
                threading.Thread(target=self._read, args=(asked,), name="monarch-join-stacks", daemon=True).start()
            case "close":
                link = self._links.get(asked["channel"])
                if link is not None:
                    link.close()
            case _:
                pass  # of a later version

    def _connect(self, asked: dict[str, Any]) -> None:
        """Connect to ranks on a separate thread, because some may not answer for seconds."""
        wanted = {(each["pid"], each["space"]) for each in asked["ranks"]}
        answers: list[dict[str, Any]] = []
        chosen = [each for each in announcements() if (each.pid, each.space) in wanted and self._is_open_to(each)]
        for found, sock in greet(chosen):
            self._last += 1
            channel = self._last
            answers.append({"channel": channel, "rank": found.plain()})
            self._links[channel] = self._loop.add(
                sock, lambda _link, frame, at=channel: self._send(CHANNEL.pack(at), frame)
            )
        self._tell({"call": asked["call"], "connected": answers})
        for each in answers:  # only now: the viewer must know a rank before it is told that it has gone
            channel = each["channel"]
            link = self._links[channel]
            link.on_closed = lambda _link, at=channel: self._on_closed(at)
            if link.closed:
                self._on_closed(channel)
        if self._closed:  # the viewer went meanwhile
            self.close()

    def _read(self, asked: dict[str, Any]) -> None:
        open_to_it = {each.pid for each in announcements() if self._is_open_to(each)}
        found = read_stacks(open_to_it.intersection(asked["pids"]), asked["native"], asked["timeout"])
        self._tell({"call": asked["call"], "stacks": {str(pid): list(read) for pid, read in found.items()}})

    def _on_closed(self, channel: int) -> None:
        self._links.pop(channel, None)
        self._tell({"closed": channel})

    def close(self) -> None:
        """Close the connections to all ranks after the viewer has left."""
        self._closed = True
        for link in list(self._links.values()):
            link.close()


def announcement_key(announced: RankAnnouncement) -> dict[str, int]:
    """Return the key of a rank at the relay of its machine."""
    return {"pid": announced.pid, "space": announced.space}


def main() -> None:
    """Serve the viewer at standard input and output until it leaves."""
    own, viewer = socket.socketpair()
    output = os.dup(1)
    os.dup2(2, 1)  # what else writes there must not get between the frames
    loop = FrameLoop("monarch-join-relay", lambda error: print(f"{type(error).__name__}: {error}", file=sys.stderr))
    loop.start()
    ended = threading.Event()
    link = loop.add(viewer, lambda _link, frame: relay.on_frame(frame))  # none comes before the relay has said hello
    link.on_closed = lambda _link: ended.set()
    relay = JoinRelay(link.send, loop)
    threading.Thread(target=_copy, args=(0, own.fileno(), own), daemon=True).start()
    threading.Thread(target=_copy, args=(own.fileno(), output, own), daemon=True).start()
    ended.wait()
    loop.close()


def _copy(source: int, target: int, end: socket.socket) -> None:
    """Copy bytes until the end of the source, then end the connection."""
    with suppress(OSError):
        while data := os.read(source, _CHUNK):
            while data:
                data = data[os.write(target, data) :]
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
