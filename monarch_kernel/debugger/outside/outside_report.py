"""Report what was read of processes from outside: verdict, table of processes, merged stacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from msgspec import structs

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.hang import phrases, verdict
from monarch_kernel.debugger.controller.hang.judge import judge
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.controller.stacks.pyspy import read_snapshot
from monarch_kernel.debugger.controller.stacks.stacks_report import Stacks
from monarch_kernel.debugger.model.evidence import STANDS, UNASKED, UNSEEN_GROUP, WAITS, Evidence
from monarch_kernel.debugger.model.stacks import StackSnapshot
from monarch_kernel.debugger.outside.evidence import evidence_of, woken
from monarch_kernel.debugger.outside.processes import OutsideError
from monarch_kernel.debugger.outside.reading import OutsideProcess
from monarch_kernel.debugger.source_locations import Label, SourceLocation
from monarch_kernel.display import styles
from monarch_kernel.display.quantities import memory
from monarch_kernel.display.reports import AsReport
from monarch_kernel.display.tables import TableView, table_html, table_text
from monarch_kernel.meshes import format_ranks

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

    def asdict(self) -> dict[str, Any]:
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

    def _process(self, rank: int) -> dict[str, Any]:
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
        notes = "".join(f'<div style="{styles.DIM}">{escape(note)}</div>' for note in self.notes)
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
