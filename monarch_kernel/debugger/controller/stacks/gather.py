"""Query all ranks of a mesh for their stacks. Host agents read ranks that do not answer from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from monarch_kernel.actor import ActorMesh, ProcMesh
from monarch_kernel.debugger.commands.stop_text import location_text
from monarch_kernel.debugger.controller.query import ask, chosen_ranks, stops_of
from monarch_kernel.debugger.controller.stacks.pyspy import HOLDS_LOCK, read_snapshot, with_native
from monarch_kernel.debugger.controller.stacks.stacks_report import Stacks
from monarch_kernel.debugger.events import RankStop, shown_frame, snapshot_at_client
from monarch_kernel.debugger.model.evidence import Evidence
from monarch_kernel.debugger.model.stops import Stack, StackFrame, StackSnapshot
from monarch_kernel.debugger.rank.stacks import sample, snapshot
from monarch_kernel.debugger.source_locations import Label, SourceLocation, kind_of
from monarch_kernel.display.quantities import source_line
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import StackRead, Whole, hosts_of, issued_at, whole_of

# Find the lines of this controller that issued the tensor operations that ranks run.


def issued_here(snapshot: StackSnapshot) -> StackSnapshot:
    """Return a snapshot in which the stack of each operation begins with the line that issued it."""
    if all(stack.issued is None for stack in snapshot.stacks):
        return snapshot
    return snapshot._replace(stacks=tuple(map(_with_line, snapshot.stacks)))


def evidence_of_issued(evidence: Evidence) -> Evidence:
    """Return evidence in which an operation is at the line that issued it, if the rank itself runs no user code."""
    place = None if evidence.issued is None else _place(*evidence.issued)
    if place is None:
        return evidence
    waits = tuple(
        replace(
            wait,
            place=wait.place or place,
            operation=replace(wait.operation, place=place if _is_start(wait.operation.place) else wait.operation.place),
        )
        for wait in evidence.waits
    )
    return replace(evidence, waits=waits, place=evidence.place or place, stack=(place, *evidence.stack))


def _is_start(place: SourceLocation | None) -> bool:
    """Return whether no user code called a collective: PyTorch's record then has the outermost frame of the process."""
    return place is None or place.file == "<string>"


def _with_line(stack: Stack) -> Stack:
    place = None if stack.issued is None else _place(*stack.issued)
    if place is None:
        return stack
    return stack._replace(frames=(StackFrame(place, source_line(place.file, place.line)), *stack.frames))


def _place(engine: str, record: int) -> SourceLocation | None:
    found = issued_at(engine, record)
    return None if found is None else SourceLocation(*found, kind_of(found[0]))


#: The time limit for host agents to read the stacks of ranks that do not answer (seconds).
OUTSIDE_TIMEOUT = 3.0
#: The same with native frames (seconds): a rank takes 0.1 s, and a few are read in parallel on each host.
NATIVE_TIMEOUT = 10.0


def stacks(
    mesh: ProcMesh | ActorMesh[object],
    ranks: Iterable[int] | None = None,
    native: bool = False,
    all_threads: bool = False,
    timeout: float = 1.0,
    *,
    over: float = 0.0,
    values: bool = False,
    label: Label | None = None,
) -> Stacks:
    """Show what the ranks of a mesh are doing now: all their Python stacks and asyncio tasks, merged.

    If a rank does not answer in time (it is stopped, or native code holds the interpreter lock), its host agent reads
    it from outside, with py-spy.

    Args:
        mesh: a proc mesh or an actor mesh, or a slice of one.
        ranks: the ranks of the mesh; all by default.
        native: include the frames of native code; this pauses each rank for about 0.1 s.
        all_threads: include threads that run no user code.
        timeout: when a rank that has not answered is read from outside (seconds).
        over: sample the ranks for this long (seconds), and show only frames that stay the same. Ranks that compute then
            look alike, and a rank that hangs stands out.
        values: include the local variables of the innermost frame of user code.
        label: labels files, such as `Cell In[3]`.

    Raises:
        ValueError: the mesh has no such rank.
        TypeError: `mesh` is not a mesh.
        RuntimeError: the mesh was stopped.
    """
    started = time.monotonic()
    whole = whole_of(mesh)
    chosen = chosen_ranks(ranks, len(whole.ranks))
    if not over >= 0:
        raise ValueError(f"over is a number of seconds of at least 0, not {over}")
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0, not {timeout}")
    silent = _silent(whole, chosen)
    early = _OutsideReader(whole, silent, native)  # the others answer meanwhile
    function = partial(sample, over) if over else snapshot
    asked = [rank for rank in chosen if rank not in silent]
    answers = ask(mesh, function, all_threads, values, ranks=asked, timeout=timeout + over)
    # Not at the same time: ranks cannot answer while their native frames are read.
    rest = _OutsideReader(whole, [*answers.late, *(answers.values if native else ())], native)
    reads = early.reads() | rest.reads()
    found: dict[int, StackSnapshot] = dict(answers.values)
    if native:
        for rank, own in found.items():
            read = reads.get(rank)
            if read is not None and read.dump:
                found[rank] = with_native(own, read.dump)
    late: dict[int, str] = {}
    unread = {rank: f"its debugger failed: {answers.error_of(rank)}" for rank in answers.errors}
    stops = stops_of(whole) if answers.late or silent else {}
    for rank in sorted({*answers.late, *silent} - set(answers.dead)):
        taken, sentence = _from_outside(reads.get(rank), silent.get(rank, ""), timeout + over, all_threads)
        if taken is None and rank in stops:
            late[rank] = f"{_stands(stops[rank], label)}; it did not answer within {timeout + over:g} s"
        elif taken is None:
            unread[rank] = sentence
        else:
            found[rank], late[rank] = taken, sentence
    hosts = hosts_of(whole.procs)
    return Stacks(
        whole.procs.name,
        mesh.extent,
        chosen,
        {rank: issued_here(snapshot_at_client(each)) for rank, each in found.items()},
        late=late,
        dead=answers.dead,
        unread=unread,
        hosts={rank: hosts[whole.ranks[rank]] for rank in chosen},
        label=label,
        seconds=time.monotonic() - started,
    )


def _stands(at: RankStop, label: Label | None) -> str:
    reason = at.stop.reason
    what = "at a breakpoint" if reason in ("breakpoint", "breakpoint()") else "in the debugger"
    shown = shown_frame(at.stop.frames)
    assert shown is not None  # `stops_of` leaves out stops without frames
    return f"stands {what}, {location_text(shown, label)}"


def _silent(whole: Whole, ranks: Sequence[int]) -> dict[int, str]:
    """Return ranks that their host agent has reported as unresponsive; a query to them would only cost time."""
    known: dict[int, str] = whole.procs.unresponsive()
    return {rank: known[whole.ranks[rank]] for rank in ranks if whole.ranks[rank] in known}


class _OutsideReader:
    """Requests host agents to read ranks, on a separate thread."""

    def __init__(self, whole: Whole, ranks: Iterable[int], native: bool) -> None:
        self._back = {whole.ranks[rank]: rank for rank in ranks}
        self._found: dict[int, StackRead] = {}
        self._thread = threading.Thread(target=self._run, args=(whole, native), name="monarch-stacks", daemon=True)
        if self._back:
            self._thread.start()

    def _run(self, whole: Whole, native: bool) -> None:
        timeout = NATIVE_TIMEOUT if native else OUTSIDE_TIMEOUT
        found = tool_runtime().stacks_from_outside(whole.procs, self._back, native=native, timeout=timeout)
        self._found = {self._back[rank]: read for rank, read in found.items()}

    def reads(self) -> dict[int, StackRead]:
        """Return what the host agents have read, by rank of the queried mesh."""
        if self._back:
            self._thread.join()  # it has its own deadline
        return self._found


def _from_outside(
    read: StackRead | None, silent: str, waited: float, all_threads: bool
) -> tuple[StackSnapshot | None, str]:
    """Return the snapshot of a rank that did not answer, if its host agent has read one, and a sentence about it.

    Args:
        read: the result from the host agent; None if the agent has not answered.
        silent: why the rank does not answer, if its host agent already knew; else "".
        waited: how long the query waited for the rank (seconds).
        all_threads: include threads that run no user code.
    """
    why = (read.why if read is not None else "") or silent
    trouble = "its stack could not be read" if read is None else read.error
    found: StackSnapshot | None = None
    if read is not None and read.dump:
        try:
            found = read_snapshot(read.dump, read.pid, why, all_threads)
        except ValueError as error:
            trouble = str(error)
        else:
            if not read.why and any(stack.state == HOLDS_LOCK for stack in found.stacks):
                why = "its interpreter lock is held by native code"
    sentence = f"did not answer within {waited:g} s" + (f": {why}" if why else "")
    if read is None or found is None:
        return None, f"{sentence}, and {trouble}"
    return found, f"{sentence}; read from outside, on {read.host}"
