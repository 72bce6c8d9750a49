"""Find and reach the ranks on the machines at a meeting point, for a viewer."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from monarch_kernel._version import __version__
from monarch_kernel.engines.join.announcements import JoinError, RankAnnouncement
from monarch_kernel.engines.join.frame_loop import FrameLoop
from monarch_kernel.engines.join.gateway_seal import Seal, SealBrokenError
from monarch_kernel.engines.join.rank_machines import JoinableRank, OutsideRead, at_once
from monarch_kernel.engines.join.remote_machine import ANSWER, RelayLink, RemoteMachine
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
    """All machines at a meeting point (``rank_machines.RankMachines``). Later calls include machines that connect
    later.

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
        self._at: dict[RankAnnouncement, RemoteMachine] = {}
        self._streams: dict[int, _MeetingStream] = {}
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

    # -- ``rank_machines.RankMachines`` -----------------------------------------------------------------

    def find(self, name: str = "") -> list[RankAnnouncement]:
        """See ``rank_machines.RankMachines``."""
        machines = self._opened()
        found = list(zip(machines, at_once(lambda machine: machine.find(name), machines), strict=True))
        self._at.update({each: machine for machine, ranks in found for each in ranks})
        return [each for _, ranks in found for each in ranks]

    def connect(
        self,
        wanted: Iterable[RankAnnouncement],
        on_frame: Callable[[RankAnnouncement, bytes], None],
        on_closed: Callable[[RankAnnouncement], None],
    ) -> list[JoinableRank]:
        """See ``rank_machines.RankMachines``."""
        apart = self._by_machine(wanted)
        found = at_once(lambda each: each[0].connect(each[1], on_frame, on_closed), apart)
        return [rank for ranks in found for rank in ranks]

    def read_stacks(
        self, ranks: Sequence[RankAnnouncement], native: bool, timeout: float
    ) -> dict[RankAnnouncement, OutsideRead]:
        """See ``rank_machines.RankMachines``."""
        apart = self._by_machine(ranks)
        found = at_once(lambda each: each[0].read_stacks(each[1], native, timeout), apart)
        return {rank: read for reads in found for rank, read in reads.items()}

    def _by_machine(self, ranks: Iterable[RankAnnouncement]) -> list[tuple[RemoteMachine, list[RankAnnouncement]]]:
        apart: dict[RemoteMachine, list[RankAnnouncement]] = {}
        at = {each.process: machine for each, machine in self._at.items()}
        for each in ranks:  # a rank that is queried again may have reported more about itself meanwhile
            machine = at.get(each.process)
            if machine is not None:
                apart.setdefault(machine, []).append(each)
        return list(apart.items())

    def _opened(self) -> list[RemoteMachine]:
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
            known = list(self._machines.values())
            self._at = {each: machine for each, machine in self._at.items() if machine in known}
            return known

    def _begin(self, number: int, host: str) -> None:
        """Start a conversation with a machine."""
        begun = time.monotonic()
        try:
            machine = RemoteMachine(f"{host} at {self.name}", lambda *back: _MeetingStream(self, number, host, *back))
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

    def begin_stream(self, stream: _MeetingStream, machine: int) -> int:
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


class _MeetingStream(RelayLink):
    """A conversation with the relay of a machine that has proved a key trusted by this process."""

    def __init__(
        self,
        place: GatewayMachines,
        machine: int,
        host: str,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_frame = on_frame
        self.on_end = on_end
        self._place = place
        self._why = ""
        self._seal = Seal(place.keys, True, host, lambda data: place.send(self._number, data))
        self._number = place.begin_stream(self, machine)
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
            self._on_frame(frame)

    def send(self, *parts: bytes) -> None:
        """See ``RelayLink``."""
        self._seal.send(*parts)

    def why(self) -> str:
        """See ``RelayLink``."""
        return self._why or self._place.why()

    def close(self) -> None:
        """See ``RelayLink``."""
        self._place.end_stream(self._number)
