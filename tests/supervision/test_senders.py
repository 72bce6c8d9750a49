"""Who can send to a port: every short history, against a plain account of what may be true."""

from __future__ import annotations

import itertools

import pytest

from monarch_kernel.protocol.messages import Death, ProcRef
from monarch_kernel.runtime.mesh.shape import Extent
from monarch_kernel.runtime.supervision import Sender, Senders

KILLED = Death("killed by SIGKILL")
PROCS = ("p", "q")
ACTORS = ("a", "b")
WHO = tuple(itertools.product(PROCS, ACTORS))

EVENTS = [
    *(("give", proc, actor) for proc, actor in WHO),
    *(("let go", proc, actor) for proc, actor in WHO[:2]),
    ("actor ends", "p", "a"),
    ("proc dies", "p", ""),
    ("proc dies", "q", ""),
    ("unknown", "", ""),
]


def sender(proc: str, actor: str) -> Sender:
    ref = ProcRef(proc, f"/run/{proc}.sock", "host", "agent", "/run/agent.sock")
    return Sender(ref, actor, "mesh", PROCS.index(proc), Extent(("gpus",), (2,)))


class Account:
    """The same as sets and sums, from the whole history."""

    def __init__(self, history: tuple[tuple[str, str, str], ...]) -> None:
        self.copies = dict.fromkeys(WHO, 0)
        self.died: set[tuple[str, str]] = set()
        self.unknown = False
        for what, proc, actor in history:
            who = (proc, actor)
            if what == "give":
                self.copies[who] += 1
                self.died.discard(who)
            elif what == "let go":
                self.copies[who] = max(0, self.copies[who] - 1)
            elif what == "unknown":
                self.unknown = True
            else:
                for each in WHO:
                    if each[0] == proc and (not actor or each == who) and self.copies[each]:
                        self.copies[each] = 0
                        self.died.add(each)

    @property
    def lost(self) -> set[tuple[str, str]]:
        return set() if self.unknown or any(self.copies.values()) else self.died


def tell(senders: Senders, what: str, proc: str, actor: str) -> bool | None:
    if what == "give":
        senders.given([sender(proc, actor)])
    elif what == "let go":
        return senders.let_go(proc, actor)
    elif what == "unknown":
        senders.given_to_unknown()
    else:
        return senders.ended(lambda s: s.proc.id == proc and (not actor or s.actor == actor), KILLED)
    return None


@pytest.mark.parametrize("length", range(1, 6))
def test_every_short_history(length: int) -> None:
    for history in itertools.product(EVENTS, repeat=length) if length < 5 else _some(length):
        senders = Senders()
        news = None
        for event in history:
            news = tell(senders, *event)
        account = Account(history)
        lost = {(s.proc.id, s.actor) for s, death in senders.lost}
        assert lost == account.lost, history
        if news is not None:  # whoever waits is told when it becomes lost, and never when it is not
            before = Account(history[:-1])
            assert not news or lost, history
            assert news or not lost or lost == before.lost, history


def _some(length: int) -> itertools.product[tuple[tuple[str, str, str], ...]]:
    """Longer ones of the most telling events."""
    few = [event for event in EVENTS if event[1:] in (("p", "a"), ("q", "a"), ("p", ""), ("q", ""))]
    return itertools.product(few, repeat=length)


def test_a_death_names_who_had_it_and_why() -> None:
    senders = Senders()
    senders.given([sender("p", "a"), sender("q", "a")])
    assert not senders.ended(lambda s: s.proc.id == "p", KILLED)
    assert senders.ended(lambda s: s.proc.id == "q", Death("stopped: enough", "stopped"))
    assert [(s.proc.id, death.cause) for s, death in senders.lost] == [
        ("p", "killed by SIGKILL"),
        ("q", "stopped: enough"),
    ]
