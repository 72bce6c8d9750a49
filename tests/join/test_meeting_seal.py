"""What a meeting point does to a conversation that it carries ends it: the two ends notice, and take nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.engines.join.gateway_seal import Seal, SealBrokenError
from monarch_kernel.protocol.keys import Keys, load_keys, make_key_file
from monarch_kernel.protocol.keys.allow_list import add_key
from monarch_kernel.protocol.keys.identity import read_key_file


class End:
    """One end, and what it has sent and got."""

    def __init__(self, keys: Keys, viewer: bool) -> None:
        self.sent: list[bytes] = []
        self.got: list[bytes] = []
        self.seal = Seal(keys, viewer, "the other", self.sent.append)

    def take(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.got += self.seal.receive(piece)

    def outgoing(self) -> list[bytes]:
        sent = self.sent[:]
        self.sent.clear()
        return sent


@pytest.fixture
def keyring(tmp_path: Path) -> Callable[..., Keys]:
    def make(name: str, *trusted: Keys) -> Keys:
        if not (tmp_path / name).exists():
            make_key_file(tmp_path / name, name)
        for other in trusted:
            add_key(f"{tmp_path / name}.allow", read_key_file(other.path).public)
        return load_keys(tmp_path / name)

    return make


@pytest.fixture
def parties(keyring: Callable[..., Keys]) -> tuple[Keys, Keys]:
    """The keys of a viewer and of a machine, which trust each other."""
    machine = keyring("machine")
    viewer = keyring("viewer", machine)
    return viewer, keyring("machine", viewer)


def talking(parties: tuple[Keys, Keys]) -> tuple[End, End]:
    """A viewer and a machine that have proved their keys, and have heard of each other."""
    viewer, machine = (End(keys, number == 0) for number, keys in enumerate(parties))
    viewer.seal.begin()
    viewer.seal.send(b"first of the viewer")
    machine.seal.send(b"first of the machine")
    while viewer.sent or machine.sent:
        machine.take(*viewer.outgoing())
        viewer.take(*machine.outgoing())
    assert machine.got == [b"first of the viewer"] and viewer.got == [b"first of the machine"]
    return viewer, machine


def flip(pieces: list[bytes], own: list[bytes]) -> list[bytes]:
    middle = len(pieces[1]) // 2
    return [pieces[0], pieces[1][:middle] + bytes([pieces[1][middle] ^ 1]) + pieces[1][middle + 1 :], *pieces[2:]]


ACTS: dict[str, Callable[[list[bytes], list[bytes]], list[bytes]]] = {
    "flip": flip,
    "drop": lambda pieces, own: [pieces[0], *pieces[2:]],
    "repeat": lambda pieces, own: [pieces[0], pieces[1], pieces[1], *pieces[2:]],
    "swap": lambda pieces, own: [pieces[0], pieces[2], pieces[1], *pieces[3:]],
    "reflect": lambda pieces, own: [pieces[0], own[0], *pieces[1:]],
    "cut": lambda pieces, own: [pieces[0], pieces[1][:-1], *pieces[2:]],
    "add": lambda pieces, own: [pieces[0], b"\x17\x03\x03\x00\x20" + bytes(32), *pieces[1:]],
}


@pytest.mark.parametrize("towards", ["viewer", "machine"])
@pytest.mark.parametrize("act", ACTS)
def test_what_is_done_to_a_conversation_ends_it(parties: tuple[Keys, Keys], act: str, towards: str) -> None:
    viewer, machine = talking(parties)
    receiver, sender = (viewer, machine) if towards == "viewer" else (machine, viewer)
    receiver.seal.send(b"what would be reflected")
    own = receiver.outgoing()
    frames = [b"frame %d" % number for number in range(5)]
    for frame in frames:
        sender.seal.send(frame)
    before = len(receiver.got)
    with pytest.raises(SealBrokenError, match="changed on the way"):
        receiver.take(*ACTS[act](sender.outgoing(), own))
    got = receiver.got[before:]
    assert got == frames[: len(got)] and len(got) < len(frames)


@pytest.mark.parametrize("towards", ["viewer", "machine"])
def test_another_conversation_that_is_replayed_says_nothing(parties: tuple[Keys, Keys], towards: str) -> None:
    """All that one end once said to the other is said again to a new one."""
    viewer, machine = (End(keys, number == 0) for number, keys in enumerate(parties))
    heard: dict[str, list[bytes]] = {"viewer": [], "machine": []}
    viewer.seal.begin()
    viewer.seal.send(b"of the viewer")
    machine.seal.send(b"of the machine")
    while viewer.sent or machine.sent:
        for source, target, name in ((viewer, machine, "machine"), (machine, viewer, "viewer")):
            pieces = source.outgoing()
            heard[name] += pieces
            target.take(*pieces)
    assert machine.got and viewer.got
    again = End(parties[0 if towards == "viewer" else 1], towards == "viewer")
    if towards == "viewer":
        again.seal.begin()
    with pytest.raises(SealBrokenError):
        again.take(*heard[towards])
    assert not again.got and not again.seal.proved


@pytest.mark.parametrize("lacks", ["viewer", "machine"])
def test_one_that_does_not_trust_the_other_takes_nothing(keyring: Callable[..., Keys], lacks: str) -> None:
    machine_keys, viewer_keys = keyring("machine"), keyring("viewer")
    if lacks == "viewer":
        machine_keys = keyring("machine", viewer_keys)
    else:
        viewer_keys = keyring("viewer", machine_keys)
    viewer, machine = End(viewer_keys, True), End(machine_keys, False)
    viewer.seal.begin()
    viewer.seal.send(b"run this")
    machine.seal.send(b"unpickle this")
    with pytest.raises(SealBrokenError, match="trust"):
        while viewer.sent or machine.sent:
            machine.take(*viewer.outgoing())
            viewer.take(*machine.outgoing())
    assert not viewer.got and not machine.got
