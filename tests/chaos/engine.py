"""The one that breaks and heals, and judges what comes of it; and what can break on one host."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, ClassVar

from monarch_kernel.actor import ActorError, ActorMesh, HealError, HostMesh, MeshFailure, ProcMesh, this_host
from tests.chaos.events import Event, pick, sequence
from tests.chaos.load import DEADLINE, Outcome, Receiver, Relayer, Report, Sender, Talker
from tests.conftest import alive

#: How long what is only stopped is stopped, at most (seconds).
STOPPED = 0.3
SENDERS = 2
#: How often the last heal is tried: what was broken last may be noticed only after it.
LAST_TRIES = 8
#: How often another heal is tried when more ranks die in the middle of it.
TRIES = 5


class Chaos:
    """One run on this host.

    Args:
        minutes: for how long.
        ranks: on each host.
    """

    #: How often each event happens, in relation to the others.
    weights: ClassVar[dict[str, int]] = {
        "kill": 8,
        "stop": 3,
        "leave": 4,
        "kill_several": 2,
        "heal": 12,
        "kill_agent": 1,
    }

    def __init__(self, seed: int, minutes: float, ranks: int = 4) -> None:
        self.seed = seed
        self.seconds = minutes * 60
        self.report = Report()
        #: Procs and agents that may be dead, as an event has harmed them.
        self.harmed: set[str] = set()
        #: Pairs of procs that could not reach each other for a time.
        self.parted: set[frozenset[str]] = set()
        #: Processes that have to end: until when, which, and why.
        self.ending: list[tuple[float, set[int], str]] = []
        self._known: set[str] = set()
        self.procs: ProcMesh = self.spawn(ranks)
        self.node = self.procs._system.node
        self.mesh: ActorMesh[Any] = self.procs.spawn("receivers", Receiver).flatten("ranks")
        self.talkers: ActorMesh[Any] = self.procs.spawn("talkers", Talker).flatten("ranks")
        self.mesh.pid.call().get(DEADLINE)
        self.senders = [
            Sender(f"sender {k}", self.mesh, seed * 1000 + k, self.report, self.judge) for k in range(SENDERS)
        ]
        self.senders.append(Relayer("relayer", self.talkers, self.mesh, seed * 1000 + 99, self.report, self.judge))

    def spawn(self, ranks: int) -> ProcMesh:
        """Start the mesh."""
        return this_host().spawn_procs(per_host={"gpus": ranks}, name="chaos")

    def spares(self) -> HostMesh | None:
        """Hosts in the places of those that are gone."""
        return None

    def whole(self) -> None:
        """Repair all that heals need."""

    def may_fail(self) -> bool:
        """Whether a heal may find that there is no host for it."""
        return False

    def run(self) -> Report:
        """Until the time is up; then everything is repaired, healed and asked once more."""
        for sender in self.senders:
            sender.start()
        until = time.monotonic() + self.seconds
        for event in sequence(self.seed, self.weights):
            if time.monotonic() >= until or self.report.violations:
                break
            time.sleep(event.pause)
            self.report.events[event.name] = self.report.events.get(event.name, 0) + 1
            getattr(self, event.name)(event)
            self.look()
        for sender in self.senders:
            sender.over.set()
        for sender in self.senders:
            sender.join(DEADLINE * 2)
            if sender.is_alive():
                self.report.violations.append(f"{sender.name} did not come to an end")
        self.finish()
        return self.report

    def finish(self) -> None:
        """Everybody is made whole, and reaches everybody."""
        self.whole()
        why = ""
        for number in range(1, LAST_TRIES + 1):
            self.heal(None, final=True)
            size = len(self.mesh)
            try:
                answers = self.mesh.take.call("last", dict.fromkeys(range(size), number)).get(DEADLINE)
                said = self.talkers.talk.call(self.mesh, 0, size, False).get(DEADLINE)
            except (MeshFailure, TimeoutError) as e:  # killed last, and noticed only after the heal had looked
                why = str(e)
                continue
            for _proc, wrong in answers.values():
                self.report.violations += wrong
            failed = [f"{one.sender}: {one.failed}" for one in said.values() if not one.answered]
            for one in said.values():
                self.report.violations += one.wrong
            if not failed:
                break
            why = "; ".join(failed)
        else:
            self.report.violations.append(f"healed repeatedly, and an actor still cannot be reached: {why}")
        while self.ending and not self.report.violations:
            self.look()
            time.sleep(0.05)

    # -- judging ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Whoever has died must have been harmed; what had to end must have ended."""
        for name, death in list(self.node.deaths.items()):
            if name in self._known:
                continue
            self._known.add(name)
            if not self.excused(name) and death.what != "stopped" and "could not be healed" not in death.cause:
                self.report.violations.append(f"{name} died without being harmed: {death.cause}")
        now = time.monotonic()
        for entry in list(self.ending):
            until, pids, why = entry
            if not any(map(alive, pids)):
                self.ending.remove(entry)
            elif now > until:
                self.ending.remove(entry)
                self.report.violations.append(f"{[p for p in pids if alive(p)]} live on, though {why}")

    def excused(self, proc: str) -> bool:
        """Whether a proc may be dead."""
        return proc in self.harmed or self.agent_of(proc) in self.harmed

    def excuses(self, one: str, other: str) -> bool:
        """Whether two procs may fail to reach each other."""
        return frozenset({one, other}) in self.parted

    def agent_of(self, proc: str) -> str:
        """The agent of a proc, as its id."""
        ref = self.node.refs.get(proc)
        return ref.agent if ref is not None else ""

    def judge(self, outcome: Outcome) -> None:
        """A call may fail only over what was harmed."""
        self.report.violations += outcome.wrong
        for proc, cause in outcome.failed.items():
            if self.excused(proc) or self.excused(outcome.sender) or self.excuses(outcome.sender, proc):
                continue
            sender = outcome.sender or "the controller"
            self.report.violations.append(f"{sender} could not call {proc}, which had not been harmed: {cause}")

    # -- events -------------------------------------------------------------------------------------

    def living(self, agent: str = "") -> dict[str, int]:
        """The procs of the mesh (on one host) that live as far as is known, and their process ids."""
        refs = self.procs._target().procs
        mine = [ref.id for ref in refs if not agent or ref.agent == agent]
        return {proc: pid for proc in mine if proc not in self.node.deaths and (pid := self.node.pids.get(proc, 0))}

    def strike(self, proc: str, pid: int) -> None:
        """Kill a proc."""
        self.harmed.add(proc)
        send(pid, signal.SIGKILL)

    def kill(self, event: Event) -> None:
        procs = self.living()
        if procs:
            proc = pick(list(procs), event.dice[0])
            self.strike(proc, procs[proc])

    def kill_several(self, event: Event) -> None:
        for proc, pid in list(self.living().items())[:: pick((1, 2), event.dice[0])]:
            self.strike(proc, pid)

    def stop(self, event: Event) -> None:
        procs = self.living()
        if procs:
            stop_for(pick(list(procs.values()), event.dice[0]), event.dice[1] * STOPPED)

    def leave(self, event: Event) -> None:
        rank = pick(range(len(self.mesh)), event.dice[0])
        how = pick(("exit", "segfault", "actor"), event.dice[1])
        self.harmed.add(self.procs._target().procs[rank].id)
        try:
            self.mesh.slice(ranks=rank).leave.call_one(how).get(DEADLINE)
        except MeshFailure:
            pass
        except TimeoutError as e:
            self.report.violations.append(f"leave: {e}")

    def kill_agent(self, _event: Event) -> None:
        process = self.procs._system.agent_process
        if process is not None:
            self.harmed.update(ref.agent for ref in self.procs._target().procs)
            send(process.pid, signal.SIGKILL)

    def heal(self, _event: Event | None, final: bool = False) -> None:
        """Heal; more may die meanwhile (not at the end)."""
        problem: Exception | None = None
        for _ in range(TRIES):
            try:
                if self.procs.heal(self.spares(), timeout=DEADLINE).get(DEADLINE * 2):
                    self.report.heals += 1
                return
            except (MeshFailure, ActorError) as e:
                problem = e
            except HealError as e:
                problem = e
                if self.may_fail():
                    break
            except TimeoutError as e:
                self.report.violations.append(f"heal: {e}")
                return
        if final or (isinstance(problem, HealError) and not self.may_fail()):
            self.report.violations.append(f"a heal failed: {problem}")


def send(pid: int, number: int) -> None:
    """Send a signal, if the process is still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def stop_for(pid: int, seconds: float) -> None:
    """Stop a process for so long."""
    send(pid, signal.SIGSTOP)
    time.sleep(seconds)
    send(pid, signal.SIGCONT)
