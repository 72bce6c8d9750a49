"""The kinds of death on the wire, also where one side is of a version that knows none."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from monarch_kernel.protocol.messages import ProcExited, death_of, decode, decode_death, encode, encode_death
from monarch_kernel.protocol.refs import Death, DeathKind, lost_with


class OldDeath(msgspec.Struct, array_like=True, frozen=True):
    """A death as versions without kinds have it."""

    cause: str
    what: str = "proc"
    proc: str = ""
    host: str = ""
    pid: int = 0
    detail: str = ""


@pytest.mark.parametrize("kind", [kind for kind in DeathKind if kind is not DeathKind.UNKNOWN])
def test_a_kind_crosses_the_wire_and_a_pickle(kind: DeathKind) -> None:
    death = Death.of(kind, "why", "p", "vm", 7, "more")
    assert decode_death(encode_death(death)) == death
    assert pickle.loads(pickle.dumps(death)) == death
    assert death_of(death) is death
    assert death_of(memoryview(encode_death(death))) == death


@pytest.mark.parametrize("kind", [kind for kind in DeathKind if kind is not DeathKind.UNKNOWN])
def test_an_earlier_version_reads_what_it_knows(kind: DeathKind) -> None:
    old = msgspec.msgpack.decode(encode_death(Death.of(kind, "why", "p", "vm", 7)), type=OldDeath)
    assert (old.cause, old.what, old.proc, old.host, old.pid) == ("why", kind.what, "p", "vm", 7)
    assert (old.what == "stopped") == (kind.intended)


@pytest.mark.parametrize(
    "what, kind",
    [
        ("proc", DeathKind.EXITED),
        ("stopped", DeathKind.STOPPED),
        ("agent", DeathKind.AGENT_UNREACHABLE),
        ("actor", DeathKind.ACTOR_FAILED),
    ],
)
def test_a_death_of_an_earlier_version_gets_the_kind_that_it_implies(what: str, kind: DeathKind) -> None:
    assert decode_death(msgspec.msgpack.encode(OldDeath("why", what, "p"))).kind is kind


def test_a_kind_of_a_later_version_is_read_as_what_died() -> None:
    later = msgspec.msgpack.encode(["why", "stopped", "p", "vm", 7, "", 250])
    assert decode_death(later).kind is DeathKind.STOPPED


@pytest.mark.parametrize("expected", [True, False])
def test_the_end_of_a_proc_as_an_earlier_agent_tells_it(expected: bool) -> None:
    told = decode(msgspec.msgpack.encode([32, "p", 7, "vm", -9, "killed by SIGKILL", expected]))
    assert told.death() == Death.of(
        DeathKind.STOPPED if expected else DeathKind.EXITED, "killed by SIGKILL", "p", "vm", 7, signal=9
    )


def test_the_end_of_a_proc_has_its_kind() -> None:
    told = ProcExited("p", 0, "vm", 127, "could not be started: no", False, DeathKind.NOT_STARTED)
    assert decode(encode(told)).death().kind is DeathKind.NOT_STARTED


@pytest.mark.parametrize(
    "gone, cause",
    [
        (None, "its host agent died"),
        (Death.of(DeathKind.AGENT_CLOSED, "the host agent ended"), "its host agent died"),
        (Death.of(DeathKind.AGENT_CLOSED, "in any other words"), "its host agent died"),
        (Death.of(DeathKind.AGENT_EXITED, "the host agent killed by SIGKILL"), "the host agent killed by SIGKILL"),
        (Death.of(DeathKind.AGENT_UNREACHABLE, "the host agent ended"), "the host agent ended"),
        (Death.of(DeathKind.CONTROLLER_CLOSED, "the controller ended"), "the controller ended"),
    ],
)
def test_what_was_reached_through_an_agent_says_why_it_is_gone(gone: Death | None, cause: str) -> None:
    assert lost_with(gone, "p", "vm", 7) == Death.of(DeathKind.HOST_LOST, cause, "p", "vm", 7)
