"""A person on the path, crowds of strangers, and holders of a key that send what they should not."""

from __future__ import annotations

import gc
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from monarch_kernel.protocol.keys import Keys
from monarch_kernel.protocol.messages import PREFIX
from monarch_kernel.runtime.node import acceptor, descriptors
from monarch_kernel.runtime.node.tcp.link import CHANGED, LOST
from monarch_kernel.runtime.node.tcp.listener import PendingConnections
from tests import attacks
from tests.attacks.holder import Holder, framed, random_header
from tests.attacks.path import ACTS, Path
from tests.conftest import wait_until
from tests.node.tcpside import Side, echoing, header

LONG = 60.0

# -- a person on the path -----------------------------------------------------------------------------


@pytest.fixture
def path(sides: Callable[..., Side]) -> Iterator[tuple[Path, Side, Side]]:
    """Somebody between two sides, of which the second listens."""
    ours, theirs = sides(), sides()
    made = Path(int(theirs.listen().rsplit(":", 1)[1]))
    yield made, ours, theirs
    made.close()


@pytest.mark.parametrize("towards", ["listener", "client"])
@pytest.mark.parametrize("what", ACTS)
def test_what_a_person_on_the_path_does_ends_the_link_as_lost(
    path: tuple[Path, Side, Side], what: str, towards: str
) -> None:
    between, ours, theirs = path
    link = ours.dial(between.url)
    link.send(header("hello"))
    theirs.wait(lambda: theirs.got, "a message")
    sender, receiver = (link, theirs) if towards == "listener" else (theirs.links[0], ours)
    before = len(receiver.got)
    between.act(what, towards)
    for k in range(600):
        sender.send(header("m", k), b"x" * 100)
    for side in (ours, theirs):
        side.wait(lambda side=side: side.ended, "the end of the link")
    numbers = [number for _, _, number, _ in receiver.got[before:]]
    assert numbers == list(range(len(numbers)))  # nothing is missing in between, and nothing came twice
    assert len(numbers) < 600
    whys = {ours.ended[0].ended, theirs.ended[0].ended}
    assert whys == {LOST} if what == "cut" else CHANGED in whys
    assert whys <= {LOST, CHANGED}


def test_a_session_that_is_replayed_says_nothing(path: tuple[Path, Side, Side]) -> None:
    between, ours, theirs = path
    link = ours.dial(between.url)
    link.send(header("once"))
    theirs.wait(lambda: theirs.got, "a message")
    before = list(between.seen["listener"])
    port = int(theirs.listeners[0].url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), 20) as sock:
        for record in before:
            try:
                sock.sendall(record)
            except OSError:
                break
        attacks.hang_up_of(sock)
    assert theirs.names() == ["once"] and len(theirs.links) == 1


# -- crowds -----------------------------------------------------------------------------------------


class _Guest:
    def __init__(self, origin: str, proved: bool = False) -> None:
        self.origin = origin
        self.proved = proved


def test_who_makes_room() -> None:
    strangers = PendingConnections(8)
    crowd = [_Guest("a", proved=k == 0) for k in range(4)]
    assert [strangers.add(guest) for guest in crowd] == [None] * 4
    more = _Guest("a")
    assert strangers.add(more) is crowd[1]  # the oldest of its own address that has proved nothing
    strangers.remove(crowd[1])
    others = [_Guest(name) for name in "bcde"]
    assert [strangers.add(guest) for guest in others] == [None] * 4
    assert strangers.add(_Guest("f")) is crowd[2]  # the oldest of all
    assert strangers.oldest() is crowd[2]
    for guest in (*crowd, more, *others):
        strangers.remove(guest)
    assert len(strangers) == 1


def test_who_has_proved_a_key_makes_room_for_nobody() -> None:
    strangers = PendingConnections(4)
    proved = [_Guest(name, proved=True) for name in "abcd"]
    assert [strangers.add(guest) for guest in proved] == [None] * 4
    assert strangers.oldest() is None
    late = _Guest("e")
    assert strangers.add(late) is late


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20)


def port_of(side: Side) -> int:
    return int(side.listeners[0].url.rsplit(":", 1)[1])


def test_a_crowd_of_silent_strangers_keeps_nobody_out(
    sides: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = sides(), sides()
    theirs.react = echoing
    url = theirs.listen()
    most = theirs.listeners[0]._strangers.most_of_one
    before = resident()
    with ExitStack() as crowd:
        for k in range(most + 200):
            sock = crowd.enter_context(connect(port_of(theirs)))
            if k % 2:
                sock.send(b"\x16\x03\x01")
        began = time.monotonic()
        ours.echo(ours.dial(url), b"let me in")
        assert time.monotonic() - began < 4  # the strangers have more time
        assert len(theirs.listeners[0]._strangers) <= most
        assert resident() - before < 60_000_000
    wait_until(lambda: not len(theirs.listeners[0]._strangers), "all strangers have gone")
    lines = [message for message in caplog.messages if "refused" in message]
    assert 1 <= len(lines) <= 3 and sum(map(len, lines)) < 300
    gc.collect()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_strangers_that_hold_all_descriptors(
    sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has connected and said nothing makes room for those who come; and without any, it waits without spinning."""
    ours, theirs = sides(), sides()
    theirs.react = echoing
    url = theirs.listen()
    ours.echo(ours.dial(url), b"before")
    monkeypatch.setattr(descriptors, "raise_limit", lambda: False)
    monkeypatch.setattr(acceptor, "ACCEPT_PAUSE", 0.1)
    crowd = [connect(port_of(theirs)) for _ in range(10)]
    wait_until(lambda: len(theirs.listeners[0]._strangers) == 10, "all are there")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [socket.socket() for _ in range(3)]
    free = os.dup(0)
    os.close(free)
    accepts = 0
    accept = socket.socket.accept

    def counted(sock: socket.socket) -> Any:
        nonlocal accepts
        accepts += 1
        return accept(sock)

    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        waiting[0].connect(("127.0.0.1", port_of(theirs)))
        wait_until(lambda: "it made room for others" in caplog.text, "one has gone")
        for sock in crowd:
            sock.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: len(theirs.listeners[0]._strangers) == 1, "all others have gone")
    waiting[0].close()
    wait_until(lambda: not len(theirs.listeners[0]._strangers), "all have gone")
    free = os.dup(0)
    os.close(free)
    monkeypatch.setattr(socket.socket, "accept", counted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        waiting[1].connect(("127.0.0.1", port_of(theirs)))
        wait_until(lambda: accepts >= 3, "it has tried again")
        assert caplog.text.count("cannot accept more connections") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ours.echo(ours.dial(url), b"after")
    for sock in waiting:
        sock.close()


def test_three_hundred_dials_at_once_from_one_address(sides: Callable[..., Side]) -> None:
    ours, theirs = sides(), sides()
    theirs.react = echoing
    url = theirs.listen()
    links = [ours.dial(url) for _ in range(300)]
    for k, link in enumerate(links):
        link.send(header("m", k))
    ours.wait(lambda: len(ours.got) == 300, "all answers", 60)
    assert not ours.ended


FLOOD = """
import socket, ssl, sys, time
from collections import deque
came, said = ssl.MemoryBIO(), ssl.MemoryBIO()
try:
    ssl.create_default_context().wrap_bio(came, said, server_hostname="x").do_handshake()
except ssl.SSLWantReadError:
    hello = said.read()
socks = deque()
for number in range(10**9):
    if number == 3000:
        print("ready", flush=True)
    sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    sock.send(hello)
    socks.append(sock)
    if len(socks) > 800:
        socks.popleft().close()
    time.sleep(0.0005)
"""


def test_a_flood_of_hellos_keeps_nobody_out(
    sides: Callable[..., Side], peer: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    """Each says what a controller says first, and then nothing; some thousand a second."""
    _listener, url = peer("listen")
    with subprocess.Popen(
        [sys.executable, "-c", FLOOD, url.rpartition(":")[2]], stdout=subprocess.PIPE, text=True
    ) as flood:
        assert flood.stdout is not None
        try:
            assert flood.stdout.readline() == "ready\n"
            ours = sides()
            for k in range(5):
                ours.dial(url, LONG).send(header("let me in", k))
            ours.wait(lambda: len(ours.got) == 5, "all are in", LONG)
            assert not ours.ended
            assert flood.poll() is None
        finally:
            flood.kill()


# -- holders of a key ---------------------------------------------------------------------------------


def test_what_a_key_holder_sends_ends_its_own_link_only(sides: Callable[..., Side], keys: Keys) -> None:
    ours, theirs = sides(), sides()
    theirs.react = echoing
    link = ours.dial(theirs.listen())
    ours.echo(link, b"before")
    chance = random.Random(7)
    for said, why in (
        (PREFIX.pack(2**32 - 1, 0), "a header of 4,294,967,295 bytes was announced"),
        (PREFIX.pack(10, 2**63), "there is no memory for a message"),
        (framed(b"\xc1" * 9), "received data is not a message of this version"),
        (PREFIX.pack(0, 1) + b"\x99", "an unknown word of the link was received"),
    ):
        with Holder(port_of(theirs), keys) as holder:
            holder.send(said)
            assert holder.said().startswith(why)
    for _ in range(40):
        with Holder(port_of(theirs), keys) as holder:
            holder.send(random_header(chance))
    ours.echo(link, b"after")
    wait_until(lambda: len(theirs.ended) == 44, "all their links have ended")
    assert not ours.ended
