"""The load: actors that check what arrives, and actors that call them. No pytest here: every rank imports it."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.actor import Actor, ActorMesh, context, endpoint
from monarch_kernel.errors import SupervisionError

#: No call may take longer (seconds); nothing is stopped for longer than a fraction of it.
DEADLINE = 20.0
#: The same for the calls that an actor makes in a call.
INNER_DEADLINE = DEADLINE / 2


def places(part: ActorMesh[Any]) -> list[str]:
    """The procs that stand in the places of a mesh, as far as this process knows."""
    return [ref.id for ref in part._target().procs]


class Receiver(Actor):
    """Checks the numbers of what arrives."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.wrong: list[str] = []

    def _note(self, sender: str, numbers: dict[int, int]) -> None:
        me = context().actor_instance
        number = numbers[me.rank.rank]
        last = self.last.get(sender)
        if last is not None and number != last + 1:
            self.wrong.append(f"{me.proc_id}: {number} after {last} from {sender}")
        self.last[sender] = number

    @endpoint
    def take(self, sender: str, numbers: dict[int, int]) -> tuple[str, list[str]]:
        self._note(sender, numbers)
        return context().actor_instance.proc_id, self.wrong

    @endpoint
    def drop(self, sender: str, numbers: dict[int, int]) -> None:
        self._note(sender, numbers)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def leave(self, how: str) -> None:
        if how == "exit":
            os._exit(3)
        elif how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        else:
            sys.exit(4)


@dataclass
class Outcome:
    """What came of one call.

    Attributes:
        sender: the proc that called.
        failed: the procs over which it failed, and why.
        wrong: what must not be.
    """

    sender: str
    answered: bool = False
    failed: dict[str, str] = field(default_factory=dict[str, str])
    wrong: list[str] = field(default_factory=list[str])


class Numbered:
    """Calls a mesh, with numbers that count what each rank has been sent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers: dict[int, int] = {}

    def send(self, mesh: ActorMesh[Any], ranks: range, cast: bool, deadline: float) -> Outcome | None:
        """Call some ranks of a flat mesh, or tell them without waiting for an answer (then None)."""
        part = mesh if len(ranks) == len(mesh) else mesh.slice(ranks=slice(ranks.start, ranks.stop))
        numbers: dict[int, int] = {}
        for rank in ranks:
            numbers[rank] = self.numbers[rank] = self.numbers.get(rank, 0) + 1
        if cast:
            part.drop.broadcast(self.name, numbers)
            return None
        before = places(part)
        call = part.take.call(self.name, numbers)
        after = places(part)
        outcome = Outcome(self.name)
        try:
            answers = call.get(deadline)
        except TimeoutError as e:
            outcome.wrong.append(f"{self.name}: {e}")
            return outcome
        except SupervisionError as e:
            outcome.failed = {failure.proc: failure.message for failure in e.failures}
            return outcome
        outcome.answered = True
        healed = places(part)  # a call that is made while ranks are healed waits for that, and goes to the new ones
        for rank, (proc, wrong) in enumerate(answers.values()):
            if proc not in (before[rank], after[rank], healed[rank]):
                outcome.wrong.append(f"{self.name}: {proc} answered for {before[rank]}")
            outcome.wrong += wrong
        return outcome


class Talker(Actor):
    """A third party: calls receivers from where it is."""

    def __init__(self) -> None:
        self._numbered = Numbered(context().actor_instance.proc_id)

    @endpoint
    def talk(self, receivers: ActorMesh[Any], first: int, stop: int, cast: bool) -> Outcome | None:
        return self._numbered.send(receivers, range(first, stop), cast, INNER_DEADLINE)


@dataclass
class Report:
    """What happened."""

    answered: int = 0
    failed: int = 0
    relayed: int = 0
    relays_failed: int = 0
    heals: int = 0
    events: dict[str, int] = field(default_factory=dict[str, int])
    violations: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        events = ", ".join(f"{count} x {name}" for name, count in sorted(self.events.items()))
        lines = [
            f"{self.answered} answers, {self.failed} calls that failed with their ranks; {self.heals} heals",
            f"between ranks: {self.relayed} answers, {self.relays_failed} calls that failed",
            f"events: {events}",
            f"violations: {len(self.violations)}",
            *(f"  {one}" for one in self.violations[:20]),
        ]
        return "\n".join(lines)


class Sender(threading.Thread):
    """Calls and broadcasts to ranks and slices, one after the other, and checks what comes back."""

    def __init__(
        self, name: str, mesh: ActorMesh[Any], seed: int, report: Report, judge: Callable[[Outcome], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.mesh = mesh
        self.random = random.Random(seed)
        self.report = report
        self.judge = judge
        self.over = threading.Event()
        self.numbered = Numbered(name)

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self.step()
        except BaseException as e:
            self.report.violations.append(f"{self.name} ended: {type(e).__name__}: {e}")

    def choose(self) -> tuple[range, bool]:
        """Some ranks, and whether they are only told."""
        size = len(self.mesh)
        first = self.random.randrange(size)
        return range(first, first + self.random.randint(1, size - first)), self.random.random() < 0.3

    def step(self) -> None:
        ranks, cast = self.choose()
        outcome = self.numbered.send(self.mesh, ranks, cast, DEADLINE)
        if outcome is None:
            return
        self.report.answered += outcome.answered
        self.report.failed += bool(outcome.failed)
        self.judge(outcome)
        if outcome.failed:
            time.sleep(self.random.uniform(0, 0.01))  # a dead rank fails at once: leave some time to others


class Relayer(Sender):
    """Has the ranks call each other."""

    def __init__(
        self,
        name: str,
        talkers: ActorMesh[Any],
        mesh: ActorMesh[Any],
        seed: int,
        report: Report,
        judge: Callable[[Outcome], None],
    ) -> None:
        super().__init__(name, mesh, seed, report, judge)
        self.talkers = talkers

    def step(self) -> None:
        ranks, cast = self.choose()
        talker = self.talkers.slice(ranks=self.random.randrange(len(self.talkers)))
        try:
            outcome = talker.talk.call_one(self.mesh, ranks.start, ranks.stop, cast).get(DEADLINE)
        except TimeoutError as e:
            self.report.violations.append(f"{self.name}: {e}")
            return
        except SupervisionError as e:
            self.judge(Outcome("", failed={failure.proc: failure.message for failure in e.failures}))
            time.sleep(self.random.uniform(0, 0.01))
            return
        if outcome is not None:
            self.report.relayed += outcome.answered
            self.report.relays_failed += bool(outcome.failed)
            self.judge(outcome)
