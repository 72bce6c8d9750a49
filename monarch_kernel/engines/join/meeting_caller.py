"""``python -m monarch_kernel.engines.join.meeting_caller URL LOCK``: brings a machine's ranks to a meeting point.

One such process runs on each machine, started by a rank (``meeting_call``), until no rank of that meeting point has
been there for a while. If the meeting point's address is this machine's, and nobody listens there, it is the meeting
point, too; so an address of a job's first machine needs nothing else. It dials again when the connection is lost.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from monarch_kernel._version import __version__
from monarch_kernel.engines.join.announcements import announcements
from monarch_kernel.engines.join.frame_loop import FrameLoop
from monarch_kernel.engines.join.meeting_point import MeetingPoint
from monarch_kernel.engines.join.relay import JoinRelay
from monarch_kernel.protocol.keys import KeyFileError, Keys, load_keys
from monarch_kernel.protocol.meeting import MeetAs, MeetClosed, MeetFrame, MeetOpen
from monarch_kernel.protocol.messages import Message, encode
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.link import Link
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tcp import dial
from monarch_kernel.runtime.node.tcp.addresses import resolve, split

#: How long no rank is there until the process ends: launchers start ranks again (seconds).
IDLE = 5.0
#: How long one dial tries, and how long it rests between two (seconds).
_DIAL, _REST = 30.0, 1.0
#: How often it looks for ranks (seconds).
_LOOK = 1.0


class MeetingCaller:
    """This machine at a meeting point.

    Args:
        url: of the meeting point.
        keys: of this process.
        poller: carries messages to and from the meeting point.
        loop: the same for ranks.
    """

    def __init__(self, url: str, keys: Keys, poller: Poller, loop: FrameLoop) -> None:
        self.ended = threading.Event()
        self._url = url
        self._loop = loop
        self._relays: dict[int, JoinRelay] = {}  # by conversation; on the thread of the loop
        self._link = dial(poller, url, keys, self._on_message, self._on_close, _DIAL, steady=True)
        self._link.send(encode(MeetAs(__version__, False, socket.gethostname())))

    @property
    def why(self) -> str:
        """Why the connection has ended, or has not been made so far."""
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
                raise ValueError(f"a {type(message).__name__} is not for a machine at a meeting point")

    def _on_close(self, _link: Link) -> None:
        self._loop.call_soon(self._end_all)
        self.ended.set()

    # -- on the thread of the loop ---------------------------------------------------------------------

    def _open(self, stream: int) -> None:
        self._relays[stream] = JoinRelay(
            lambda *parts: self._link.send(encode(MeetFrame(stream)), b"".join(parts)), self._loop, self._url
        )

    def _on_frame(self, stream: int, frame: bytes) -> None:
        relay = self._relays.get(stream)
        if relay is not None:
            relay.on_frame(frame)

    def _end(self, stream: int) -> None:
        relay = self._relays.pop(stream, None)
        if relay is not None:
            relay.close()

    def _end_all(self) -> None:
        for stream in list(self._relays):
            self._end(stream)


def listen_here(poller: Poller, url: str, keys: Keys) -> MeetingPoint | None:
    """Be the meeting point, if its address is this machine's and nobody listens there yet."""
    host, port = split(url)
    with suppress(OSError):
        for _family, address in resolve(host, port):
            # Many machines know themselves by name as 127.0.1.1, where no other reaches them.
            aliased = address[0].startswith("127.") and not host.startswith(("127.", "localhost"))
            with suppress(OSError):
                here = "*" if aliased else address[0]
                at = f"tcp://[{here}]:{port}" if ":" in here else f"tcp://{here}:{port}"
                return MeetingPoint(poller, at, keys, Audit(poller))
    return None


def call(url: str, say: Callable[[str], None]) -> None:
    """Call a meeting point until no rank has been there for ``IDLE`` seconds.

    Args:
        say: is given what the job's user should know, as one line.
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
            caller = MeetingCaller(url, keys, poller, loop)
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
    """The ranks of this machine that were prepared with a meeting point."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._last = time.monotonic()  # when one was there

    def wait_until_gone(self, ended: threading.Event, point: MeetingPoint | None = None) -> bool:
        """Wait until none has been there for ``IDLE`` seconds, or something has ended; returns whether they are gone.

        Args:
            point: is needed without them, too, while there are other machines at it.
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
