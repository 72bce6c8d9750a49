"""``python -m monarch_kernel.engines.join.gateway_caller URL LOCK``: connect a machine's ranks to a meeting point.

A rank starts one such process per machine (``helper_process.GatewayCall``). The process ends when no rank of that
meeting point has existed for a while. If the address of the meeting point belongs to this machine and is free, the
process also runs the meeting point. The address of a job's first machine therefore needs no further setup. The process
reconnects when the connection is lost.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from monarch_kernel._version import __version__
from monarch_kernel.engines.join.announcements import announcements
from monarch_kernel.engines.join.frame_loop import FrameLoop
from monarch_kernel.engines.join.gateway_seal import Seal, SealBrokenError
from monarch_kernel.engines.join.join_gateway import JoinGateway
from monarch_kernel.engines.join.relay import JoinRelay
from monarch_kernel.protocol.gateway_messages import MeetAs, MeetClosed, MeetFrame, MeetOpen
from monarch_kernel.protocol.keys import KeyFileError, Keys, load_keys
from monarch_kernel.protocol.messages import Message, encode
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.link import Link, LinkError
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tcp import dial
from monarch_kernel.runtime.node.tcp.dial import resolve, split

#: The time without ranks after which the process ends (seconds). Launchers may restart ranks within this time.
IDLE = 5.0
#: The time limit of one attempt to connect, and the pause between two attempts (seconds).
_DIAL, _REST = 30.0, 1.0
#: The interval of checks for ranks, and for viewers whose keys are revoked (seconds).
_LOOK = 1.0
#: The maximum number of viewers that have not proved their keys; a new one replaces the oldest.
_STRANGERS = 64


class GatewayCaller:
    """The connection of this machine to a meeting point.

    Args:
        url: the URL of the meeting point.
        keys: the keys of this process.
        poller: carries messages to and from the meeting point.
        loop: carries messages to and from ranks.
    """

    def __init__(self, url: str, keys: Keys, poller: Poller, loop: FrameLoop) -> None:
        self.ended = threading.Event()
        self._url = url
        self._keys = keys
        self._poller = poller
        self._loop = loop
        self._viewers: dict[int, _Viewer] = {}  # by conversation; on the thread of the loop
        self._link = dial(poller, url, keys, self._on_message, self._on_close, _DIAL, steady=True)
        self._link.send(encode(MeetAs(__version__, False, socket.gethostname())))
        self._look()

    @property
    def why(self) -> str:
        """Return why the connection has ended, or could not be made so far."""
        return self._link.ended

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    # -- on the polling thread -------------------------------------------------------------------------

    def _on_message(self, _link: Link, message: Message, body: Body) -> None:
        match message:
            case MeetOpen(stream=stream):
                self._loop.call_soon(lambda: self._open(stream))
            case MeetFrame(stream=stream):
                frame = bytes(body)
                self._loop.call_soon(lambda: self._on_frame(stream, frame))
            case MeetClosed(stream=stream):
                self._loop.call_soon(lambda: self._end(stream))
            case _:
                raise LinkError(f"a {type(message).__name__} is not for a machine at a meeting point")

    def _on_close(self, _link: Link) -> None:
        self._loop.call_soon(self._end_all)
        self.ended.set()

    def _look(self) -> None:
        if not self.ended.is_set():
            self._loop.call_soon(self._end_revoked)
            self._poller.call_later(_LOOK, self._look)

    # -- on the thread of the loop ---------------------------------------------------------------------

    def _open(self, stream: int) -> None:
        strangers = [number for number, viewer in self._viewers.items() if not viewer.seal.proved]
        if len(strangers) >= _STRANGERS:
            self._refuse(strangers[0])
        seal = Seal(self._keys, False, "the viewer", lambda data: self._link.send(encode(MeetFrame(stream)), data))
        self._viewers[stream] = _Viewer(seal)

    def _on_frame(self, stream: int, data: bytes) -> None:
        viewer = self._viewers.get(stream)
        if viewer is None:
            return
        try:
            frames = viewer.seal.receive(data)
        except SealBrokenError:
            self._refuse(stream)
            return
        if viewer.relay is None and viewer.seal.proved:
            viewer.relay = JoinRelay(viewer.seal.send, self._loop, self._url)
        for frame in frames:
            assert viewer.relay is not None
            viewer.relay.on_frame(frame)

    def _refuse(self, stream: int) -> None:
        """End a conversation with a viewer that is not trusted, or no longer trusted."""
        self._end(stream)
        self._link.send(encode(MeetClosed(stream)))

    def _end_revoked(self) -> None:
        for stream in [stream for stream, viewer in self._viewers.items() if viewer.seal.is_revoked()]:
            self._refuse(stream)

    def _end(self, stream: int) -> None:
        viewer = self._viewers.pop(stream, None)
        if viewer is not None and viewer.relay is not None:
            viewer.relay.close()

    def _end_all(self) -> None:
        for stream in list(self._viewers):
            self._end(stream)


@dataclass
class _Viewer:
    """A conversation with a viewer. The relay is created when the viewer has proved its key."""

    seal: Seal
    relay: JoinRelay | None = None


def listen_here(poller: Poller, url: str, keys: Keys) -> JoinGateway | None:
    """Run the meeting point here, if its address belongs to this machine and is free."""
    host, port = split(url)
    with suppress(OSError):
        for _family, address in resolve(host, port):
            # Many machines resolve their own name to 127.0.1.1, which other machines cannot reach.
            aliased = address[0].startswith("127.") and not host.startswith(("127.", "localhost"))
            with suppress(OSError):
                here = "*" if aliased else address[0]
                at = f"tcp://[{here}]:{port}" if ":" in here else f"tcp://{here}:{port}"
                return JoinGateway(poller, at, keys, Audit(poller))
    return None


def call(url: str, say: Callable[[str], None]) -> None:
    """Stay connected to a meeting point until no rank has existed for ``IDLE`` seconds.

    Args:
        say: called with a line for the job's user.
    """
    ranks = _Ranks(url)
    try:
        keys = load_keys()
    except KeyFileError as error:
        say(f"the meeting point {url} cannot be called: {error}")
        ranks.wait_until_gone(threading.Event())
        return
    poller = Poller()
    loop = FrameLoop("monarch-join-meet", lambda error: say(f"a fault of the tools: {type(error).__name__}: {error}"))
    loop.start()
    point = listen_here(poller, url, keys)
    try:
        while True:
            caller = GatewayCaller(url, keys, poller, loop)
            if ranks.wait_until_gone(caller.ended, point):
                caller.close()
                return
            say(f"the meeting point {url} is not reached: {caller.why}; it is tried on")
            time.sleep(_REST)
            point = point or listen_here(poller, url, keys)
    finally:
        if point is not None:
            point.close()
        loop.close()
        poller.close()


class _Ranks:
    """The ranks of this machine that were prepared for a meeting point."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._last = time.monotonic()  # the last time that a rank existed

    def wait_until_gone(self, ended: threading.Event, point: JoinGateway | None = None) -> bool:
        """Wait until no rank has existed for ``IDLE`` seconds, or something has ended. Return whether the ranks are
        gone.

        Args:
            point: the meeting point; it stays as long as other machines are connected to it.
        """
        while True:
            over = ended.wait(_LOOK)
            if (point is not None and point.machine_count > 1) or any(
                each.meet == self._url for each in announcements()
            ):
                self._last = time.monotonic()
            elif time.monotonic() - self._last > IDLE:
                return True
            if over:
                return False


def main() -> None:
    """Run the command line."""
    url, lock = sys.argv[1], int(sys.argv[2])

    def say(text: str) -> None:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{text}\n".encode(), 0)

    call(url, say)


if __name__ == "__main__":
    main()
