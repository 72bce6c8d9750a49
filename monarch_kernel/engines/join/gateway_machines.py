"""Find and reach the ranks on the machines at a meeting point, for a viewer."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time

from monarch_kernel._version import __version__
from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.engines.join.frame_loop import FrameLoop
from monarch_kernel.engines.join.gateway_seal import Seal, SealBrokenError
from monarch_kernel.engines.join.rank_machines import at_once
from monarch_kernel.engines.join.remote_machine import ANSWER, RemoteMachine
from monarch_kernel.protocol.gateway_messages import MeetAs, MeetClosed, MeetFrame, MeetMachines, MeetOpen
from monarch_kernel.protocol.keys import KeyFileError, load_keys
from monarch_kernel.protocol.messages import Message, encode
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.node.link import Link, LinkError
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tcp import dial

log = logging.getLogger(__name__)

#: The time limit for reaching a meeting point (seconds).
REACH = 15.0
#: The maximum number of reported reasons why machines are unusable: a trusted machine can connect under many names.
_MOST_TOLD = 16
#: The delay before an unusable machine is tried again (seconds), in addition to three times the duration of the last
#: attempt.
_AGAIN = 2.0
#: The longest name of a host in DNS (characters).
_LONGEST_HOST = 253


class GatewayMachines:
    """All machines at a meeting point, present and later ones.

    Args:
        url: the URL of the meeting point, ``tcp://host:port``.
        loop: calls back with messages from ranks.

    Raises:
        JoinError: this process has no key.
    """

    def __init__(self, url: str, loop: FrameLoop) -> None:
        self.name = url
        self._loop = loop
        self._changed = threading.Condition()
        self._hosts: dict[int, str] | None = None  # by machine, as reported by the meeting point
        self._machines: dict[int, RemoteMachine] = {}
        self._useless: dict[int, float] = {}  # machines that refuse this viewer, and when to try them again
        self._streams: dict[int, _MeetingMachine] = {}
        self._numbers = itertools.count(1)
        self._opening = threading.Lock()
        self._told: set[str] = set()  # why machines are unusable
        try:
            self.keys = load_keys()
        except KeyFileError as error:
            raise JoinError(f"the meeting point {url} needs a key: {error}") from None
        self._poller = Poller()
        self._link = dial(self._poller, url, self.keys, self._on_message, self._on_close, REACH)
        self._link.send(encode(MeetAs(__version__, True, socket.gethostname())))

    def begin(self) -> None:
        """Wait until the meeting point has reported its machines.

        Raises:
            JoinError: it cannot be reached, or refuses the connection.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._hosts is not None or self._link.closed, REACH + 1)
        if self._hosts is None:
            why = self._link.ended
            self.close()
            raise JoinError(f"the meeting point {self.name} cannot be reached: {why}")

    @property
    def ended(self) -> bool:
        """Whether the connection to the meeting point is over."""
        return self._link.closed

    def close(self) -> None:
        """End the connection."""
        self._link.close()
        self._poller.close()

    def opened(self) -> list[RemoteMachine]:
        """Return the connected machines, after starting a conversation with each new one."""
        with self._opening:
            hosts = dict(self._hosts or {})
            gone = [number for number, each in self._machines.items() if number not in hosts or each.ended]
            for number in gone:
                del self._machines[number]
            now = time.monotonic()
            self._useless = {number: again for number, again in self._useless.items() if number in hosts}
            new = [
                (number, host)
                for number, host in hosts.items()
                if number not in self._machines and now >= self._useless.get(number, now)
            ]
            at_once(lambda each: self._begin(*each), new)
            return list(self._machines.values())

    def _begin(self, number: int, host: str) -> None:
        """Start a conversation with a machine."""
        begun = time.monotonic()
        try:
            machine = _MeetingMachine(self, number, host)
            machine.begin(ANSWER)
        except JoinError as error:
            if str(error) not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(str(error))
                log.warning("its ranks are not found: %s", error)
            now = time.monotonic()
            self._useless[number] = now + _AGAIN + 3 * (now - begun)  # keys may be added, on either side
        else:
            self._machines[number] = machine

    # -- conversations -------------------------------------------------------------------------------

    def begin_stream(self, stream: _MeetingMachine, machine: int) -> int:
        """Start a conversation with a machine. Return its number."""
        number = next(self._numbers)
        self._streams[number] = stream
        self._link.send(encode(MeetOpen(number, machine)))
        return number

    def send(self, stream: int, data: bytes) -> None:
        """Send bytes to the other end of a conversation."""
        self._link.send(encode(MeetFrame(stream)), data)

    def end_stream(self, stream: int) -> None:
        """End a conversation."""
        if self._streams.pop(stream, None) is not None:
            self._link.send(encode(MeetClosed(stream)))

    def why(self) -> str:
        """Return why a conversation has ended."""
        return self._link.ended or "it has left the meeting point"

    # -- on the polling thread -------------------------------------------------------------------------

    def _on_message(self, _link: Link, message: Message, body: Body) -> None:
        match message:
            case MeetMachines(hosts=hosts):
                with self._changed:
                    self._hosts = {number: _shown(host) for number, host in hosts.items()}
                    self._changed.notify_all()
            case MeetFrame(stream=number):
                stream = self._streams.get(number)
                if stream is not None:
                    data = bytes(body)
                    self._loop.call_soon(lambda: stream.on_data(data))
            case MeetClosed(stream=number):
                stream = self._streams.pop(number, None)
                if stream is not None:
                    self._loop.call_soon(stream.on_end)
            case _:
                raise LinkError(f"a {type(message).__name__} is not for a viewer at a meeting point")

    def _on_close(self, _link: Link) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            self._loop.call_soon(stream.on_end)
        with self._changed:
            self._changed.notify_all()


def _shown(host: str) -> str:
    """Sanitize a machine's own name for display: the machine has not proved its key."""
    return "".join(each for each in host if each.isprintable())[:_LONGEST_HOST]


class _MeetingMachine(RemoteMachine):
    """A machine at a meeting point, which has proved a key trusted by this process.

    Args:
        point: the machines at the meeting point.
        machine: its number there.
        host: its name.
    """

    def __init__(self, point: GatewayMachines, machine: int, host: str) -> None:
        super().__init__(f"{host} at {point.name}")
        self._point = point
        self._why = ""
        self._seal = Seal(point.keys, True, host, lambda data: point.send(self._number, data))
        self._number = point.begin_stream(self, machine)
        self._seal.begin()

    def on_data(self, data: bytes) -> None:
        """Handle data from the machine, on the thread of the loop."""
        if self._why:
            return
        try:
            frames = self._seal.receive(data)
        except SealBrokenError as error:
            self._why = str(error)
            self.close()
            self.on_end()
            return
        for frame in frames:
            self.on_frame(frame)

    def send_frame(self, *parts: bytes) -> None:
        """See ``RemoteMachine``."""
        self._seal.send(*parts)

    def why(self) -> str:
        """See ``RemoteMachine``."""
        return self._why or self._point.why()

    def close(self) -> None:
        """See ``RemoteMachine``."""
        self._point.end_stream(self._number)
