"""Report what was read of processes from outside: verdict, table of processes, merged stacks."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from msgspec import structs

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.hang import phrases, verdict
from monarch_kernel.debugger.controller.hang.judge import judge, settle
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.controller.stacks.pyspy import (
    SpiedFrame,
    SpiedThread,
    file_of,
    in_collective,
    is_native,
    is_user_spied,
    location_of_spied,
    read_snapshot,
    threads_of,
    user_location,
)
from monarch_kernel.debugger.controller.stacks.stacks_report import Stacks
from monarch_kernel.debugger.model.evidence import (
    DEAD,
    IDLE,
    LOADS,
    RUNS,
    SILENT,
    STANDS,
    UNASKED,
    UNREAD,
    UNSEEN_GROUP,
    WAITS,
    Evidence,
    Operation,
    ProcessGroup,
    Wait,
)
from monarch_kernel.debugger.model.stops import StackSnapshot
from monarch_kernel.debugger.outside import processes as selection
from monarch_kernel.debugger.outside import slurm
from monarch_kernel.debugger.outside.processes import LaunchedRank, Moment, OutsideError, OutsideProcess, read_processes
from monarch_kernel.debugger.outside.remote_exec import remote_exec_note
from monarch_kernel.debugger.rank.hang import C10D, LOADER, MAKING, P2P, public_name
from monarch_kernel.debugger.source_locations import LIBRARY, Label, SourceLocation
from monarch_kernel.display import tables
from monarch_kernel.display.quantities import memory
from monarch_kernel.display.tables import AsReport, TableView, table_html, table_text
from monarch_kernel.introspection import py_spy
from monarch_kernel.meshes import format_ranks

# Convert two py-spy readings of processes to `Evidence` for the hang verdict. Pure.
#
# From outside, frames are visible and most values are not. A collective has no number, and its process group is known
# only if the call names none, which means the default group. If calls name a group, all ranks are assumed to name the
# same one, and no verdict is returned that depends on it.

#: PyTorch's name of the default process group.
_DEFAULT = "0"
#: The file of the wrapper through which functions of `torch.distributed` are called, with all their arguments.
_WRAPPERS = "c10d_logger.py"
#: The innermost Python frame of a backward pass; with DistributedDataParallel, it waits for collectives.
_BACKWARD = (f"{os.sep}autograd{os.sep}graph.py", "_engine_run_backward")
_TORCH = f"{os.sep}torch{os.sep}"
#: Prefixes of the names of native functions in which a thread waits for collectives.
_NATIVE = ("c10d::", "gloo::", "nccl")


def evidence_of(ranks: Mapping[int, OutsideProcess], world: int, *, complete: bool = True) -> dict[int, Evidence]:
    """Determine the evidence of the ranks of a job, settled from both readings of each.

    Args:
        ranks: the processes that were read, by their rank.
        world: the number of ranks of the job.
        complete: whether these are all of the job's processes on their hosts; a rank that was started there and is not
            among them is then dead.
    """
    everyone = tuple(range(world))
    first = {rank: _evidence(rank, each, each.first, everyone) for rank, each in ranks.items()}
    second = {rank: _evidence(rank, each, each.second, everyone) for rank, each in ranks.items()}
    found = settle(first, second)
    started_here = {rank: each.host for each in ranks.values() for rank in each.place.local} if complete else {}
    for rank in everyone:
        if rank in found:
            continue
        host = started_here.get(rank)
        gone = f"{host} has no process of it any more" if host else ""
        found[rank] = Evidence(rank, DEAD if host else UNASKED, gone, answered=False)
    return found


def woken(ranks: Mapping[int, OutsideProcess]) -> set[int]:
    """Return the ranks whose main thread woke between the readings, and may therefore be in a later call than before.

    A thread that waits in one call sleeps all the time.
    """
    return {
        rank
        for rank, each in ranks.items()
        if each.first.figures is not None
        and each.second.figures is not None
        and each.first.figures.switches.get(each.pid) != each.second.figures.switches.get(each.pid)
    }


def _evidence(rank: int, process: OutsideProcess, moment: Moment, everyone: tuple[int, ...]) -> Evidence:
    figures = moment.figures
    if figures is None or figures.state == "Z":
        return Evidence(rank, DEAD, moment.error, answered=False)
    groups = {name: ProcessGroup(name, "", everyone) for name in (_DEFAULT, UNSEEN_GROUP)}
    # `answered` is true because `settle` compares only reports of ranks, and py-spy has read the same data.
    known = Evidence(rank, UNREAD, moment.error, rank, process.place.launch, groups)
    try:
        threads = threads_of(moment.dump) if moment.dump else []
    except ValueError as error:
        threads, known = [], replace(known, why=str(error))
    stopped = py_spy.state_of_letter(figures.state) if figures.state in "Tt" else ""
    main = next((thread for thread in threads if thread.get("os_thread_id") == process.pid), None)
    if main is None or not _acts(main):
        main = next((thread for thread in threads if user_location(thread) is not None), main)
    place = (user_location(main) or _library_place(main)) if main is not None else None
    if stopped:
        return replace(known, state=SILENT, why=stopped, place=place)
    if not threads:
        return replace(known, answered=False)
    chosen = [thread for thread in threads if thread is main or in_collective(thread)]
    chosen.sort(key=lambda thread: thread is not main)
    waits = [wait for thread in chosen if (wait := _wait(thread)) is not None]
    if main is None or place is None:
        return replace(known, state=WAITS if waits else IDLE, why="", waits=tuple(waits))
    state, why, thread = RUNS, "", int(main.get("os_thread_id") or 0)
    own = _wait(main)
    if own is not None and own.operation.name not in _MOVING:
        state = WAITS
    elif any(LOADER in file_of(frame) for frame in main.get("frames", ())):
        state = LOADS
    elif figures.state == "D":
        why = py_spy.state_of_letter("D")
    return replace(
        known,
        state=state,
        why=why,
        waits=tuple(waits),
        place=place,
        stack=tuple(location_of_spied(frame) for frame in reversed(main.get("frames", ())) if is_user_spied(frame)),
        ident=hash(tuple((file_of(frame), frame.get("line"), frame.get("name")) for frame in main.get("frames", ()))),
        # A thread that has woken has moved, even if it has taken less than a tick.
        ticks=figures.ticks.get(thread, 0) + figures.switches.get(thread, 0),
    )


#: Waits that may be work. They count only if the thread has not moved between the readings.
_MOVING = ("backward",)


def _wait(thread: SpiedThread) -> Wait | None:
    """Return what a thread waits for; None if no wait is visible."""
    frames = list(thread.get("frames", ()))
    place = user_location(thread)
    native = [frame for frame in frames if is_native(frame)]
    python = [frame for frame in frames if not is_native(frame)]
    # User code of data loaders and callbacks runs inside library code, and may be called from anywhere.
    inner = python[: next((at for at, frame in enumerate(python) if is_user_spied(frame)), len(python))]
    calls = [frame for frame in inner if file_of(frame).endswith(C10D)]
    if calls:
        return _in_c10d(calls, inner, place)
    if any(LOADER in file_of(frame) for frame in inner):
        return None
    if inner and (file_of(inner[0]).endswith(_BACKWARD[0]) and inner[0].get("name") == _BACKWARD[1]):
        return Wait(Operation(UNSEEN_GROUP, 0, "backward", "backward", place=place), place=place)
    if any((frame.get("name") or "").startswith(_NATIVE) for frame in native):
        return Wait(Operation(UNSEEN_GROUP, 0, "wait", "Work.wait", place=place), place=place)
    return None


def _in_c10d(calls: Sequence[SpiedFrame], inner: Sequence[SpiedFrame], place: SourceLocation | None) -> Wait:
    names = [str(frame.get("name") or "").rpartition(".")[2] for frame in calls]
    name = public_name(((file_of(frame), each) for frame, each in zip(calls, names, strict=True)), names[0])
    if MAKING.intersection(names):
        return Wait(Operation("", 0, name, name, place=place), "group", place=place)
    group = _DEFAULT if _names_no_group(inner) else UNSEEN_GROUP
    if names[0] in P2P or names[0] == "wait":
        kind = "recv" if "recv" in names[0] else "send"
        values = _values(calls[0])
        peer = next((int(values[key]) for key in ("src", "dst") if values.get(key, "").isdecimal()), -1)
        return Wait(Operation(group, 0, names[0], name, place=place), kind, peer=peer, place=place)
    return Wait(Operation(group, 0, names[0], name, place=place), place=place)


def _names_no_group(frames: Sequence[SpiedFrame]) -> bool:
    """Return whether the outermost call of `torch.distributed` named no process group, and so used the default one."""
    outermost = next((frame for frame in reversed(frames) if file_of(frame).endswith(_WRAPPERS)), None)
    if outermost is None:
        return False
    values = _values(outermost)
    if "args" not in values or "kwargs" not in values:
        return False
    given = values["args"] + values["kwargs"]
    return "ProcessGroup" not in given and "DeviceMesh" not in given and "..." not in given


def _values(frame: SpiedFrame) -> dict[str, str]:
    return {each.get("name", ""): each.get("repr") or "" for each in frame.get("locals") or ()}


def _acts(thread: SpiedThread) -> bool:
    return user_location(thread) is not None or _library_place(thread) is not None


def _library_place(thread: SpiedThread) -> SourceLocation | None:
    """Return the position of a thread without user code: its innermost line outside Python's and PyTorch's code."""
    for frame in thread.get("frames", ()):
        if is_native(frame):
            continue
        place = location_of_spied(frame)
        installed = "-packages" in place.file or place.kind != LIBRARY
        if installed and _TORCH not in place.file and not place.file.startswith("<"):
            return place
    return None


#: The maximum number of rows of the table of processes.
MOST = 64

#: The meanings of the operating system's state letters.
STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a device",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "I": "idle",
}


class Look(AsReport):
    """The activity of processes that another program started, read from outside. Displays itself as text and as HTML.

    Attributes:
        name: the subject of the report, such as `torchrun 4711`.
        processes: the readings of each process, by rank.
        world: the number of ranks of the job.
        evidence: what each rank is doing, settled from both readings.
        verdict: why ranks wait, as far as can be determined from outside.
        stacks: the merged stacks of the second reading.
        notes: further information, each a sentence.

    Args:
        name: the subject of the report.
        processes: the processes that were read.
        complete: whether these are all of the job's processes on their hosts.
        native: whether native frames were read.
        all_threads: show threads without user code, too.
        notes: notes about hosts that could not be read, each a sentence.
        label: labels files, such as `Cell In[3]`.

    Raises:
        OutsideError: there is no process.
    """

    def __init__(
        self,
        name: str,
        processes: Sequence[OutsideProcess],
        *,
        complete: bool = False,
        native: bool = False,
        all_threads: bool = False,
        notes: Sequence[str] = (),
        label: Label | None = None,
    ) -> None:
        if not processes:
            raise OutsideError(f"there is no process of {name} to read")
        self.name = name
        self.processes, self.world, numbered = _by_rank(processes)
        self.notes = (*notes, *([numbered] if numbered else ()))
        self.evidence: Mapping[int, Evidence] = evidence_of(self.processes, self.world, complete=complete)
        self.verdict: Verdict = verdict_from_outside(
            self.evidence, name, self._told(native), woken=woken(self.processes), native=native
        )
        snapshots: dict[int, StackSnapshot] = {}
        unread: dict[int, str] = {}
        for rank, each in self.processes.items():
            try:
                if not each.second.dump:
                    raise ValueError(each.second.error)
                snapshot = read_snapshot(each.second.dump, each.pid, "", all_threads)
                # A program that is installed as a package has no user code, but is still the subject of the report.
                busy = not snapshot.stacks and self.evidence[rank].place is not None
                snapshots[rank] = read_snapshot(each.second.dump, each.pid, "", True) if busy else snapshot
            except ValueError as error:
                unread[rank] = str(error)
        self.stacks = Stacks(
            name,
            Extent(["ranks"], [self.world]),
            sorted(self.processes),
            snapshots,
            unread=unread,
            hosts={rank: each.host for rank, each in self.processes.items()},
            label=label,
            noun="",
            idle_note="no Python code of yours runs",
        )

    def _told(self, native: bool) -> str:
        apart = max(each.apart for each in self.processes.values())
        frames = "Python and native frames" if native else "Python frames"
        read = sum(bool(each.second.dump) for each in self.processes.values())
        return (
            f"Evidence: {frames} of {read} of {self.world} ranks from outside (py-spy), and the states of their "
            f"processes; two readings, {apart:.1f} s apart. No process was asked, so the numbers of "
            "collectives are not known."
        )

    def table(self) -> TableView:
        """Tabulate the processes, one per row."""
        hosts = {each.host for each in self.processes.values()}
        rows: list[tuple[str, ...]] = []
        for rank, each in list(self.processes.items())[:MOST]:
            seen = each.second.figures or each.first.figures
            gpus = "  ".join(
                f"{index}: {memory(held)}" + (f", {each.busy[index]:.0f} %" if index in each.busy else "")
                for index, held in sorted(each.gpus.items())
            )
            if seen is None:
                rows.append((str(rank), each.host, str(each.pid), "gone", "", "", "", "", gpus))
                continue
            state = STATES.get(seen.state, seen.state)
            cpu = _cpu(each)
            rows.append(
                (
                    str(rank),
                    each.host if len(hosts) > 1 else "",
                    str(each.pid),
                    state,
                    seen.wchan,
                    str(seen.threads),
                    memory(seen.rss),
                    "" if cpu is None else f"{100 * cpu:.0f} %",
                    gpus,
                )
            )
        left = len(self.processes) - len(rows)
        headings = ("rank", "host", "pid", "state", "sleeps in", "threads", "memory", "cpu", "GPUs")
        note = f"and {left} more; --json has them all" if left > 0 else ""
        return TableView(headings, rows, right=(0, 2, 5, 6, 7), note=note).without_empty_columns()

    def text(self, *, colours: bool = False) -> str:
        """Render the whole report as text."""
        parts = [str(self.verdict), *self.notes, "", table_text(self.table()), "", self.stacks.text(colours=colours)]
        return "\n".join(parts)

    def asdict(self) -> dict[str, object]:
        """Return the whole report as JSON-compatible dictionaries, lists, strings and numbers."""
        return {
            "name": self.name,
            "world": self.world,
            "verdict": {
                "kind": self.verdict.kind,
                "decided": self.verdict.decided,
                "ranks": list(self.verdict.ranks),
                "sentence": self.verdict.sentence,
                "notes": list(self.verdict.notes),
                "doing": [{"ranks": list(row.ranks), "doing": row.doing} for row in self.verdict.rows],
            },
            "notes": list(self.notes),
            "processes": [self._process(rank) for rank in self.processes],
            "stacks": self.stacks.asdict(),
        }

    def _process(self, rank: int) -> dict[str, object]:
        each, found = self.processes[rank], self.evidence[rank]
        seen = each.second.figures
        place = found.place
        return {
            "rank": rank,
            "host": each.host,
            "pid": each.pid,
            "command": each.command,
            "doing": found.state,
            "file": place.file if place is not None else "",
            "line": place.line if place is not None else 0,
            "state": seen.state if seen is not None else "",
            "wchan": seen.wchan if seen is not None else "",
            "threads": seen.threads if seen is not None else 0,
            "rss_bytes": seen.rss if seen is not None else 0,
            "cpu": _cpu(each),
            "gpu_bytes": each.gpus,
            "gpu_percent": each.busy,
            "error": each.second.error,
        }

    def html(self) -> str:
        """Render verdict, notes, processes and stacks as HTML."""
        notes = "".join(f'<div style="{tables.DIM}">{escape(note)}</div>' for note in self.notes)
        return f"{self.verdict._repr_html_()}{notes}{table_html(self.table())}{self.stacks.html()}"


def _cpu(each: OutsideProcess) -> float | None:
    """Return the share of a processor that a process used between the readings; None if unknown."""
    first, second = each.first.figures, each.second.figures
    if first is None or second is None or each.apart <= 0:
        return None
    return max(0.0, (second.cpu - first.cpu) / each.apart)


def _by_rank(processes: Sequence[OutsideProcess]) -> tuple[dict[int, OutsideProcess], int, str]:
    """Return the processes by rank, the number of ranks, and a sentence if their environments lack their ranks.

    Raises:
        OutsideError: they belong to several jobs.
    """
    launches: dict[str, list[int]] = {}
    for each in processes:
        launches.setdefault(each.place.launch, []).append(each.pid)
    if len(launches) > 1:
        jobs = "; ".join(
            f"{launch or 'no job in their environment'}: {format_ranks(sorted(pids), limit=6)}"
            for launch, pids in launches.items()
        )
        raise OutsideError(f"these processes are of several jobs, which are looked at one by one ({jobs})")
    ranks = [each.place.rank for each in processes]
    if min(ranks) >= 0 and len(set(ranks)) == len(ranks):
        world = max(*(each.place.world for each in processes), max(ranks) + 1, 0)
        return {each.place.rank: each for each in sorted(processes, key=lambda each: each.place.rank)}, world, ""
    note = (
        "The environments of these processes do not contain their ranks: they are numbered in the order of their pids, "
        "and taken as one job of so many ranks."
    )
    ordered = sorted(processes, key=lambda each: (each.host, each.pid))
    numbered = {
        at: structs.replace(each, place=each.place._replace(rank=at, world=len(ordered), local=()))
        for at, each in enumerate(ordered)
    }
    return numbered, len(ordered), note


#: Verdicts that depend on ranks being in the same process group.
_OF_GROUP = (verdict.ORDER, verdict.SHAPE, verdict.ROOT, verdict.EXTRA, verdict.CYCLE)


def verdict_from_outside(
    evidence: Mapping[int, Evidence],
    name: str,
    told: str,
    *,
    woken: Collection[int] = (),
    native: bool = False,
) -> Verdict:
    """Determine why these ranks wait, as far as can be seen from outside. The verdict is never certain.

    Args:
        evidence: the settled evidence of each rank.
        name: the name of the job.
        told: the source of the evidence, as a sentence.
        woken: the ranks that have moved between the readings, although they may be at the same line.
        native: whether native frames were read.
    """
    found = judge(evidence, name)
    sentence = found.sentence
    notes = [told]
    waiting = [rank for rank, each in evidence.items() if each.state == WAITS]
    unseen = any(wait.operation.group == UNSEEN_GROUP for rank in waiting for wait in evidence[rank].waits)
    among_waiting = found.kind == verdict.UNDECIDED and set(found.ranks) <= set(waiting)
    states = phrases.states(evidence, waiting)
    if waiting and set(waiting) <= set(woken):
        read = [rank for rank, each in evidence.items() if each.state != UNASKED]
        sentence = (
            f"The job seems to make progress, as {phrases.ranks(waiting)} moved between the readings. At the second "
            f"one, {phrases.states(evidence, read)}."
        )
        return replace(found, kind=verdict.NOTHING, culprits=(), sentence=sentence, notes=(*notes, *found.notes))
    if unseen and (found.kind in _OF_GROUP or among_waiting):
        found = replace(found, kind=verdict.UNDECIDED)
        sentence = f"Undecided: {states}; which process groups these calls are of cannot be seen from outside."
    elif among_waiting and not found.culprits and len({_line_of(evidence[rank]) for rank in waiting}) > 1:
        sentence = f"Undecided: {states}; these are different lines, so one of the ranks may be a call behind."
    elif found.kind == verdict.NOTHING:
        sentence = sentence.replace("No rank waits", "No rank is seen to wait", 1)
        if not native and any(each.state == STANDS for each in evidence.values()):
            notes.append("A rank that makes no progress may wait in native code (NCCL, CUDA); --native shows where.")
    elif found.decided:
        sentence = f"It seems that {sentence[:1].lower()}{sentence[1:]}"
    if unseen and found.decided:
        notes.append("Their process group cannot be seen from outside; that of all ranks is assumed.")
    return replace(found, sentence=sentence, likely=True, notes=(*notes, *found.notes))


def _line_of(each: Evidence) -> tuple[str, int] | None:
    place: SourceLocation | None = each.waits[0].place if each.waits else each.place
    return None if place is None else (place.file, place.line)


# Read the processes that a command names: by their pids, the workers of torchrun, or a Slurm job.


@dataclass(frozen=True, slots=True)
class LookRequest:
    """The processes to read: exactly one of the first three fields is set.

    Attributes:
        pids: processes of this machine, as in `123,456`.
        torchrun: the pid of a torchrun agent; 0: the only torchrun job on this machine.
        slurm: a Slurm job, or a step of it, as in `4711` or `4711.0`.
        native: include native frames.
        all_threads: include threads without user code.
        apart: the time between the two readings (seconds).
    """

    pids: str | None = None
    torchrun: int | None = None
    slurm: str | None = None
    native: bool = False
    all_threads: bool = False
    apart: float = 1.0


def look(request: LookRequest, label: Label | None = None) -> Look:
    """Read processes from outside, and report why they wait.

    Args:
        request: the processes to read, and how to read them.
        label: labels files, such as `Cell In[3]`.

    Raises:
        OutsideError: there are no such processes, they belong to another user, or the request is invalid.
    """
    ways = [request.pids, request.torchrun, request.slurm]
    if sum(way is not None for way in ways) != 1:
        raise OutsideError("give one of --pids 123,456, --torchrun [PID] and --slurm JOB")
    if not request.apart >= 0:
        raise OutsideError(f"--apart takes a number of seconds of at least 0, not {request.apart:g}")
    notes: Sequence[str] = ()
    if request.slurm is not None:
        name, way = f"Slurm job {request.slurm}", f"--slurm {request.slurm} --prepare"
        processes, notes = slurm.read_job(request.slurm, native=request.native, apart=request.apart)
    else:
        chosen = chosen_here(request.pids, request.torchrun)
        if request.pids is not None:
            name, way = f"process{'es' * (len(chosen) > 1)} {request.pids}", f"--pids {request.pids}"
        else:
            agent = f" {request.torchrun}" if request.torchrun else ""
            name, way = f"torchrun{agent}", f"--torchrun{agent}"
        processes = read_processes(chosen, native=request.native, apart=request.apart)
    return Look(
        name,
        processes,
        complete=request.pids is None,
        native=request.native,
        all_threads=request.all_threads,
        notes=(*notes, *remote_exec_note(processes, way)),
        label=label,
    )


def chosen_here(pids: str | None, torchrun: int | None) -> dict[int, LaunchedRank]:
    """Return the processes of this machine that a command names, with their ranks.

    Args:
        pids: as in `123,456`; or
        torchrun: the pid of a torchrun agent; 0: the only torchrun job on this machine.

    Raises:
        OutsideError: there are no such processes, they belong to another user, or `pids` is invalid.
    """
    return selection.torchrun_workers(torchrun or 0) if pids is None else selection.named(parse_pids(pids))


def parse_pids(text: str) -> list[int]:
    """Parse pids such as `123,456`.

    Raises:
        OutsideError: the text is invalid.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = next((word for word in words if not word.isdecimal() or int(word) < 1), None)
    if wrong is not None:
        raise OutsideError(f"--pids takes numbers of processes, such as 123,456, not {wrong!r}")
    return list(dict.fromkeys(map(int, words)))
