"""Where the machines of joinable jobs and their viewers meet, if viewers cannot reach the machines by ssh or the like.

Both dial it, with keys as all TCP of this project: mutual TLS of keys that trust each other (``protocol.keys``). It
passes frames on between a viewer and a machine, and keeps nothing. Who dies is told to the other side; if the meeting
point does, machines dial again, and viewers lose their ranks, which then release what was stopped.

Messages are those of ``protocol.meeting``. All of it runs on the polling thread.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable

from monarch_kernel import environment
from monarch_kernel._version import __version__
from monarch_kernel.protocol.keys import Keys, load_keys
from monarch_kernel.protocol.meeting import MeetAs, MeetClosed, MeetFrame, MeetMachines, MeetOpen
from monarch_kernel.protocol.messages import Message, encode
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.link import Link
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tcp import Listener

#: How much may wait to be sent to one side before its connection is given up (bytes).
_MOST_WAITING = 1 << 30


class MeetingPoint:
    """A meeting point that listens in this process.

    Args:
        poller: carries its messages.
        url: ``tcp://host:port``; see ``Listener``.
        keys: of this process; machines and viewers need one that it trusts, and must trust its own.
        audit: records each connection, and each refusal.

    Raises:
        ValueError: the URL does not have that form.
        OSError: the process cannot listen there.
    """

    def __init__(self, poller: Poller, url: str, keys: Keys, audit: Audit) -> None:
        self._numbers = itertools.count(1)
        self._machines: dict[int, tuple[Link, str]] = {}  # by number, with the machine's name
        self._viewers: set[Link] = set()
        # Both ends of each conversation, by either: (link, its number of it).
        self._ends: dict[tuple[Link, int], tuple[Link, int]] = {}
        self._listener = Listener(
            poller, url, keys, self._on_message, self._on_close, lambda _link: None, audit, steady=True
        )

    @property
    def url(self) -> str:
        """Where it listens, with the real port."""
        return self._listener.url

    @property
    def machine_count(self) -> int:
        """How many machines are there."""
        return len(self._machines)

    def close(self) -> None:
        """End all connections."""
        self._listener.close()

    # -- on the polling thread -------------------------------------------------------------------------

    def _on_message(self, link: Link, message: Message, body: Body) -> None:
        match message:
            case MeetAs():
                self._begin(link, message)
            case MeetOpen(stream=stream, machine=machine):
                self._open(link, stream, machine)
            case MeetFrame(stream=stream):
                other = self._ends.get((link, stream))
                if other is not None:
                    self._pass_on(*other, body)
            case MeetClosed(stream=stream):
                self._end(link, stream)
            case _:
                raise ValueError(f"a {type(message).__name__} is not for a meeting point of joinable jobs")

    def _begin(self, link: Link, said: MeetAs) -> None:
        if said.version != __version__:
            link.give_up(
                f"the meeting point has monarch_kernel {__version__}, and {said.host} {said.version}: install one"
            )
        elif said.viewer:
            self._viewers.add(link)
            self._tell_machines([link])
        else:
            self._machines[next(self._numbers)] = link, said.host
            self._tell_machines(self._viewers)

    def _tell_machines(self, viewers: set[Link] | list[Link]) -> None:
        message = encode(MeetMachines({number: host for number, (_, host) in self._machines.items()}))
        for each in viewers:
            each.send(message)

    def _open(self, viewer: Link, stream: int, machine: int) -> None:
        known = self._machines.get(machine)
        if known is None or viewer not in self._viewers or (viewer, stream) in self._ends:
            viewer.send(encode(MeetClosed(stream)))
            return
        link, number = known[0], next(self._numbers)
        self._ends[viewer, stream], self._ends[link, number] = (link, number), (viewer, stream)
        link.send(encode(MeetOpen(number, machine)))

    @staticmethod
    def _pass_on(link: Link, stream: int, body: Body) -> None:
        link.send(encode(MeetFrame(stream)), body)
        if link.queued > _MOST_WAITING:
            link.give_up("it takes nothing of what is sent to it")

    def _end(self, link: Link, stream: int) -> None:
        other = self._ends.pop((link, stream), None)
        if other is not None:
            self._ends.pop(other, None)
            other[0].send(encode(MeetClosed(other[1])))

    def _on_close(self, link: Link) -> None:
        self._viewers.discard(link)
        for each in [each for each in self._ends if each[0] is link]:
            self._end(*each)
        gone = [number for number, (machine, _) in self._machines.items() if machine is link]
        for number in gone:
            del self._machines[number]
        if gone:
            self._tell_machines(self._viewers)


def serve(address: str, audit_file: str, say: Callable[[str], None]) -> None:
    """Be a meeting point, until this process is interrupted.

    Args:
        address: ``host:port``; the host may be ``*``.
        audit_file: is appended the connections and refusals; "": none.
        say: is given the URL when it listens.

    Raises:
        ValueError: the address is none, or this process has no key.
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
    point = MeetingPoint(poller, url, keys, audit)
    say(point.url)
    ended.wait()
    point.close()
    audit.close()
    poller.close()
