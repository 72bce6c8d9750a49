"""The file format of reports, as plain data. Nothing in it is executed or unpickled when it is read.

Verdicts, locations, stacks and records of collectives already are plain values. Each distinct stack is stored once,
since most ranks of a large job have the same stacks.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.controller.stacks.stacks_report import Stacks
from monarch_kernel.debugger.controller.stragglers.stragglers_report import StragglerReport
from monarch_kernel.debugger.model.collective_times import CollectiveTimes
from monarch_kernel.debugger.model.stacks import Stack, StackSnapshot

#: The maximum number of frames in a report: 10,000 ranks with 40 threads of 75 frames each.
_FRAMES = 30_000_000


class RankFacts(msgspec.Struct, frozen=True):
    """A process of a job, as its machine reports it.

    Attributes:
        rank: its rank in the job.
        host: its machine.
        pid: its pid there.
        answers: whether it has answered.
        since: when it was prepared (seconds since 1970); 0 if unknown.
        restarts: how often its launcher has restarted the ranks.
        state: the state letter of the operating system: R, S, D, T, t or Z; "" if not visible from the reporting
            machine.
        wchan: the kernel function in which its main thread sleeps.
        threads: the number of its threads.
        rss: memory (bytes).
    """

    rank: int
    host: str
    pid: int
    answers: bool
    since: float = 0.0
    restarts: int = 0
    state: str = ""
    wchan: str = ""
    threads: int = 0
    rss: int = 0


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a job and about a report on it.

    Attributes:
        name: the name under which its ranks were prepared.
        launch: the id of the launch; see `engines.join.identity.RankIdentity`.
        program: the command line of its first rank, shortened.
        world: the number of its ranks.
        since: when the first of its known ranks was prepared (seconds since 1970).
        made: when the report was made (seconds since 1970).
        host: the machine on which it was made.
        reason: the reason for it, as a sentence.
        ranks: its known processes, by rank.
        versions: by name and version of a program, the ranks that have reported it.
    """

    name: str
    launch: str
    program: str
    world: int
    since: float
    made: float
    host: str
    reason: str
    ranks: tuple[RankFacts, ...]
    versions: dict[str, dict[str, tuple[int, ...]]] = {}


class PlainSnapshot(NamedTuple):
    """The activity of one rank, with its stacks by their number."""

    pid: int
    stacks: tuple[int, ...]
    hidden: int = 0
    outside: bool = False
    note: str = ""


class PlainStacks(msgspec.Struct, frozen=True):
    """A `Stacks`; the attributes are its arguments, and `distinct` has each stack once."""

    mesh: str
    dimensions: dict[str, int]
    ranks: tuple[int, ...]
    distinct: tuple[Stack, ...]
    snapshots: dict[int, PlainSnapshot]
    late: dict[int, str]
    dead: dict[int, str]
    unread: dict[int, str]
    hosts: dict[int, str]
    seconds: float
    noun: str
    idle_note: str


class PlainStragglers(msgspec.Struct, frozen=True):
    """A `StragglerReport`; the attributes are its arguments."""

    name: str
    records: tuple[CollectiveTimes, ...]
    last: int
    notes: tuple[str, ...]


def plain_stacks(stacks: Stacks) -> PlainStacks:
    """Convert stacks to their file format, without values of variables and without process-local data."""
    numbers: dict[Stack, int] = {}
    snapshots = {
        rank: PlainSnapshot(
            each.pid,
            tuple(
                numbers.setdefault(stack._replace(thread=0, values=(), issued=None), len(numbers))
                for stack in each.stacks
            ),
            each.hidden,
            each.outside,
            each.note,
        )
        for rank, each in stacks.snapshots.items()
    }
    return PlainStacks(
        stacks.mesh,
        dict(stacks.extent),
        stacks.ranks,
        tuple(numbers),
        snapshots,
        stacks.late,
        stacks.dead,
        stacks.unread,
        stacks.hosts,
        stacks.seconds,
        stacks.noun,
        stacks.idle_note,
    )


def stacks_of(plain: PlainStacks) -> Stacks:
    """Convert stacks from their file format.

    Raises:
        ValueError, LookupError: the data is damaged.
    """
    extent = Extent(tuple(plain.dimensions), tuple(plain.dimensions.values()))
    mentioned = (*plain.ranks, *plain.snapshots, *plain.late, *plain.dead, *plain.unread)
    if mentioned and not 0 <= min(mentioned) <= max(mentioned) < extent.nelements:
        raise ValueError(f"ranks {min(mentioned)} to {max(mentioned)} of {extent.nelements}")
    # Each stack is stored once, and may be referenced often.
    frames = sum(len(plain.distinct[at].frames) for each in plain.snapshots.values() for at in each.stacks)
    if frames > _FRAMES:
        raise ValueError(f"{frames} frames, more than {_FRAMES}")
    snapshots = {
        rank: StackSnapshot(
            each.pid, tuple(plain.distinct[at] for at in each.stacks), each.hidden, each.outside, each.note
        )
        for rank, each in plain.snapshots.items()
    }
    return Stacks(
        plain.mesh,
        extent,
        plain.ranks,
        snapshots,
        late=plain.late,
        dead=plain.dead,
        unread=plain.unread,
        hosts=plain.hosts,
        seconds=plain.seconds,
        noun=plain.noun,
        idle_note=plain.idle_note,
    )


def plain_stragglers(report: StragglerReport) -> PlainStragglers:
    """Convert a report on collectives to its file format."""
    return PlainStragglers(report.name, report.records, report.last, report.notes)


def stragglers_of(plain: PlainStragglers) -> StragglerReport:
    """Convert a report on collectives from its file format.

    Raises:
        ValueError, LookupError: the data is damaged.
    """
    report = StragglerReport(plain.name, plain.records, plain.last)
    report.notes = plain.notes  # the report has already found some of them again
    return report


class PlainReport(msgspec.Struct, frozen=True, kw_only=True):
    """A `JobReport` in its file format; `form` and `version` identify the format for other versions."""

    form: str
    version: str
    job: JobFacts
    verdict: Verdict
    stacks: PlainStacks
    threads: PlainStacks
    stragglers: PlainStragglers | None = None
    notes: tuple[str, ...] = ()


__all__ = [
    "JobFacts",
    "PlainReport",
    "PlainSnapshot",
    "PlainStacks",
    "PlainStragglers",
    "RankFacts",
    "plain_stacks",
    "plain_stragglers",
    "stacks_of",
    "stragglers_of",
]
