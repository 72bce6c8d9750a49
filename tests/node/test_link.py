"""Framing: whole messages, however the bytes are cut, whatever their size, before and after there is a socket."""

from __future__ import annotations

import math
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import defstruct

from monarch_kernel import __version__
from monarch_kernel.protocol import messages
from monarch_kernel.protocol.messages import PREFIX, ProcResponds, ProcStarted, StopProcs, encode, message_name
from monarch_kernel.runtime.node import link
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.link import MAX_HEADER, Link, memory_left
from monarch_kernel.runtime.node.poller import Poller
from tests.waiting import patience

DEADLINE = patience(10)


class End:
    """One end of a link that collects what it gets."""

    def __init__(self, poller: Poller) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.wanted = 0
        self.all: Future[None] = Future(poller)
        self.closed: Future[None] = Future(poller)
        self.link = Link(poller, "peer", self._on_message, lambda _l: self.closed._resolve(None))

    def _on_message(self, _link: Link, header: Any, body: Any) -> None:
        self.got.append((header.proc, bytes(body)))
        if len(self.got) == self.wanted:
            self.all._resolve(None)


@pytest.fixture
def poller() -> Iterator[Poller]:
    made = Poller(background=False)
    yield made
    made.close()


def header(name: str) -> bytes:
    return encode(ProcStarted(name, 1))


def framed(name: str, body: bytes) -> bytes:
    head = header(name)
    return PREFIX.pack(len(head), len(body)) + head + body


def encoded(message: Any) -> bytes:
    head = encode(message)
    return PREFIX.pack(len(head), 0) + head


@pytest.mark.parametrize("beyond", [0, 1, 5_000, 99_999, 100_000, 100_001])
def test_a_message_ends_where_its_last_bytes_come_in_one_piece_with_others(
    poller: Poller, monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    monkeypatch.setattr(link, "_TURN", 100_000)  # a turn of receiving may end anywhere in what has come
    ours, theirs = socket.socketpair()
    end = End(poller)
    end.link.attach(ours)
    end.wanted = 1
    message = ("m", b"x" * (link._CHUNK + 100_000 + beyond))
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    theirs.sendall(framed(*message))
    assert poller.wait(end.all, 20)
    assert end.got == [message]
    end.link.close()
    theirs.close()


@settings(max_examples=60)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 1000, 70_000, 200_000]), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 90_000), max_size=12),
)
def test_messages_arrive_whole_however_the_bytes_are_cut(poller: Poller, sizes: list[int], cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    end = End(poller)
    end.link.attach(ours)
    want = [(f"m{k}", bytes([k]) * size) for k, size in enumerate(sizes)]
    end.wanted = len(want)
    data = b"".join(framed(*message) for message in want)
    at = 0
    for cut in [*cuts, len(data)]:
        theirs.setblocking(False)
        part = memoryview(data)[at : at + cut]
        while part:
            try:
                part = part[theirs.send(part) :]
            except BlockingIOError:
                end.link.receive()
        at = min(len(data), at + cut)
        end.link.receive()
    end.all.get(DEADLINE)
    assert end.got == want
    end.link.close()
    theirs.close()


def test_both_ways_with_bodies_larger_than_any_socket_buffer(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    left, right = End(poller), End(poller)
    left.link.attach(ours)
    right.link.attach(theirs)
    big = bytes(range(256)) * 40_000  # 10 MB
    left.wanted = right.wanted = 3
    for end, name in ((left, "a"), (right, "b")):
        end.link.send(header(name), big)
        end.link.send(header(name + "2"), [big[:100], b"", big[100:]])
        end.link.send(header(name + "3"), b"small")
    right.all.get(patience(20))
    left.all.get(patience(20))
    assert right.got == [("a", big), ("a2", big), ("a3", b"small")]
    assert left.got == [("b", big), ("b2", big), ("b3", b"small")]
    assert left.link.queued == right.link.queued == 0
    left.link.close()
    right.closed.get(DEADLINE)


def test_what_was_sent_before_there_was_a_socket_is_sent_in_order(poller: Poller) -> None:
    left, right = End(poller), End(poller)
    right.wanted = 3
    left.link.send(header("1"), b"x")
    left.link.send(header("2"), [b"y" * 100_000, b"z"])
    ours, theirs = socket.socketpair()
    right.link.attach(theirs)
    left.link.attach(ours)
    left.link.send(header("3"))
    right.all.get(DEADLINE)
    assert [name for name, _ in right.got] == ["1", "2", "3"]
    left.link.close()
    right.closed.get(DEADLINE)


def test_a_link_that_takes_over_sends_the_queue_of_the_waiting_one(poller: Poller) -> None:
    waiting, arrived, right = End(poller), End(poller), End(poller)
    right.wanted = 3
    waiting.link.send(header("1"))
    ours, theirs = socket.socketpair()
    right.link.attach(theirs)
    arrived.link.attach(ours)
    arrived.link.take_over(waiting.link)
    waiting.link.send(header("2"))  # by somebody who still holds the old one
    arrived.link.send(header("3"))
    right.all.get(DEADLINE)
    assert [name for name, _ in right.got] == ["1", "2", "3"]
    arrived.link.close()
    right.closed.get(DEADLINE)


def test_sending_on_a_closed_link_goes_nowhere(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    end = End(poller)
    end.link.attach(ours)
    theirs.close()
    end.closed.get(DEADLINE)
    end.link.send(header("x"), b"y")
    end.link.send(header("x"), b"y" * 1_000_000)
    assert end.link.closed and end.link.queued == 0


def test_what_could_wait_goes_ahead_of_the_next_message_to_that_peer(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = End(poller), End(poller)
    sender.link.attach(ours)
    receiver.link.attach(theirs)
    for size in (10, 100_000):
        poller.late.extend([("peer", ProcStarted("early", 1)), ("another", ProcStarted("not here", 1))])
        receiver.wanted = len(receiver.got) + 2
        receiver.all = Future(poller)
        sender.link.send(header("late"), b"x" * size)
        assert [peer for peer, _ in poller.late] == ["another"]
        poller.late.clear()
        receiver.all.get(DEADLINE)
    assert receiver.got == [("early", b""), ("late", b"x" * 10), ("early", b""), ("late", b"x" * 100_000)]
    sender.link.close()
    receiver.link.close()


# -- what cannot be taken ---------------------------------------------------------------------------


WORDS = {
    "no message": (PREFIX.pack(40, 0) + b"\xc1" * 40, "not a message of this version"),
    "an unknown word": (PREFIX.pack(0, 3) + b"\x7fxx", "unknown word"),
    "a large header": (PREFIX.pack(MAX_HEADER + 1, 0), "header of 67,108,865 bytes"),
    "the largest lengths": (PREFIX.pack(2**32 - 1, 2**64 - 1), "header of 4,294,967,295 bytes"),
    "a body for which there is no memory": (PREFIX.pack(20, 2**62), "no memory for a message"),
    "a body that no address space holds": (PREFIX.pack(20, 2**64 - 1), "no memory for a message"),
    "a time that never comes": (encoded(StopProcs(1, None, "", 1e300)), "Expected `float` <= "),
    "a time that is none": (encoded(StopProcs(1, None, "", math.nan)), "Expected `float`"),
    "a time before now": (encoded(ProcResponds("x", -1.0)), "Expected `float` >= "),
}


@pytest.mark.parametrize("said", WORDS)
def test_what_cannot_be_taken_ends_the_link_with_its_cause_at_both_ends(
    poller: Poller, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, why = WORDS[said]
    left, right, friend, other = End(poller), End(poller), End(poller), End(poller)
    for one, another in ((left, right), (friend, other)):
        ours, theirs = socket.socketpair()
        one.link.attach(ours)
        another.link.attach(theirs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    left.link._sock.sendall(data)
    right.closed.get(DEADLINE)
    left.closed.get(DEADLINE)
    assert why in right.link.ended
    assert left.link.ended == f"the other side gave it up: {right.link.ended}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    other.wanted = 1
    friend.link.send(header("still there"))
    other.all.get(DEADLINE)
    for end in (friend, other):
        end.link.close()


def test_a_message_that_an_older_side_does_not_know_is_named(poller: Poller, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = defstruct("Newer", [("what", int)], array_like=True, tag=250)
    monkeypatch.setattr(link, "message_name", {250: "Newer"}.get)  # as the side that sends it has it
    left, right = End(poller), End(poller)
    ours, theirs = socket.socketpair()
    left.link.attach(ours)
    right.link.attach(theirs)
    left.link.send(encode(newer(1)))
    right.closed.get(DEADLINE)
    left.closed.get(DEADLINE)
    why = "does not know message 250{}: install the newer version on all hosts"
    assert right.link.ended == f"monarch_kernel {__version__} {why.format('')}"
    assert left.link.ended == f"the other side gave it up: monarch_kernel {__version__} {why.format(' (Newer)')}"


def test_a_message_has_its_name_by_its_tag() -> None:
    assert message_name(ProcResponds.__struct_config__.tag) == "ProcResponds"
    assert message_name(9999) == ""


@pytest.mark.parametrize(
    ("ours", "theirs", "meet"),
    [
        ((10, 10), (10, 10), True),
        ((10, 10), (10, 0), True),  # one that names no oldest version
        ((11, 10), (10, 0), True),  # ours is newer, and still speaks theirs
        ((11, 11), (10, 0), False),
        ((10, 10), (11, 10), True),  # theirs is newer, and still speaks ours
        ((10, 10), (11, 0), False),
        ((10, 10), (12, 11), False),
        ((10, 8), (7, 5), False),
    ],
)
def test_two_versions_meet_if_the_newer_understands_the_older(
    ours: tuple[int, int], theirs: tuple[int, int], meet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "WIRE_VERSION", ours[0])
    monkeypatch.setattr(messages, "OLDEST_WIRE", ours[1])
    assert messages.can_meet(*theirs) is meet


@pytest.mark.parametrize("size", [10, 200_000, 9_000_000])
def test_a_handler_that_raises_ends_its_link_and_no_other(
    poller: Poller, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair()
    left, right = End(poller), End(poller)
    left.link.attach(ours)
    right.link.attach(theirs)
    said: list[str] = []

    def stumble(_link: Link, message: Any, _body: Any) -> None:
        said.append(message.proc)
        raise LookupError("over a stone")

    right.link.on_message = stumble
    left.link.send(header("1"), b"x" * size)
    left.link.send(header("2"))
    left.closed.get(DEADLINE)
    right.closed.get(DEADLINE)
    assert said == ["1"]
    assert left.link.ended.endswith("a message could not be handled (LookupError: over a stone)")
    assert "this is a bug in monarch_kernel" in caplog.text


def test_a_message_that_announces_more_than_it_sends_takes_no_memory(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    end = End(poller)
    end.link.attach(ours)
    before = resident()
    theirs.sendall(PREFIX.pack(20, memory_left() // 2))
    assert end.link.receive()
    assert resident() - before < 50_000_000
    theirs.close()
    end.closed.get(DEADLINE)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_a_header_that_no_receiver_takes_is_refused_where_it_is_sent(poller: Poller) -> None:
    with pytest.raises(ValueError, match="67,108,864 at most"):
        End(poller).link.send(bytes(MAX_HEADER + 1))


def test_a_link_that_is_drained_by_its_own_handler_keeps_its_framing(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    end = End(poller)
    end.link.attach(ours)
    end.wanted = 3
    collect = end.link.on_message

    def drain_and_collect(link: Link, message: Any, body: Any) -> None:
        if message.proc == "1":
            theirs.sendall(rest)
            link.drain()
        collect(link, message, body)

    end.link.on_message = drain_and_collect
    data = b"".join(framed(name, b"x" * 1000) for name in "123")
    cut = len(data) - 500
    rest = data[cut:]
    theirs.sendall(data[:cut])
    end.all.get(DEADLINE)
    assert [name for name, _ in end.got] == ["1", "2", "3"]
    theirs.close()
    end.closed.get(DEADLINE)
