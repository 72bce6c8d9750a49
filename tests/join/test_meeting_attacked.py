"""A holder of a key that a meeting point trusts sends it what no process of ours does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from monarch_kernel._version import __version__
from monarch_kernel.engines.join import meeting_point
from monarch_kernel.engines.join.meeting_point import MeetingPoint
from monarch_kernel.protocol.keys import Keys, load_keys, make_key_file
from monarch_kernel.protocol.keys.allow_list import SETTLE, add_key, revoke_keys
from monarch_kernel.protocol.keys.identity import read_key_file
from monarch_kernel.protocol.meeting import MeetAs, MeetClosed, MeetFrame, MeetMachines, MeetOpen
from monarch_kernel.protocol.messages import PREFIX, Message, decode, encode
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.poller import Poller
from tests.attacks.holder import Holder, framed, junk, random_header, typed
from tests.conftest import wait_until
from tests.join.conftest import ROOT
from tests.ports import free_port

LONG = 60.0


class Party(Holder):
    """A machine or a viewer, as bare as an attacker's."""

    def say(self, *messages: Message, body: bytes = b"") -> None:
        self.send(b"".join(framed(encode(each), body) for each in messages))

    def hear(self) -> Message:
        """The next message; words of the link are left out."""
        while True:
            header, body = PREFIX.unpack(self._exactly(PREFIX.size))
            data = self._exactly(header + body)
            if header:
                return decode(memoryview(data)[:header])


def machine(host: str) -> MeetAs:
    return MeetAs(__version__, False, host)


VIEWER = MeetAs(__version__, True, "viewer")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    make_key_file(tmp_path / "team", "team")
    return load_keys(tmp_path / "team")


class Point:
    """A meeting point: `monarch-kernel join meet`."""

    def __init__(self, keys: Keys, log: Path) -> None:
        self._log, self._audit = log, log.with_suffix(".audit")
        self.port = free_port()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "monarch_kernel",
                    "join",
                    "meet",
                    f"127.0.0.1:{self.port}",
                    "--audit",
                    str(self._audit),
                ],
                env={**os.environ, "MONARCH_KERNEL_KEY_FILE": keys.path, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        assert self._process.stdout is not None
        if f"tcp://127.0.0.1:{self.port}" not in self._process.stdout.readline():
            self.end()
            raise AssertionError(log.read_text())

    @property
    def memory(self) -> int:
        """What it has (bytes)."""
        with open(f"/proc/{self._process.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024

    def log(self) -> list[str]:
        return self._log.read_text().splitlines()

    def audit(self) -> str:
        return self._audit.read_text()

    def end(self) -> None:
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.stdout.close()
        assert self._process.wait(LONG) == 0


@pytest.fixture
def point(keys: Keys, tmp_path: Path) -> Iterator[Point]:
    made = Point(keys, tmp_path / "point.log")
    yield made
    made.end()


def test_announcements_again_and_again(point: Point, keys: Keys) -> None:
    with Party(point.port, keys) as viewer, Party(point.port, keys) as attacker:
        viewer.say(VIEWER)
        assert viewer.hear() == MeetMachines({})
        attacker.say(machine("once"))
        first = viewer.hear()
        assert isinstance(first, MeetMachines) and list(first.hosts.values()) == ["once"]
        before = point.memory
        data = framed(encode(machine("again"))) * 10_000
        with suppress(OSError):  # it is hung up on
            for _ in range(50):
                attacker.send(data)
        assert viewer.hear() == MeetMachines({})
        assert point.memory - before < 50_000_000


def test_a_key_that_was_revoked_while_nobody_was_there(point: Point, keys: Keys, tmp_path: Path) -> None:
    make_key_file(tmp_path / "mallory", "mallory")
    mallory = load_keys(tmp_path / "mallory")
    add_key(mallory.allow, read_key_file(keys.path).public)
    add_key(keys.allow, read_key_file(mallory.path).public)
    with Party(point.port, mallory) as viewer:
        viewer.say(VIEWER)
        assert viewer.hear() == MeetMachines({})
    wait_until(lambda: " ended mallory " in point.audit(), "the link has ended", LONG)
    revoke_keys(keys.allow, "mallory")
    wait_until(lambda: time.time() - os.stat(keys.allow).st_ctime > SETTLE, "the list is still")
    with pytest.raises((OSError, EOFError)):
        Party(point.port, mallory)
    assert point.audit().count(" connected mallory ") == 1


@pytest.mark.parametrize("said", [VIEWER, machine("both")], ids=["viewer", "machine"])
def test_who_is_both(point: Point, keys: Keys, said: MeetAs) -> None:
    with Party(point.port, keys) as attacker:
        attacker.say(said, VIEWER)
        assert attacker.said() == "who is at a meeting point says who it is once"


def test_a_name_that_no_host_has(point: Point, keys: Keys) -> None:
    with Party(point.port, keys) as viewer, Party(point.port, keys) as attacker:
        viewer.say(VIEWER)
        assert viewer.hear() == MeetMachines({})
        attacker.say(machine("x" * 1_000_000))
        assert attacker.said() == "the name of a host has at most 253 characters"


def test_one_conversation_of_a_viewer_with_a_machine(point: Point, keys: Keys) -> None:
    with Party(point.port, keys) as there, Party(point.port, keys) as viewer:
        there.say(machine("node0"))
        viewer.say(VIEWER)
        told = viewer.hear()
        while not (isinstance(told, MeetMachines) and told.hosts):
            told = viewer.hear()
        (number,) = told.hosts
        viewer.say(*(MeetOpen(stream, number) for stream in range(1, 4)))
        assert [viewer.hear(), viewer.hear()] == [MeetClosed(2), MeetClosed(3)]
        opened = there.hear()
        assert isinstance(opened, MeetOpen)
        there.say(MeetFrame(opened.stream))
        assert viewer.hear() == MeetFrame(1)
        viewer.say(MeetClosed(1), MeetOpen(4, number))  # the next, once that is over
        assert there.hear() == MeetClosed(opened.stream)
        assert isinstance(there.hear(), MeetOpen)


def test_what_one_side_does_not_take_is_kept_up_to_a_limit(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_point, "MOST_WAITING", 8 << 20)
    poller = Poller()
    here = MeetingPoint(poller, "tcp://127.0.0.1:0", keys, Audit(poller))
    port = int(here.url.rpartition(":")[2])
    try:
        with Party(port, keys) as deaf, Party(port, keys) as fine, Party(port, keys) as viewer:
            deaf.say(machine("deaf"))
            fine.say(machine("fine"))
            wait_until(lambda: here.machine_count == 2, "both are there")
            viewer.say(VIEWER)
            told = viewer.hear()
            assert isinstance(told, MeetMachines)
            numbers = {host: number for number, host in told.hosts.items()}
            viewer.say(MeetOpen(1, numbers["deaf"]), MeetOpen(2, numbers["fine"]))
            opened = fine.hear()
            assert isinstance(opened, MeetOpen)
            for _ in range(64):
                viewer.say(MeetFrame(1), body=bytes(1 << 20))
            closed = [viewer.hear(), viewer.hear()]
            assert MeetClosed(1) in closed and MeetMachines({numbers["fine"]: "fine"}) in closed
            assert "takes nothing of what is sent to it" in deaf.said()
            viewer.say(MeetFrame(2))
            assert fine.hear() == MeetFrame(opened.stream)
    finally:
        here.close()
        poller.close()


def test_as_many_connections_as_there_is_room_for(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_point, "_MOST_LINKS", 2)
    poller = Poller()
    here = MeetingPoint(poller, "tcp://127.0.0.1:0", keys, Audit(poller))
    port = int(here.url.rpartition(":")[2])
    try:
        with Party(port, keys) as first, Party(port, keys) as second:
            for each in (first, second):
                each.say(VIEWER)
                assert each.hear() == MeetMachines({})
            with Party(port, keys) as third:
                assert "no room for another" in third.said()
        for _ in range(3):
            wait_until(lambda: not here._links, "they have ended")
            with Party(port, keys) as later:
                later.say(VIEWER)
                assert later.hear() == MeetMachines({})
    finally:
        here.close()
        poller.close()


def test_bad_messages_are_a_line_and_their_number(point: Point, keys: Keys) -> None:
    chance = random.Random(7)
    kinds = (random_header, junk, typed)
    for number in range(150):
        with Party(point.port, keys) as attacker:
            attacker.send(kinds[number % 3](chance))
    wait_until(lambda: point.audit().count(" ended team ") == 150, "all links have ended", LONG)
    lines = point.log()
    assert 1 <= len(lines) < 10, lines
    assert not any("Traceback" in line for line in lines)
