"""A meeting point: connects machines of joinable jobs and viewers that cannot reach these machines by ssh or srun.

Both connect to it by mutual TLS with trusted keys, like all TCP connections of this project (``protocol.keys``). It
forwards bytes between a viewer and a machine, cannot read them (``gateway_seal``), and stores nothing. It notifies the
other side when one side dies. If the meeting point dies, machines reconnect, and viewers lose their ranks, which then
release what was stopped.

Messages are those of ``protocol.gateway_messages``. All code here runs on the polling thread.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from monarch_kernel import environment
from monarch_kernel._version import __version__
from monarch_kernel.protocol.gateway_messages import MeetAs, MeetClosed, MeetFrame, MeetMachines, MeetOpen
from monarch_kernel.protocol.keys import Keys, load_keys
from monarch_kernel.protocol.messages import Message, encode
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.node import descriptors
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.link import Link, LinkError
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tcp import Listener

#: The maximum size of all send queues together (bytes). Beyond it, the connection with the longest queue is closed.
MOST_WAITING = 1 << 30
#: The maximum number of connections of machines and viewers. Also at most half of this process's descriptors.
_MOST_LINKS = 4096
#: The maximum number of conversations.
_MOST_TALKS = 1 << 16
#: The longest name of a host in DNS (characters).
_LONGEST_HOST = 253


class JoinGateway:
    """A meeting point that listens in this process.

    Args:
        poller: carries its messages.
        url: ``tcp://host:port``; see ``Listener``.
        keys: the keys of this process. Machines and viewers need a key that it trusts, and must trust its key.
        audit: records connections and refusals.

    Raises:
        ValueError: the URL does not have that form.
        OSError: the process cannot listen there.
    """

    def __init__(self, poller: Poller, url: str, keys: Keys, audit: Audit) -> None:
        descriptors.raise_limit()
        self._numbers = itertools.count(1)
        self._links: dict[Link, int] = {}  # all links, with the size of their send queues when last counted
        self._waiting = 0  # the sum of these
        self._most_links = min(_MOST_LINKS, descriptors.limit() // 2)
        self._machines: dict[int, tuple[Link, str]] = {}  # by number: the link and the machine's name
        self._viewers: dict[Link, set[int]] = {}  # with the machines that each is connected to
        # The other end of each conversation, by either end: (link, number of the conversation there).
        self._ends: dict[tuple[Link, int], _End] = {}
        self._listener = Listener(
            poller, url, keys, self._on_message, self._on_close, self._on_link, audit, steady=True
        )

    @property
    def url(self) -> str:
        """Its URL, with the real port."""
        return self._listener.url

    @property
    def machine_count(self) -> int:
        """The number of connected machines."""
        return len(self._machines)

    def close(self) -> None:
        """End all connections."""
        self._listener.close()

    # -- on the polling thread -------------------------------------------------------------------------

    def _on_link(self, link: Link) -> None:
        self._links[link] = 0
        if len(self._links) > self._most_links:
            link.give_up(f"there are {self._most_links} connections to the meeting point, and no room for another")

    def _on_message(self, link: Link, message: Message, body: Body) -> None:
        match message:
            case MeetAs():
                self._begin(link, message)
            case MeetOpen(stream=stream, machine=machine):
                self._open(link, stream, machine)
            case MeetFrame(stream=stream):
                other = self._ends.get((link, stream))
                if other is not None:
                    self._send(other.link, encode(MeetFrame(other.stream)), body)
            case MeetClosed(stream=stream):
                self._end(link, stream)
            case _:
                raise LinkError(f"a {type(message).__name__} is not for a meeting point of joinable jobs")

    def _begin(self, link: Link, said: MeetAs) -> None:
        if said.version != __version__:
            theirs = f"{said.host[:_LONGEST_HOST]} {said.version[:_LONGEST_HOST]}"
            link.give_up(f"the meeting point has monarch_kernel {__version__}, and {theirs}: install one")
        elif link in self._viewers or any(machine is link for machine, _ in self._machines.values()):
            raise LinkError("a peer at a meeting point must identify itself once")
        elif len(said.host) > _LONGEST_HOST:
            raise LinkError(f"the name of a host has at most {_LONGEST_HOST} characters")
        elif said.viewer:
            self._viewers[link] = set()
            self._tell_machines([link])
        else:
            self._machines[next(self._numbers)] = link, said.host
            self._tell_machines(self._viewers)

    def _tell_machines(self, viewers: Iterable[Link]) -> None:
        message = encode(MeetMachines({number: host for number, (_, host) in self._machines.items()}))
        for each in list(viewers):
            self._send(each, message)

    def _send(self, link: Link, header: bytes, body: Body = b"") -> None:
        """Send to one side. The total size of queued data is limited."""
        link.send(header, body)
        self._count(link)
        if self._waiting > MOST_WAITING:
            for each in self._links:  # the queues may have become shorter meanwhile
                self._count(each)
        if self._waiting > MOST_WAITING:
            slowest = max(self._links, key=self._links.__getitem__)
            slowest.give_up("it takes nothing of what is sent to it")

    def _count(self, link: Link) -> None:
        if link in self._links:
            self._waiting += link.queued - self._links[link]
            self._links[link] = link.queued

    def _open(self, viewer: Link, stream: int, machine: int) -> None:
        known, talks_to = self._machines.get(machine), self._viewers.get(viewer)
        full = len(self._ends) >= 2 * _MOST_TALKS
        if full or known is None or talks_to is None or machine in talks_to or (viewer, stream) in self._ends:
            self._send(viewer, encode(MeetClosed(stream)))
            return
        talks_to.add(machine)
        link, number = known[0], next(self._numbers)
        self._ends[viewer, stream] = _End(link, number, machine)
        self._ends[link, number] = _End(viewer, stream, machine)
        self._send(link, encode(MeetOpen(number, machine)))

    def _end(self, link: Link, stream: int) -> None:
        other = self._ends.pop((link, stream), None)
        if other is None:
            return
        self._ends.pop((other.link, other.stream), None)
        for viewer in (link, other.link):
            self._viewers.get(viewer, set()).discard(other.machine)
        self._send(other.link, encode(MeetClosed(other.stream)))

    def _on_close(self, link: Link) -> None:
        self._waiting -= self._links.pop(link, 0)
        for each in [each for each in self._ends if each[0] is link]:
            self._end(*each)
        self._viewers.pop(link, None)
        gone = [number for number, (machine, _) in self._machines.items() if machine is link]
        for number in gone:
            del self._machines[number]
        if gone:
            self._tell_machines(self._viewers)


class _End(NamedTuple):
    """One end of a conversation: its link, its number there, and its machine."""

    link: Link
    stream: int
    machine: int


def serve(address: str, audit_file: str, say: Callable[[str], None]) -> None:
    """Run a meeting point until this process is interrupted.

    Args:
        address: ``host:port``; the host may be ``*``.
        audit_file: the file to which connections and refusals are appended; "": none.
        say: called with the URL when it listens.

    Raises:
        ValueError: the address is invalid, or this process has no key.
        OSError: it cannot listen there, or the file cannot be written.
    """
    url, keys = environment.JOIN_MEET.parse(address), load_keys()
    if not url:
        raise ValueError("a meeting point needs an address, as in 'monarch-kernel join meet node0:26700'")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    poller = Poller()
    audit = Audit(poller, audit_file)
    point = JoinGateway(poller, url, keys, audit)
    say(point.url)
    ended.wait()
    point.close()
    audit.close()
    poller.close()
