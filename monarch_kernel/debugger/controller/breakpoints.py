"""Breakpoints on meshes: set and clear them, arm them in the ranks that they apply to, and handle votes.

`Differs`, `First` and `follow_line` do no I/O.
"""

from __future__ import annotations

import linecache
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle

from monarch_kernel.actor import ProcMesh
from monarch_kernel.debugger.controller.common_point import CommonPoint
from monarch_kernel.debugger.controller.query import Answers, ask_agents
from monarch_kernel.debugger.controller.registry import DebuggedMesh, StopRegistry
from monarch_kernel.debugger.events import BreakpointsChanged, MeshBreakpoint, RankStop
from monarch_kernel.debugger.model.stops import Bound, Breakpoint
from monarch_kernel.debugger.rank import rank_debugger
from monarch_kernel.debugger.rank.collective_wait import extend_timeouts, partners_here, waiting_here
from monarch_kernel.display.quantities import duration
from monarch_kernel.engines import tool_runtime
from monarch_kernel.meshes import format_ranks

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger

# Find out how long other ranks will wait for stopped ranks: the timeouts of their process groups.
#
# Other ranks wait for a stopped rank in their collectives. These time out eventually (gloo: after 30 minutes by
# default, NCCL: 10) and end the run.

#: How long ranks may take to report what they wait for (seconds).
ASK_TIMEOUT = 0.5


@dataclass(frozen=True, slots=True)
class Countdown:
    """A timeout that runs while ranks are stopped.

    Attributes:
        left: a lower bound for the remaining time (seconds); the wait may have begun after the first stop.
        limit: the timeout (seconds).
        mesh: the name of the mesh.
        ranks: the ranks that wait.
        what: the collective, such as `all_reduce`.
    """

    left: float
    limit: float
    mesh: str
    ranks: tuple[int, ...]
    what: str


def countdown(debugger: MeshDebugger, stops: Sequence[RankStop]) -> Countdown | None:
    """The timeout that expires first among collectives that wait for these stops; None if no rank waits or answers."""
    from monarch_kernel.debugger.controller.query import ask

    found: list[Countdown] = []
    for mesh in {at.mesh for at in stops}:
        here = [at for at in debugger.stops(mesh) if at.stop.thread]
        if not here:
            continue
        procs = debugger.mesh(mesh)
        stopped = {at.rank for at in here}
        others = [rank for rank in range(len(procs)) if rank not in stopped]
        answers = ask(procs, waiting_here, ranks=others, timeout=ASK_TIMEOUT) if others else None
        waiting = {rank: said for rank, said in answers.values.items() if said} if answers is not None else {}
        if waiting:
            limit = min(each for _, each in waiting.values())
            began = min(at.stop.since for at in here)
            what = sorted({name for name, _ in waiting.values()})[0]
            left = max(0.0, began + limit - time.time())
            found.append(Countdown(left, limit, mesh, tuple(sorted(waiting)), what))
    return min(found, key=lambda each: each.left, default=None)


def stops_alone(size: int, ranks: Sequence[int], first: bool, partners: Mapping[int, Any]) -> str:
    """Explain why ranks of a mesh cannot all stop at a breakpoint, if ranks that continue will wait for stopped ones.

    Args:
        size: the number of ranks of the mesh.
        ranks: the ranks that the breakpoint applies to.
        first: whether only the first of them stops.
        partners: the answers of these ranks to ``partners_here``.

    Returns:
        The explanation in words; "" if no rank will wait.
    """
    known = [each for each in partners.values() if each is not None]
    shared = {rank for found, _ in known for rank in found if rank < size}
    others = shared if first else shared - set(ranks)
    if not others:
        return ""
    limit = duration(min(limit for _, limit in known)).removesuffix(" 0 s")
    if first:
        return f"the other ranks wait for it in their next collective, for up to {limit}, and do not come to this line"
    who = f"ranks {format_ranks(sorted(others), limit=6)} do" if len(others) > 1 else f"rank {min(others)} does"
    wait = "wait" if len(others) > 1 else "waits"
    return f"{who} not stop there, and {wait} for the stopped ones in the next collective, for up to {limit}"


def extend(debugger: MeshDebugger, mesh: ProcMesh, seconds: float) -> str:
    """Ask the process groups of a mesh to wait longer in later collectives. Stopped ranks answer this, too.

    Returns:
        One line for the user: how many groups on which ranks were changed, and which groups refused.
    """
    from monarch_kernel.debugger.controller.query import ask

    answers = ask(debugger.mesh(mesh) if isinstance(mesh, str) else mesh, extend_timeouts, seconds, timeout=2.0)
    done = {rank: count for rank, (count, _) in answers.values.items() if count}
    refused = sorted({why for _, reasons in answers.values.values() for why in reasons})
    refused += [f"ranks {format_ranks(answers.late)} do not answer"] if answers.late else []
    if not done and not refused:
        return "No rank has a process group, so no collective times out."
    groups = max(done.values(), default=0)
    said = f"{groups} process group{'s' * (groups != 1)} on ranks {format_ranks(sorted(done))}: " if done else ""
    limit = f"collectives that begin from now on wait for up to {duration(seconds)}" if done else "none was extended"
    return said + limit + (f"; refused: {'; '.join(refused)}" if refused else "")


if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.registry import MeshOrName


log = logging.getLogger(__name__)

#: How long ranks may take to arm breakpoints (seconds). The call does not wait for slower ranks.
ARM_TIMEOUT = 2.0
#: How many times in a row arming is retried for a rank that has begun but could not be armed.
TRIES = 20
#: How many rounds of votes are kept per breakpoint, for ranks that arrive after the others.
ROUNDS_KEPT = 64
#: The minimum similarity of two lines for one to count as an edited version of the other (0 to 1).
ALIKE = 0.6
#: Longer differences are not compared line by line, because the time grows with the square of their length.
MOST_COMPARED = 4000


@dataclass(slots=True)
class _Round:
    """One pass of the ranks over a line."""

    values: dict[int, str] = field(default_factory=dict[int, str])
    waiting: set[int] = field(default_factory=set[int])
    agreed: str | None = None  # the value of all ranks that took part, if they continue
    stopped: bool = False


class Differs:
    """Stops all ranks at their n-th pass over a line, if they disagree there.

    The decision is made when all ranks have arrived, or when `decide` ends the wait; later ranks are compared with it.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}

    def vote(self, rank: int, hit: int, value: str, voters: Collection[int]) -> dict[int, bool]:
        """Record that a rank has arrived for the `hit`-th time; `voters` are all ranks that may arrive.

        Returns:
            For each rank whose wait is over, whether it stops.
        """
        one = self._rounds.setdefault(hit, _Round())
        for old in sorted(self._rounds)[:-ROUNDS_KEPT]:
            del self._rounds[old]
        one.values[rank] = value
        if one.stopped:
            return {rank: True}
        if one.agreed is not None:
            return {rank: value != one.agreed}
        one.waiting.add(rank)
        return self.decide(hit) if set(voters) <= set(one.values) else {}

    def decide(self, hit: int) -> dict[int, bool]:
        """Decide a round by the votes so far."""
        one = self._rounds.get(hit)
        if one is None or not one.waiting:
            return {}
        one.stopped = len(set(one.values.values())) > 1
        if not one.stopped:
            one.agreed = next(iter(one.values.values()))
        decided = dict.fromkeys(sorted(one.waiting), one.stopped)
        one.waiting.clear()
        return decided


class First:
    """Stops the first rank that arrives, and no other until that rank has continued."""

    def __init__(self) -> None:
        self.holder: int | None = None

    def vote(self, rank: int) -> bool:
        """Return whether this rank stops."""
        if self.holder is None:
            self.holder = rank
            return True
        return False

    def released(self, rank: int) -> None:
        """Release the vote, if that rank holds it: it has continued, or is dead."""
        if self.holder == rank:
            self.holder = None


@dataclass(slots=True)
class _OfMesh:
    """The state of breakpoints on one mesh.

    Attributes:
        unarmed: the ranks that could not be armed, and the number of attempts.
        votes: the vote of each breakpoint whose ranks vote.
    """

    unarmed: dict[int, int] = field(default_factory=dict[int, int])
    votes: dict[int, Differs | First] = field(default_factory=dict[int, Differs | First])


class Breakpoints:
    """The breakpoints of a debugger. Thread-safe, with the registry's lock.

    Args:
        registry: the registry of meshes; this object becomes its listener.
    """

    def __init__(self, registry: StopRegistry) -> None:
        self._registry = registry
        self._lock = registry.lock
        self._by_id: dict[int, MeshBreakpoint] = {}
        self._last = 0
        self._lines: dict[int, list[str]] = {}  # by breakpoint: its file when its line was counted
        self._meshes: dict[str, _OfMesh] = {}
        self._of_process = os.urandom(4).hex()
        self._orders = 0
        self._beginning: set[str] = set()  # the points of breakpoints that are being set
        self._undecided: set[tuple[str, str]] = set()  # meshes and points on which the ranks have not decided yet
        registry.listener = self

    # -- setting and clearing ----------------------------------------------------------------------

    def add(self, spec: Breakpoint, mesh: MeshOrName | None, ranks: Iterable[int] | None, owner: str) -> MeshBreakpoint:
        """Set a breakpoint, and assign its id; see `hub.MeshDebugger.break_at`."""
        watched = None if mesh is None else self._registry.find(mesh)
        chosen = None if ranks is None else tuple(sorted(set(ranks)))
        if watched is not None and chosen is not None:
            wrong = [rank for rank in chosen if not 0 <= rank < watched.size]
            if wrong:
                size = watched.size
                raise ValueError(f"mesh {watched.name} has no rank {wrong[0]}: it has {size} (0 to {size - 1})")
        with self._lock:
            made = self._add(spec, None if watched is None else watched.name, chosen, owner)
        self._arm(None if watched is None else [watched], {made.spec.together})
        return made

    def _add(self, spec: Breakpoint, mesh: str | None, ranks: tuple[int, ...] | None, owner: str) -> MeshBreakpoint:
        self._last += 1
        if spec.file:
            linecache.checkcache(spec.file)
            self._lines[self._last] = linecache.getlines(spec.file)
        together = "" if spec.error or spec.log else f"{self._of_process}-{self._last}"
        spec = replace(spec, id=self._last, together=together)
        if together:
            self._beginning.add(together)
        made = self._by_id[self._last] = MeshBreakpoint(self._last, mesh, ranks, spec, owner)
        return made

    def replace(self, file: str, owner: str, lines: Sequence[Mapping[str, Any]]) -> list[MeshBreakpoint]:
        """See `hub.MeshDebugger.replace`."""
        with self._lock:
            old = [each.id for each in self._by_id.values() if each.owner == owner and each.spec.file == file]
            for number in old:
                del self._by_id[number]
                self._lines.pop(number, None)
            made: list[MeshBreakpoint] = []
            for each in lines:
                condition, log_text = str(each.get("condition") or ""), str(each.get("log") or "")
                spec = Breakpoint(0, file, int(each["line"]), condition, int(each.get("hits") or 0), log=log_text)
                made.append(self._add(spec, None, None, owner))
        if old or made:
            self._arm(None, {each.spec.together for each in made})
        return made

    def all(self) -> list[MeshBreakpoint]:
        """Return all breakpoints, oldest first."""
        with self._lock:
            return list(self._by_id.values())

    def clear(self, number: int | None, owner: str | None) -> int:
        """See `hub.MeshDebugger.clear`."""
        with self._lock:
            if number is not None and number not in self._by_id:
                known = ", ".join(map(str, self._by_id)) or "none"
                raise ValueError(f"there is no breakpoint {number}; there are {known}")
            gone = [
                each.id for each in self._by_id.values() if number in (None, each.id) and owner in (None, each.owner)
            ]
            for each in gone:
                del self._by_id[each]
                self._lines.pop(each, None)
        if gone:
            self._arm(None)
        return len(gone)

    def on_sources_changed(self, paths: Collection[str]) -> None:
        """Move breakpoints to the new positions of their lines, after ranks have loaded new versions of these files."""
        changed = {os.path.realpath(path) for path in paths}
        moved = False
        with self._lock:
            for each in self._by_id.values():
                if each.spec.file and os.path.realpath(each.spec.file) in changed:
                    moved = self._follow(each) or moved
        if moved:
            self._arm(None)

    def _follow(self, made: MeshBreakpoint) -> bool:
        """Move one breakpoint. Return whether its file has changed."""
        old = self._lines.get(made.id, [])
        linecache.checkcache(made.spec.file)
        new = linecache.getlines(made.spec.file)
        if not old or not new or old == new:
            return False
        line = follow_line(old, new, made.spec.line)
        made.bound.clear()
        if line is None:
            text = old[made.spec.line - 1].strip() if made.spec.line <= len(old) else ""
            made.lost = f"its line {made.spec.line} ({text}) is gone from the file: clear it, or set it at another line"
        else:
            made.spec = replace(made.spec, line=line)
            self._lines[made.id] = new
            made.lost = ""
        return True

    # -- arming --------------------------------------------------------------------------------------

    def on_new_mesh(self, mesh: ProcMesh) -> None:
        """Arm the breakpoints for all meshes on a new mesh, before any code runs there."""
        if self._any_everywhere():
            self._arm([self._registry.watch(mesh)])

    def _any_everywhere(self) -> bool:
        """Whether a breakpoint applies to all meshes."""
        with self._lock:
            return any(each.mesh is None for each in self._by_id.values())

    def _next_order(self) -> tuple[str, int]:
        """Create an increasing version of the breakpoints, so that ranks keep the latest. The lock is held."""
        self._orders += 1
        return self._of_process, self._orders

    def _specs(self, watched: DebuggedMesh, rank: int) -> list[Breakpoint]:
        return [each.spec for each in self._by_id.values() if each.holds_on(watched.name, rank)]

    def _arm(self, meshes: Sequence[DebuggedMesh] | None, new: Collection[str] = ()) -> None:
        """Arm the ranks of these meshes (None: of all) with their current breakpoints. Wait up to `ARM_TIMEOUT`.

        Args:
            new: the points of breakpoints that have just been set: they take effect on all of their ranks together.
        """
        try:
            self._arm_all(meshes, new)
        finally:
            with self._lock:
                self._beginning.difference_update(new)

    def _arm_all(self, meshes: Sequence[DebuggedMesh] | None, new: Collection[str]) -> None:
        if meshes is None:
            if self._any_everywhere():
                self._registry.watch_all()
            meshes = self._registry.all()
        deadline = time.monotonic() + ARM_TIMEOUT
        for watched in meshes:
            if tool_runtime().driver_of(watched.whole.procs):
                continue  # another viewer arms its ranks
            with self._lock:
                order = self._next_order()
                alike: dict[tuple[Breakpoint, ...], list[int]] = {}
                for rank in range(watched.size):
                    alike.setdefault(tuple(self._specs(watched, rank)), []).append(rank)
                begun = {specs: self._begun(watched, specs) for specs in alike}
            for specs, ranks in alike.items():
                left = max(0.1, deadline - time.monotonic())
                armed = rank_debugger.arm, order, list(specs), begun[specs]
                answers = ask_agents(watched.agents, watched.whole, *armed, ranks=ranks, timeout=left)
                for rank, bound in answers.values.items():
                    self._on_bound(watched, rank, bound)
                for rank in answers.errors:
                    log.warning("rank %d of mesh %s could not be armed: %s", rank, watched.name, answers.error_of(rank))
            self._agree(watched, alike, new)
        self._registry.tell(BreakpointsChanged())

    def _begun(self, watched: DebuggedMesh, specs: Iterable[Breakpoint]) -> list[str]:
        """Return the points of breakpoints that are decided. A rank that is armed now counts as having reached them.

        The lock is held.
        """
        keys = [spec.together for spec in specs if spec.together and spec.together not in self._beginning]
        return [key for key in keys if (watched.whole.uid, key) not in self._undecided]

    def _agree(
        self, watched: DebuggedMesh, alike: Mapping[tuple[Breakpoint, ...], Sequence[int]], new: Collection[str]
    ) -> None:
        """Let new breakpoints, which are armed now, take effect on all of their ranks together."""
        until = time.monotonic() + ARM_TIMEOUT
        for key in filter(None, new):
            ranks = [rank for specs, of in alike.items() if any(spec.together == key for spec in specs) for rank in of]
            if ranks:
                self._agree_on(watched, key, ranks, max(0.1, until - time.monotonic()))

    def _agree_on(self, watched: DebuggedMesh, key: str, ranks: Sequence[int], timeout: float) -> None:
        def over() -> bool:
            return self._made_for(key) is None or self._registry.by_uid(watched.whole.uid) is not watched

        def decided() -> None:
            with self._lock:
                self._undecided.discard((watched.whole.uid, key))

        with self._lock:
            self._undecided.add((watched.whole.uid, key))
        ask = partial(ask_agents, watched.agents, watched.whole, timeout=ARM_TIMEOUT)
        CommonPoint(ask, key, ranks, lambda why: self._note(watched, key, why), over, decided).begin(timeout)
        self._note_apart(watched, key, ranks, ask)

    def _note_apart(self, watched: DebuggedMesh, key: str, ranks: Sequence[int], ask: Callable[..., Answers]) -> None:
        """Record why ranks cannot stop at a new breakpoint together: some continue and wait for those that stop."""
        made = self._made_for(key)
        if made is None or (len(ranks) == watched.size and not made.spec.first):
            return
        why = stops_alone(watched.size, ranks, made.spec.first, ask(partners_here, ranks=ranks).values)
        if why:
            self._note(watched, key, why)

    def _note(self, watched: DebuggedMesh, key: str, why: str) -> None:
        made = self._made_for(key)
        if made is not None:
            known = made.apart.get(watched.name)
            made.apart[watched.name] = f"{known}; {why}" if known else why
            self._registry.tell(BreakpointsChanged())

    def _made_for(self, key: str) -> MeshBreakpoint | None:
        with self._lock:
            return next((each for each in self._by_id.values() if each.spec.together == key), None)

    def _arm_rank(self, watched: DebuggedMesh, rank: int) -> None:
        """Arm one rank, without waiting."""
        agent = watched.agents.flatten("ranks").slice(ranks=slice(rank, rank + 1))
        with self._lock:
            order, specs = self._next_order(), self._specs(watched, rank)
            begun = self._begun(watched, specs)
        asked = agent.run.call_one(cloudpickle.dumps((rank_debugger.arm, (order, specs, begun))))

        def done(future: Any) -> None:
            with self._lock:
                unarmed = self._of(watched).unarmed
                if future.exception() is None:
                    unarmed.pop(rank, None)
                else:
                    unarmed[rank] = unarmed.get(rank, 0) + 1
                tries = unarmed.get(rank, 0)
            if not tries:
                self._on_bound(watched, rank, future.get()[1])
                self._registry.tell(BreakpointsChanged())
            elif tries <= TRIES and rank not in watched.whole.procs.dead():
                # A rank that is being replaced may report before it can be reached. As long as it counts as dead, a
                # change of the meshes will follow; otherwise check the meshes again now.
                self._registry.actor().changed.broadcast()

        asked.add_done_callback(done)

    def _on_bound(self, watched: DebuggedMesh, rank: int, bound: Sequence[Bound]) -> None:
        with self._lock:
            for each in bound:
                if each.id in self._by_id:
                    self._by_id[each.id].bound[watched.name, rank] = each

    def _of(self, watched: DebuggedMesh) -> _OfMesh:
        return self._meshes.setdefault(watched.whole.uid, _OfMesh())

    # -- notifications of the registry, before those of viewers ----------------------------------------

    def on_agent(self, watched: DebuggedMesh, rank: int) -> None:
        """Arm a rank whose process has just started its agent."""
        with self._lock:
            any_there = bool(self._specs(watched, rank))
        if any_there and not tool_runtime().driver_of(watched.whole.procs, ask=False):
            self._arm_rank(watched, rank)

    def on_process_ended(self, watched: DebuggedMesh, rank: int) -> None:
        """Forget the state of breakpoints in that process, and release its votes; the lock is held."""
        for each in self._by_id.values():
            each.bound.pop((watched.name, rank), None)
        for vote in self._of(watched).votes.values():
            if isinstance(vote, First):
                vote.released(rank)

    def on_stop_ended(self, watched: DebuggedMesh, at: RankStop) -> None:
        """Release the vote of a stop that is over, so that another rank may be the first; the lock is held."""
        vote = self._of(watched).votes.get(at.stop.breakpoint)
        if isinstance(vote, First):
            vote.released(at.rank)

    def on_mesh_ended(self, watched: DebuggedMesh) -> None:
        """Forget a mesh that is no longer watched; the lock is held."""
        self._meshes.pop(watched.whole.uid, None)

    def on_new_meshes(self, meshes: Iterable[ProcMesh]) -> None:
        """Arm breakpoints that apply to all meshes on meshes without agents. Retry ranks that could not be armed.

        This does not wait for the ranks.
        """
        if self._any_everywhere():
            for mesh in meshes:
                self._registry.watch(mesh)  # its agents report when they begin, and are armed then
        with self._lock:
            again = [
                (watched, rank)
                for watched in self._registry.all()
                for rank in self._of(watched).unarmed
                if rank not in watched.dead
            ]
        for watched, rank in again:
            self.on_agent(watched, rank)

    # -- votes (on the thread of the hub's actor) ----------------------------------------------------

    def on_vote(self, uid: str, rank: int, number: int, hit: int, value: str) -> dict[int, bool]:
        """Record the vote of a rank that has reached a breakpoint on which ranks vote; see `First` and `Differs`."""
        with self._lock:
            watched, known = self._registry.by_uid(uid), self._by_id.get(number)
            if watched is None or known is None:
                return {rank: False}
            votes = self._of(watched).votes
            if known.spec.first:
                first = votes.setdefault(number, First())
                return {rank: isinstance(first, First) and first.vote(rank)}
            differs = votes.setdefault(number, Differs())
            voters = [each for each in range(watched.size) if known.holds_on(watched.name, each)]
            living = [each for each in voters if each not in watched.dead]
            return differs.vote(rank, hit, value, living) if isinstance(differs, Differs) else {rank: False}

    def on_decide(self, uid: str, number: int, hit: int) -> dict[int, bool]:
        """Decide a vote without the missing ranks: a rank's wait for them has timed out."""
        with self._lock:
            watched = self._registry.by_uid(uid)
            vote = self._of(watched).votes.get(number) if watched is not None else None
            return vote.decide(hit) if isinstance(vote, Differs) else {}


def check(spec: Breakpoint) -> None:
    """Check a breakpoint at a line before it is set.

    Raises:
        ValueError: the line or an expression is invalid, or the conditions exclude each other.
    """
    if spec.line < 1:
        raise ValueError(f"there is no line {spec.line}: lines are counted from 1")
    for what, source in (("condition", spec.condition), ("expression", spec.differs)):
        if source:
            try:
                compile(source, f"<{what}>", "eval")
            except SyntaxError as error:
                raise ValueError(f"the {what} {source!r} is not an expression: {error.msg}") from None
    if spec.first and spec.differs:
        raise ValueError("a breakpoint stops the first rank, or all where they differ: choose one")


def follow_line(old: Sequence[str], new: Sequence[str], line: int) -> int | None:
    """Find a line in a later version of its file.

    Unchanged lines around it decide first, then the nearest equal line, then the most similar line in the replaced part
    of the file.

    Args:
        old: the lines of the earlier version.
        new: the lines of the later version.
        line: the number of the line in `old`, from 1.

    Returns:
        Its number in `new`, from 1; None if it is gone.
    """
    at = line - 1
    if not 0 <= at < len(old):
        return None
    head = 0
    while head < min(len(old), len(new)) and old[head].rstrip() == new[head].rstrip():
        head += 1
    if at < head:
        return line
    tail = 0
    most = min(len(old), len(new)) - head
    while tail < most and old[-1 - tail].rstrip() == new[-1 - tail].rstrip():
        tail += 1
    if at >= len(old) - tail:
        return line + len(new) - len(old)
    before = [text.rstrip() for text in old[head : len(old) - tail]]
    after = [text.rstrip() for text in new[head : len(new) - tail]]
    found = _find_line(before, after, at - head)
    return None if found is None else head + found + 1


def _find_line(before: list[str], after: list[str], at: int) -> int | None:
    """Find the line at an index of `before` in `after`; None if it is gone."""
    start, end = 0, len(after)
    if len(before) <= MOST_COMPARED and len(after) <= MOST_COMPARED:
        for tag, a1, a2, b1, b2 in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if a1 <= at < a2:
                if tag == "equal":
                    return b1 + at - a1
                start, end = b1, b2
    text = before[at].strip()
    if not text:
        return None
    guess = min(start + max(0, at - start), max(end - 1, 0))
    same = [index for index, each in enumerate(after) if each.strip() == text]
    if same:
        return min(same, key=lambda index: abs(index - guess))
    ratios = [(SequenceMatcher(None, text, after[index].strip()).ratio(), -index) for index in range(start, end)]
    best = max(ratios, default=(0.0, 0))
    return -best[1] if best[0] >= ALIKE else None
