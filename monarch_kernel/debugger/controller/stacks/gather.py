"""Asks all ranks of a mesh for their stacks, and has those read from outside that do not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.query import Answers, ask
from monarch_kernel.debugger.controller.stacks.merge import MergedStacks, StackClass, StackRoot, merge
from monarch_kernel.debugger.controller.stacks.pyspy import HOLDS_LOCK, read_snapshot, with_native
from monarch_kernel.debugger.controller.stacks.text import Notes, text_of
from monarch_kernel.debugger.model.stacks import Snapshot
from monarch_kernel.debugger.rank.stacks.motion import watch
from monarch_kernel.debugger.rank.stacks.snapshot import snapshot
from monarch_kernel.debugger.source_locations import Label
from monarch_kernel.tools import StackRead, hosts_of, stacks_from_outside, whole_of

#: How long host agents may take to read the stacks of ranks that do not answer (seconds).
OUTSIDE_TIMEOUT = 3.0
#: The same with native frames: 0.1 s for each rank, a few at a time on each host.
NATIVE_TIMEOUT = 10.0


class Stacks:
    """What the ranks of a mesh are doing: one tree of all their stacks.

    Shows itself as text, and as HTML in a notebook. Ranks are those of the mesh that was asked.

    Attributes:
        mesh: its name.
        ranks: who was asked.
        snapshots: what each rank is doing, by rank.
        tree: the merged stacks, the fewest ranks first at each branch.
        classes: sets of ranks that do the same, the smallest first.
        idle: the ranks that wait for a message.
        late: those that did not answer in time, and why.
        dead: those that are dead, and of what.
        unread: those of which nobody could tell what they do, and why.
        seconds: how long it took.
    """

    def __init__(
        self,
        mesh: str,
        extent: Extent,
        ranks: Sequence[int],
        snapshots: Mapping[int, Snapshot],
        *,
        late: Mapping[int, str] | None = None,
        dead: Mapping[int, str] | None = None,
        unread: Mapping[int, str] | None = None,
        hosts: Mapping[int, str] | None = None,
        label: Label | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.mesh = mesh
        self.extent = extent
        self.ranks = tuple(ranks)
        self.snapshots = dict(snapshots)
        self.late = dict(late or {})
        self.dead = dict(dead or {})
        self.unread = dict(unread or {})
        self.seconds = seconds
        self._label = label
        self._hosts = dict(hosts or {})
        merged: MergedStacks = merge(self.snapshots)
        self.tree: tuple[StackRoot, ...] = merged.roots
        self.classes: tuple[StackClass, ...] = merged.classes
        self.idle = merged.idle

    @property
    def headline(self) -> str:
        """How many ranks, and how many different stacks."""
        asked, count = len(self.ranks), len(self.classes)
        who = f"{asked} {'rank' if asked == 1 else 'ranks'} of mesh {self.mesh}"
        if asked > 1 and count == 1 and len(self.snapshots) == asked:
            return f"{who}, all at the same place"
        told = [f"{count} different stacks" if count != 1 else "1 stack"] if count else []
        for noun, members in (("late", self.late), ("dead", self.dead), ("unknown", self.unread)):
            if members:
                told.append(f"{len(members)} {noun}")
        return f"{who}: {', '.join(told)}" if told else who

    @property
    def notes(self) -> Notes:
        """What is to be said of ranks beside their stacks, the worst first."""
        notes = Notes()
        for noun, members in (("dead: ", self.dead), ("unknown: ", self.unread), ("", self.late)):
            reasons: dict[str, list[int]] = {}
            for rank, why in sorted(members.items()):
                reasons.setdefault(why, []).append(rank)
            for why, ranks in sorted(reasons.items(), key=lambda each: len(each[1])):
                notes.lines.append((f"{noun}{why}", ranks))
        return notes

    def text(self, *, colours: bool = False, label: Label | None = None) -> str:
        """The tree as text: as long as there are different stacks, however many ranks there are."""
        return text_of(
            self.headline, self.notes, self.tree, self.idle, self.extent, label or self._label, colours=colours
        )

    def html(self, *, label: Label | None = None) -> str:
        """The tree as HTML: branches fold, a frame opens the source around it. Needs no scripts and no styles."""
        from monarch_kernel.debugger.controller.stacks.html import html_of

        processes = {
            rank: f"{self._hosts.get(rank, '')} pid {one.pid}".lstrip() for rank, one in self.snapshots.items()
        }
        return html_of(self.headline, self.notes, self.tree, self.idle, self.extent, label or self._label, processes)

    def asdict(self) -> dict[str, Any]:
        """All of it as plain values, as JSON has them."""
        from monarch_kernel.debugger.controller.stacks.data import plain

        return plain(self)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.text())

    def _repr_html_(self) -> str:
        return self.html()

    def _repr_mimebundle_(self, **_kwargs: Any) -> dict[str, Any]:
        return {"text/plain": self.text(), "text/html": self.html()}


def stacks(
    mesh: Any,
    ranks: Iterable[int] | None = None,
    native: bool = False,
    all_threads: bool = False,
    timeout: float = 1.0,
    *,
    over: float = 0.0,
    values: bool = False,
    label: Label | None = None,
) -> Stacks:
    """What the ranks of a mesh are doing now: all their Python stacks and asyncio tasks, merged.

    A rank that does not answer in time (it is stopped, or native code holds the interpreter lock) is read from outside
    by its host agent, with py-spy.

    Args:
        mesh: a proc mesh or an actor mesh, or a slice of one.
        ranks: of the mesh; all by default.
        native: with the frames of native code; each rank is held for that long (about 0.1 s).
        all_threads: those too that run no code of the user's.
        timeout: after which a rank is read from outside (seconds).
        over: look at the ranks for so long (seconds), and show what stays: stacks end where they move, so that ranks
            that compute are alike, and one that hangs is not.
        values: with the local variables of each innermost frame of the user's.
        label: what files are called, such as `Cell In[3]`.

    Raises:
        ValueError: the mesh has no such rank.
        TypeError: `mesh` is no mesh.
        RuntimeError: the mesh was stopped.
    """
    started = time.monotonic()
    whole = whole_of(mesh)
    size = len(whole.ranks)
    chosen = tuple(range(size)) if ranks is None else tuple(sorted(set(ranks)))
    if chosen and not (chosen[0] >= 0 and chosen[-1] < size):
        wrong = chosen[0] if chosen[0] < 0 else chosen[-1]
        raise ValueError(f"there is no rank {wrong}: the mesh has {size} (0 to {size - 1})")
    if not over >= 0:
        raise ValueError(f"over is a number of seconds of at least 0, not {over}")
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0, not {timeout}")
    silent = _silent(whole, chosen)
    early = _Outside(whole, silent, native)  # meanwhile, the others answer
    question = partial(watch, over) if over else snapshot
    asked = [rank for rank in chosen if rank not in silent]
    answers = ask(mesh, question, all_threads, values, ranks=asked, timeout=timeout + over)
    # Not at the same time: while their native frames are read, ranks cannot answer.
    rest = _Outside(whole, [*answers.late, *(answers.values if native else ())], native)
    reads = early.reads() | rest.reads()
    return _joined(mesh, whole, chosen, answers, silent, reads, timeout + over, all_threads, native, label, started)


def _silent(whole: Any, ranks: Sequence[int]) -> dict[int, str]:
    """Ranks of which their host agent has said that they do not answer: asking them would only take time."""
    known: dict[int, str] = whole.procs.unresponsive()
    return {rank: known[whole.ranks[rank]] for rank in ranks if whole.ranks[rank] in known}


class _Outside:
    """Has host agents read ranks, on a thread of its own."""

    def __init__(self, whole: Any, ranks: Iterable[int], native: bool) -> None:
        self._back = {whole.ranks[rank]: rank for rank in ranks}
        self._found: dict[int, StackRead] = {}
        self._thread = threading.Thread(target=self._run, args=(whole, native), name="monarch-stacks", daemon=True)
        if self._back:
            self._thread.start()

    def _run(self, whole: Any, native: bool) -> None:
        timeout = NATIVE_TIMEOUT if native else OUTSIDE_TIMEOUT
        found = stacks_from_outside(whole.procs, self._back, native=native, timeout=timeout)
        self._found = {self._back[rank]: read for rank, read in found.items()}

    def reads(self) -> dict[int, StackRead]:
        """What they have read, by rank of the mesh that was asked."""
        if self._back:
            self._thread.join()  # it has a deadline of its own
        return self._found


def _joined(
    mesh: Any,
    whole: Any,
    chosen: Sequence[int],
    answers: Answers,
    silent: Mapping[int, str],
    reads: Mapping[int, StackRead],
    timeout: float,
    all_threads: bool,
    native: bool,
    label: Label | None,
    started: float,
) -> Stacks:
    found: dict[int, Snapshot] = dict(answers.values)
    late: dict[int, str] = {}
    unread: dict[int, str] = {rank: _summary(error) for rank, error in answers.errors.items()}
    for rank in sorted({*answers.late, *silent} - set(answers.dead)):
        read = reads.get(rank)
        why = (read.why if read is not None else "") or silent.get(rank, "")
        trouble = "nobody has read its stack" if read is None else read.error
        if read is not None and read.dump:
            try:
                found[rank] = read_snapshot(read.dump, read.pid, why, all_threads)
            except ValueError as error:
                trouble = str(error)
        snapshot = found.get(rank)
        if snapshot is not None and any(stack.state == HOLDS_LOCK for stack in snapshot.stacks):
            why = why if read is not None and read.why else "its interpreter lock is held by native code"
        said = f"did not answer within {timeout:g} s" + (f": {why}" if why else "")
        if snapshot is None or read is None:
            unread[rank] = f"{said}, and {trouble}"
        else:
            late[rank] = f"{said}; read from outside, on {read.host}"
    if native:
        for rank, mine in list(found.items()):
            read = reads.get(rank)
            if read is not None and read.dump and not mine.outside:
                found[rank] = with_native(mine, read.dump)
    hosts = hosts_of(whole.procs)
    return Stacks(
        whole.procs.name,
        mesh.extent,
        chosen,
        found,
        late=late,
        dead=answers.dead,
        unread=unread,
        hosts={rank: hosts[whole.ranks[rank]] for rank in chosen},
        label=label,
        seconds=time.monotonic() - started,
    )


def _summary(error: Any) -> str:
    text = str(getattr(error, "summary", "") or error)
    return f"its debugger failed: {text}"
