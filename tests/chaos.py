"""A mesh under load while its ranks and its host agent are killed, stopped and healed at random.

    python -m tests.chaos --seed 7 --minutes 10

What must hold, whatever happens:

* every call ends before its deadline, with an answer or with an error that names what died;
* an answer is from the proc that stood in that place when the call was made;
* what one sender sends to one actor arrives once, in order, and without gaps for as long as that actor lives;
* after the last heal everything answers, and when all is over nothing is left (the test looks at that).

The same seed gives the same sequence of events; when each of them meets the load is up to the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel import actor as public
from monarch_kernel.actor import Actor, ActorMesh, MeshFailure, ProcMesh, context, endpoint, shutdown_context, this_host

#: No call may take longer (seconds); nothing is stopped for longer than a fraction of it.
DEADLINE = 20.0
STOPPED = 0.3
SENDERS = 2


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
class Report:
    """What happened."""

    answered: int = 0
    failed: int = 0
    heals: int = 0
    events: dict[str, int] = field(default_factory=dict[str, int])
    violations: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        events = ", ".join(f"{count} x {name}" for name, count in sorted(self.events.items()))
        lines = [
            f"{self.answered} answers, {self.failed} calls that failed with their ranks; {self.heals} heals",
            f"events: {events}",
            f"violations: {len(self.violations)}",
            *(f"  {one}" for one in self.violations[:20]),
        ]
        return "\n".join(lines)


class Sender(threading.Thread):
    """Calls and broadcasts to ranks and slices, one after the other, and checks what comes back."""

    def __init__(self, name: str, mesh: ActorMesh[Any], seed: int, report: Report, over: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self.mesh = mesh
        self.random = random.Random(seed)
        self.report = report
        self.over = over
        self.numbers = dict.fromkeys(range(len(mesh)), 0)

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self.step()
        except BaseException as e:
            self.report.violations.append(f"{self.name} ended: {type(e).__name__}: {e}")

    def step(self) -> None:
        size = len(self.mesh)
        first = self.random.randrange(size)
        count = self.random.randint(1, size - first)
        part = self.mesh if count == size else self.mesh.slice(gpus=slice(first, first + count))
        numbers: dict[int, int] = {}
        for rank in range(first, first + count):
            self.numbers[rank] += 1
            numbers[rank] = self.numbers[rank]
        if self.random.random() < 0.3:
            part.drop.broadcast(self.name, numbers)
            return
        before = self.places(part)
        calls = [part.take.call(self.name, numbers)]
        after = self.places(part)
        for call in calls:
            self.check(call, before, after)

    def places(self, part: ActorMesh[Any]) -> list[str]:
        return [ref.id for ref in part._target().procs]

    def check(self, call: Any, before: list[str], after: list[str]) -> None:
        try:
            answers = call.get(DEADLINE)
        except TimeoutError as e:
            self.report.violations.append(f"{self.name}: {e}")
            return
        except MeshFailure:
            self.report.failed += 1
            time.sleep(self.random.uniform(0, 0.01))  # a dead rank fails at once: leave some time to others
            return
        self.report.answered += 1
        for rank, (proc, wrong) in enumerate(answers.values()):
            if proc not in (before[rank], after[rank]):
                self.report.violations.append(f"{self.name}: {proc} answered for {before[rank]}")
            self.report.violations += wrong


class Chaos:
    """The one that kills.

    Args:
        minutes: for how long.
    """

    def __init__(self, seed: int, minutes: float, ranks: int = 4) -> None:
        self.random = random.Random(seed)
        self.seconds = minutes * 60
        self.report = Report()
        self.procs: ProcMesh = this_host().spawn_procs(per_host={"gpus": ranks}, name="chaos")
        self.mesh: ActorMesh[Any] = self.procs.spawn("receivers", Receiver)
        self.mesh.pid.call().get(DEADLINE)
        self.over = threading.Event()
        self.senders = [
            Sender(f"sender {k}", self.mesh, seed * 1000 + k, self.report, self.over) for k in range(SENDERS)
        ]

    def run(self) -> Report:
        """Until the time is up; then everything is healed and asked once more."""
        for sender in self.senders:
            sender.start()
        until = time.monotonic() + self.seconds
        events = (self.kill, self.kill, self.stop, self.leave, self.kill_several, self.heal, self.heal, self.kill_agent)
        weights = (4, 4, 3, 4, 2, 6, 6, 1)
        while time.monotonic() < until and not self.report.violations:
            time.sleep(self.random.uniform(0.0, 0.15))
            event = self.random.choices(events, weights)[0]
            self.report.events[event.__name__] = self.report.events.get(event.__name__, 0) + 1
            event()
        self.over.set()
        for sender in self.senders:
            sender.join(DEADLINE * 2)
            if sender.is_alive():
                self.report.violations.append(f"{sender.name} did not come to an end")
        for number in range(1, 6):
            self.heal(final=True)
            try:
                answers = self.mesh.take.call("last", dict.fromkeys(range(len(self.mesh)), number)).get(DEADLINE)
            except MeshFailure:
                continue  # killed last, and noticed only after the heal had looked
            for _proc, wrong in answers.values():
                self.report.violations += wrong
            return self.report
        self.report.violations.append("healed again and again, and still some rank did not answer")
        return self.report

    # -- events -------------------------------------------------------------------------------------

    def living(self) -> list[int]:
        node = self.procs._system.node
        procs = [ref.id for ref in self.procs._target().procs]
        return [pid for proc in procs if proc not in node.deaths and (pid := node.pids.get(proc, 0))]

    def signal(self, pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    def kill(self) -> None:
        pids = self.living()
        if pids:
            self.signal(self.random.choice(pids), signal.SIGKILL)

    def kill_several(self) -> None:
        for pid in self.living()[:: self.random.randint(1, 2)]:
            self.signal(pid, signal.SIGKILL)

    def stop(self) -> None:
        pids = self.living()
        if pids:
            pid = self.random.choice(pids)
            self.signal(pid, signal.SIGSTOP)
            time.sleep(self.random.uniform(0, STOPPED))
            self.signal(pid, signal.SIGCONT)

    def leave(self) -> None:
        rank = self.random.randrange(len(self.mesh))
        how = self.random.choice(("exit", "segfault", "actor"))
        try:
            self.mesh.slice(gpus=rank).leave.call_one(how).get(DEADLINE)
        except MeshFailure:
            pass
        except TimeoutError as e:
            self.report.violations.append(f"leave: {e}")

    def kill_agent(self) -> None:
        process = self.procs._system.agent_process
        if process is not None:
            self.signal(process.pid, signal.SIGKILL)

    def heal(self, final: bool = False) -> None:
        """Heal; more may die meanwhile (not at the end)."""
        for _ in range(5):
            try:
                if self.procs.heal(timeout=DEADLINE).get(DEADLINE * 2):
                    self.report.heals += 1
                return
            except MeshFailure as e:
                problem: Exception = e
            except TimeoutError as e:
                self.report.violations.append(f"heal: {e}")
                return
        if final:
            self.report.violations.append(f"the last heal failed: {problem}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    found = parser.parse_args()
    public.unhandled_fault_hook = lambda _failure: None
    print(f"seed {found.seed}", flush=True)
    report = Chaos(found.seed, found.minutes, found.ranks).run()
    print(report)
    shutdown_context().get(DEADLINE)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
