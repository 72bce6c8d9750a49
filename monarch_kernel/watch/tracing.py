"""Trace all processes into a file for ui.perfetto.dev and chrome://tracing.

``clocks`` relates the clocks of ranks to that of the controller. ``chrome_trace`` assigns records to lanes without
overlaps and writes the file. ``trace`` turns recording on, collects the records and turns recording off.
"""

from __future__ import annotations

import atexit
import gzip
import heapq
import io
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self, TypeVar

import msgspec

from monarch_kernel import introspection
from monarch_kernel.actor import Future
from monarch_kernel.display.quantities import duration
from monarch_kernel.introspection import TracedRank, trace_records
from monarch_kernel.meshes import on_change

# Estimate the offset of another process's clock from round trips, like NTP. Pure.
#
# A sample is a round trip: the time of the request, the remote time of the answer, and the time of its arrival. The
# remote clock is ahead by the remote time minus the middle of the trip, with an error of at most half the trip. The
# shortest trip has the smallest error. Two estimates at different times show the drift of the remote clock.


class ClockSample(NamedTuple):
    """One round trip (nanoseconds): ``sent`` and ``received`` on the local clock, ``remote`` on the other."""

    sent: int
    remote: int
    received: int


class ClockOffset(NamedTuple):
    """The offset of another clock (nanoseconds).

    Attributes:
        at: the time of the estimate, on the local clock.
        ahead: how far the other clock is ahead.
        error: the maximum error.
    """

    at: int
    ahead: int
    error: int


def estimate(samples: Iterable[ClockSample]) -> ClockOffset | None:
    """Return the best estimate from several round trips; None without samples.

    If all samples are consistent with equal clocks, the offset is 0: the processes of a host share a clock.
    """
    best: ClockOffset | None = None
    equal = True
    for sent, remote, received in samples:
        received = max(sent, received)
        middle = (sent + received) // 2
        found = ClockOffset(middle, remote - middle, (received - sent + 1) // 2)
        equal = equal and sent <= remote <= received
        if best is None or found.error < best.error:
            best = found
    if best is not None and equal:
        return best._replace(ahead=0)
    return best


class ClockAlignment:
    """Converts times of another process to the local clock.

    Args:
        first: an estimate; None: the clocks are equal.
        last: a later estimate; the offset is interpolated linearly between the two.
    """

    __slots__ = ("_first", "_rate", "error")

    def __init__(self, first: ClockOffset | None = None, last: ClockOffset | None = None) -> None:
        first = first or last or ClockOffset(0, 0, 0)
        last = last or first
        if abs(last.ahead - first.ahead) <= first.error + last.error:  # no drift beyond the errors
            first = last = min(first, last, key=lambda offset: offset.error)
        self._first = first
        passed = last.at - first.at
        self._rate = (last.ahead - first.ahead) / passed if passed > 0 else 0.0
        #: The maximum error of converted times (nanoseconds).
        self.error = max(first.error, last.error)

    def ours(self, remote: int) -> int:
        """Convert a time of the other clock to the local clock."""
        passed = remote - self._first.ahead - self._first.at
        return (
            remote - self._first.ahead - round(self._rate * passed / (1 + self._rate))
            if self._rate
            else (remote - self._first.ahead)
        )


# Write records as a Chrome trace: the JSON format of ui.perfetto.dev and chrome://tracing.
#
# The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
# Slices are complete events ("X"). Times are microseconds since the trace was turned on, on the controller's clock. A
# call is a slice at its caller, with an arrow ("s" to "f") to the slice of each rank, and one back from the rank that
# ended last.

#: The maximum number of arrows in a file.
MAX_ARROWS = 1_000_000
#: The names of separate lanes.
_TRACKS = {trace_records.CALL: "calls", trace_records.TRANSFER: "transfers"}


@dataclass(slots=True)
class ProcessRecords:
    """The records of one process.

    Attributes:
        name: the name of the process.
        batches: its records in order, each batch with the alignment of its clock.
    """

    name: str
    batches: list[tuple[trace_records.RecordedTrace, ClockAlignment]] = field(default_factory=list)


@dataclass(slots=True)
class _Slice:
    """A record with its time on the controller's clock, and its position in the file."""

    record: trace_records.TraceRecord
    start: int
    end: int
    open: bool
    tid: int = 0


@dataclass(slots=True)
class _Called:
    """Where a call was made, and the slices that it caused."""

    site: tuple[int, _Slice] | None = None  # the process, and the slice of the call
    # process, thread, start and end of each slice
    led_to: list[tuple[int, int, int, int]] = field(default_factory=list)


class ChromeTrace:
    """A trace file that is being written.

    Args:
        file: the output file.
        origin: when the trace was turned on, on the controller's clock (nanoseconds).
        now: when it was turned off.
        names: display names, by the identifiers of processes.
    """

    def __init__(self, file: IO[str], origin: int, now: int, names: Mapping[str, str]) -> None:
        self._names = names
        self._file = file
        self._origin = origin
        self._now = max(origin, now)
        self._calls: dict[str, _Called] = {}
        self._pids = 0
        self._first = True
        #: The number of slices and arrows, and the number of arrows beyond the limit.
        self.slices = self.arrows = self.arrows_left_out = 0
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')

    def add(self, process: ProcessRecords) -> None:
        """Write the records of a process. The first process is shown at the top."""
        self._pids += 1
        pid = self._pids
        self._event("M", pid, 0, "process_name", args={"name": process.name})
        self._event("M", pid, 0, "process_sort_index", args={"sort_index": pid})
        threads: dict[int, str] = {}
        for recorded, _ in process.batches:
            threads.update(recorded.threads)
        tids = 0
        for track, slices in self._tracks(process, threads):
            lanes = lanes_of([LaneSpan(each.start, each.end, self._group(each.record)) for each in slices])
            for lane in range(max(lanes) + 1):
                label = track if not lane else f"{track} ({lane + 1})"
                self._event("M", pid, tids + lane + 1, "thread_name", args={"name": label})
                self._event("M", pid, tids + lane + 1, "thread_sort_index", args={"sort_index": tids + lane + 1})
            for each, lane in zip(slices, lanes, strict=True):
                each.tid = tids + lane + 1
                self._slice(pid, each)
            tids += max(lanes) + 1

    def close(self, about: dict[str, object]) -> None:
        """Write the arrows and the end of the file, with ``about`` as its ``otherData``."""
        for call in self._calls.values():
            if call.site is not None and call.led_to:
                self._connect(*call.site, call.led_to)
        self._file.write(f'\n], "otherData": {_json(about)}}}\n')

    # -- slices -----------------------------------------------------------------------------------

    @staticmethod
    def _group(record: trace_records.TraceRecord) -> int:
        """Return the nesting group of a record: calls and transfers overlap, so each has its own group."""
        return record.number if record.kind in _TRACKS else record.group

    def _tracks(self, process: ProcessRecords, threads: dict[int, str]) -> Iterator[tuple[str, list[_Slice]]]:
        """Yield the slices of a process by the name of their track, in display order."""
        found: dict[int | str, list[_Slice]] = {}
        ended: set[int] = set()
        last = len(process.batches) - 1
        for at, (recorded, clock) in enumerate(process.batches):
            for record in recorded.records:
                ended.add(record.number)
                found.setdefault(self._track(record), []).append(self._placed(record, clock))
            if at == last:  # unfinished slices have ended since, or still run
                for record in recorded.running:
                    if record.number not in ended:
                        found.setdefault(self._track(record), []).append(self._placed(record, clock))
        for track, slices in sorted(found.items(), key=lambda item: isinstance(item[0], str)):
            slices.sort(key=lambda each: (each.start, -each.end))  # outer slices first
            if isinstance(track, str):
                yield track, slices
                continue
            kind = trace_records.ENDPOINT
            actors = {each.record.name.rpartition(".")[0] for each in slices if each.record.kind == kind}
            name = threads.get(track, f"thread {track}")
            yield (f"actor {actors.pop()}" if len(actors) == 1 else name), slices

    @staticmethod
    def _track(record: trace_records.TraceRecord) -> int | str:
        return _TRACKS.get(record.kind, record.thread)

    def _placed(self, record: trace_records.TraceRecord, clock: ClockAlignment) -> _Slice:
        start = min(max(clock.ours(record.start), self._origin), self._now)
        end = clock.ours(record.end) if record.end else self._now
        end = min(max(end, start), self._now)
        return _Slice(record, start, end, not record.end)

    def _slice(self, pid: int, each: _Slice) -> None:
        record = each.record
        name = record.name
        args: dict[str, object] = {}
        if record.kind == trace_records.TRANSFER:
            what, _, owner = name.rpartition(" ")
            name = f"{what} {self._names.get(owner, owner)}"
        elif record.kind == trace_records.CELL and (called := self._calls.get(record.id)) and called.site is not None:
            name = called.site[1].record.name  # ranks do not know the number of a cell
        if record.kind == trace_records.CALL:
            args["ranks"] = record.size
        elif record.size:
            args["bytes"] = record.size
        if record.kind == trace_records.TRANSFER and not each.open and each.end > each.start:
            args["GB/s"] = round(record.size / (each.end - each.start), 3)
        if record.mark and record.kind != trace_records.CALL:
            args["raised"] = True
        if each.open:
            args["unfinished"] = True
        self._event("X", pid, each.tid, name, each.start, record.kind, args, each.end - each.start)
        self.slices += 1
        if not record.id:
            return
        call = self._calls.setdefault(record.id, _Called())
        if record.kind == trace_records.CALL:
            call.site = pid, each
        else:
            call.led_to.append((pid, each.tid, each.start, each.end))

    # -- arrows -----------------------------------------------------------------------------------

    def _connect(self, pid: int, call: _Slice, led_to: list[tuple[int, int, int, int]]) -> None:
        name, kind = call.record.name, call.record.kind
        begun = min(start for _, _, start, _ in led_to)
        sent = call.end if call.record.mark else min(max(begun, call.start), call.end)
        self._event("X", pid, call.tid, "send", call.start, kind, {}, sent - call.start)
        leave = max(call.start, sent - 1)  # within the slice "send", which excludes its end
        for to, tid, start, _ in led_to:
            self._arrow(name, (pid, call.tid, max(call.start, min(leave, start))), (to, tid, start))
        to, tid, start, end = max(led_to, key=lambda each: each[3])
        if call.open or call.record.mark or call.end < start:
            return  # no answer, or the clocks are wrong
        # The system may preempt an actor between its answer and its record of the end.
        left = max(start, min(end, call.end) - 1)
        arrived = max(left, sent)
        self._event("X", pid, call.tid, "answer", arrived, kind, {}, call.end - arrived)
        self._arrow(name, (to, tid, left), (pid, call.tid, arrived))

    def _arrow(self, name: str, start: tuple[int, int, int], end: tuple[int, int, int]) -> None:
        """Write an arrow between two slices, each given as process, thread and a time within the slice."""
        if end[2] < start[2]:  # backwards because of clock errors
            return
        if self.arrows >= MAX_ARROWS:
            self.arrows_left_out += 1
            return
        self.arrows += 1
        self._event("s", *start[:2], name, start[2], "flow", id=self.arrows)
        self._event("f", *end[:2], name, end[2], "flow", id=self.arrows, bp="e")

    # -- events -----------------------------------------------------------------------------------

    def _event(
        self,
        phase: str,
        pid: int,
        tid: int,
        name: str,
        at: int | None = None,
        category: str = "",
        args: dict[str, object] | None = None,
        duration: int | None = None,
        **more: object,
    ) -> None:
        event: dict[str, object] = {"ph": phase, "pid": pid, "tid": tid, "name": name}
        if phase != "M":
            event["cat"] = category or "other"
        if at is not None:
            event["ts"] = (at - self._origin) / 1000
        if duration is not None:
            event["dur"] = duration / 1000
        if args:
            event["args"] = args
        event.update(more)
        self._file.write(("" if self._first else ",\n") + _json(event))
        self._first = False


_encode = msgspec.json.Encoder().encode


def _json(value: dict[str, object]) -> str:
    """Encode the value as JSON."""
    try:
        return _encode(value).decode()  # much faster than the fallback
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(_clean(value))


def _clean(value: object) -> object:
    """Replace text that is not valid Unicode, which strict readers reject."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_clean(key): _clean(each) for key, each in value.items()}
    if isinstance(value, Iterable):
        return [_clean(each) for each in value]
    return value


class LaneSpan(NamedTuple):
    """A span to be assigned to a lane.

    Attributes:
        start, end: the times; ``end`` is not before ``start``.
        group: spans of one group nest in each other where possible. Group 0 gets the first lanes.
    """

    start: int
    end: int
    group: int


def lanes_of(spans: Sequence[LaneSpan]) -> list[int]:
    """Return the lane of each span, from 0. Two spans of a lane are nested or disjoint, as trace viewers require."""
    groups: dict[int, list[int]] = {}
    for index in sorted(range(len(spans)), key=lambda at: (spans[at].start, -spans[at].end)):
        groups.setdefault(spans[index].group, []).append(index)
    placed = [0] * len(spans)
    units: list[tuple[int, int, list[int]]] = []  # start, end and members of spans that share a lane
    first = 0
    for group, members in groups.items():
        nested, apart = _nest(spans, members)
        if not group:
            first = 1  # lane 0 is theirs
        else:
            units.append((spans[nested[0]].start, max(spans[at].end for at in nested), nested))
        units += [(spans[at].start, spans[at].end, [at]) for at in apart]
    units.sort(key=lambda unit: unit[:2])
    busy: list[tuple[int, int]] = []  # when each lane becomes free, and the lane
    free: list[int] = []
    used = first
    for start, end, members in units:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, used = used, used + 1
        for at in members:
            placed[at] = lane
        heapq.heappush(busy, (end, lane))
    return placed


def _nest(spans: Sequence[LaneSpan], members: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split a group, in order of starts, into spans that nest and spans that partly overlap others."""
    nested: list[int] = []
    apart: list[int] = []
    around: list[int] = []  # the ends of the spans that enclose the next one
    for at in members:
        while around and around[-1] <= spans[at].start:
            around.pop()
        if around and spans[at].end > around[-1]:
            apart.append(at)
        else:
            around.append(spans[at].end)
            nested.append(at)
    return nested, apart


# ``trace(FILE)``: record the activity of this controller and all its ranks, and write it to a file.
#
# Each process keeps its records in a ring buffer until ``flush`` or the end collects them. Collected records are in a
# temporary file, so that the controller's memory does not grow with the trace. The file is written one process at a
# time.

#: The default number of records per process; each takes about 300 bytes.
RECORDS = 32_768
#: The number of round trips to estimate the clock of a rank, and the number of ranks queried in parallel.
ROUNDS, AT_A_TIME = 8, 8
#: The total time for ranks to answer one request (seconds).
PATIENCE = 10.0

A = TypeVar("A")

_lock = threading.RLock()
_current: Trace | None = None


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A summary of a trace.

    Attributes:
        file: the path of the trace.
        processes: the number of processes.
        slices: the number of slices.
        dropped: the number of overwritten records in the ring buffers, by the name of the process.
        missing: what is missing, one sentence each.
        clock_error: the maximum error of the times of ranks (seconds).
        nbytes: the size of the file.
    """

    file: Path
    processes: int
    slices: int
    dropped: dict[str, int]
    missing: tuple[str, ...]
    clock_error: float
    nbytes: int

    def __str__(self) -> str:
        lines = [
            f"{self.file}: {self.slices} slices of {self.processes} processes, clocks within "
            f"{duration(self.clock_error)}. Open it in https://ui.perfetto.dev, which reads it in the browser."
        ]
        if self.dropped:
            worst = max(self.dropped, key=self.dropped.__getitem__)
            lines.append(
                f"{sum(self.dropped.values())} older records were overwritten, most of them in {worst} "
                f"({self.dropped[worst]}): collect more often (%mesh trace flush), or keep more (records=...)."
            )
        return "\n".join([*lines, *self.missing])


@dataclass(slots=True)
class _Traced:
    """A rank that records.

    Attributes:
        first, last: the estimates of its clock.
        parts: the positions of its batches in the temporary file: offset, size and alignment.
        lost: whether it is known that it will not answer any more.
    """

    rank: TracedRank
    first: ClockOffset | None
    parts: list[tuple[int, int, ClockAlignment]]
    lost: bool = False


class Trace:
    """A trace of this controller and all its ranks, including ranks that are spawned while it is on.

    ``with trace("run.json"): ...`` turns it on and off. A controller can have only one trace at a time.

    Args:
        file: the output file, written at the end with mode 0600; compressed if its name ends in ".gz".
        records: how many records each process keeps until they are collected; they take about 300 bytes each.
    """

    def __init__(self, file: str | os.PathLike[str], *, records: int = RECORDS) -> None:
        if records < 1:
            raise ValueError(f"records must be at least 1, not {records}")
        self.file = Path(file).absolute()
        self._records = records
        self._ranks: dict[str, _Traced] = {}
        self._missing: list[str] = []
        self._own: list[tuple[int, int, ClockAlignment]] = []
        self._spool: IO[bytes] | None = None
        self._origin = 0
        self._changes: Callable[[], None] = lambda: None
        #: The summary, set when the trace is off.
        self.summary: TraceSummary | None = None

    @property
    def is_on(self) -> bool:
        """Whether it is recording now."""
        return _current is self

    def start(self) -> Self:
        """Turn the trace on.

        Raises:
            RuntimeError: another trace is on.
            OSError: the folder of the file does not exist, or is not writable.
        """
        global _current
        with _lock:
            if _current is not None:
                raise RuntimeError(f"a trace to {_current.file} is on: end it first (%mesh trace off)")
            if self.summary is not None:
                raise RuntimeError(f"the trace to {self.file} has ended: make another one")
            if self.file.is_dir():
                raise IsADirectoryError(f"{self.file} is a folder: name a file for the trace")
            with tempfile.TemporaryFile(dir=self.file.parent):
                pass  # fail now if the folder is not writable, rather than after an hour of records
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115  # stop() closes it
            self._origin = introspection.trace_clock()
            _current = self
            introspection.start_recording(self._records)
            self._start(introspection.living_ranks())
            self._changes = on_change(self._on_change)
            atexit.register(self._at_exit)  # before the runtime ends, as that was registered earlier
        return self

    def flush(self) -> None:
        """Collect the records so far, so that they are not overwritten."""
        with _lock:
            self._check_on()
            self._collect("take")
            self._start(self._new())

    def stop(self) -> TraceSummary:
        """Turn the trace off in all processes, and write the file.

        Raises:
            OSError: the file cannot be written.
        """
        global _current
        with _lock:
            self._check_on()
            self._changes()
            atexit.unregister(self._at_exit)
            try:
                self._collect("off")
            finally:
                introspection.stop_recording()
                _current = None
            try:
                self.summary = self._write()
            finally:
                if self._spool is not None:
                    self._spool.close()
            return self.summary

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_on:
            self.stop()

    def _at_exit(self) -> None:
        if self.is_on:
            self.stop()

    def _check_on(self) -> None:
        if not self.is_on:
            raise RuntimeError(f"the trace to {self.file} is not on")

    # -- ranks ------------------------------------------------------------------------------------

    def _new(self) -> list[TracedRank]:
        return [rank for rank in introspection.living_ranks() if rank.proc not in self._ranks]

    def _on_change(self) -> None:
        """Make new ranks record, too. It does not wait, because the polling thread may call it."""
        if self.is_on:
            for rank in self._new():
                self._ranks[rank.proc] = _Traced(rank, None, [])
                rank.ask("on", self._records)

    def _start(self, ranks: Sequence[TracedRank]) -> None:
        for rank in ranks:
            self._ranks[rank.proc] = _Traced(rank, None, [])
        answers = _asked(ranks, "on", self._records)
        offsets = _clocks([rank for rank in ranks if rank.proc in answers])
        for rank in ranks:
            self._ranks[rank.proc].first = offsets.get(rank.proc)
            if rank.proc not in answers:
                self._missing.append(f"{_name(rank)} did not answer when the trace was turned on.")

    def _collect(self, order: str) -> None:
        """Move the records of all processes to the temporary file."""
        ranks = [traced.rank for traced in self._ranks.values() if not traced.lost]
        offsets = _clocks(ranks)
        for proc, (_, data) in _asked(ranks, order).items():
            traced = self._ranks[proc]
            last = offsets.get(proc)
            traced.first = traced.first or last
            if data:
                traced.parts.append(self._keep(data, ClockAlignment(traced.first, last)))
            elif order == "off":
                self._missing.append(f"{_name(traced.rank)} had no records: it did not know of the trace.")
        alive = {rank.proc for rank in introspection.living_ranks()}
        for proc, traced in list(self._ranks.items()):
            if proc not in offsets and (proc not in alive or order == "off") and not traced.lost:
                traced.lost = True
                what = "did not answer" if proc in alive else "has ended"
                when = "since it was last collected" if traced.parts else "at all"
                self._missing.append(f"{_name(traced.rank)} {what}: nothing of it is shown {when}.")
        own = introspection.take_records()
        self._own.append(self._keep(trace_records.encode_recorded(own), ClockAlignment()))

    def _keep(self, data: bytes, clock: ClockAlignment) -> tuple[int, int, ClockAlignment]:
        assert self._spool is not None
        at = self._spool.seek(0, os.SEEK_END)
        self._spool.write(data)
        return at, len(data), clock

    # -- the file ---------------------------------------------------------------------------------

    def _write(self) -> TraceSummary:
        now = introspection.trace_clock()
        dropped: dict[str, int] = {}
        handle, path = tempfile.mkstemp(prefix=f".{self.file.name}.", dir=self.file.parent)  # of mode 0600
        try:
            with os.fdopen(handle, "wb") as raw, _text_of(raw, self.file.suffix == ".gz") as text:
                names = {proc: f"{each.rank.mesh} rank {each.rank.rank}" for proc, each in self._ranks.items()}
                written = ChromeTrace(text, self._origin, now, names)
                error = processes = 0
                here = f"controller, {socket.gethostname()}, pid {os.getpid()}"
                order = sorted(self._ranks.values(), key=lambda traced: (traced.rank.mesh, traced.rank.rank))
                for name, parts in ((here, self._own), *((_name(each.rank), each.parts) for each in order)):
                    process = self._read(name, parts)
                    if not process.batches:
                        continue
                    written.add(process)
                    processes += 1
                    if lost := sum(recorded.dropped for recorded, _ in process.batches):
                        dropped[name] = lost
                    error = max(error, *(clock.error for _, clock in process.batches))
                if written.arrows_left_out:
                    self._missing.append(f"{written.arrows_left_out} arrows were left out.")
                began = time.time() - (introspection.trace_clock() - self._origin) / 1e9
                written.close(
                    {
                        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
                        "dropped": dropped,
                        "missing": self._missing,
                        "clock error (us)": error / 1000,
                    }
                )
            size = os.stat(path).st_size
            os.replace(path, self.file)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise
        missing = tuple(self._missing)
        return TraceSummary(self.file, processes, written.slices, dropped, missing, error / 1e9, size)

    def _read(self, name: str, parts: Iterable[tuple[int, int, ClockAlignment]]) -> ProcessRecords:
        assert self._spool is not None
        process = ProcessRecords(name)
        for at, size, clock in parts:
            self._spool.seek(at)
            try:
                process.batches.append((trace_records.decode_recorded(self._spool.read(size)), clock))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._missing.append(f"Records of {name} cannot be read: {error}.")
        return process


def trace(file: str | os.PathLike[str], *, records: int = RECORDS) -> Trace:
    """Return a trace of this controller and all its ranks: ``with trace("run.json"): ...``; see ``Trace``."""
    return Trace(file, records=records)


def current_trace() -> Trace | None:
    """Return the active trace of this controller."""
    return _current


def _name(rank: TracedRank) -> str:
    return f"{rank.mesh} rank {rank.rank}, {rank.host}"


def _text_of(raw: IO[bytes], compressed: bool) -> IO[str]:
    binary = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=5) if compressed else raw
    return io.TextIOWrapper(binary, encoding="utf-8", write_through=False)


# -- asking ranks -----------------------------------------------------------------------------------


def _asked(ranks: Sequence[TracedRank], order: str, capacity: int = 0) -> dict[str, tuple[int, bytes]]:
    """Return the answers that arrive in time, by proc."""
    return _answers([(rank, rank.ask(order, capacity)) for rank in ranks], time.monotonic() + PATIENCE)


def _answers(asked: Sequence[tuple[TracedRank, Future[object]]], deadline: float) -> dict[str, Any]:
    found: dict[str, object] = {}
    for rank, answer in asked:
        with suppress(Exception):  # it is dead, or does not answer: the caller reports it
            found[rank.proc] = answer.get(max(0.0, deadline - time.monotonic()))
    return found


def _clocks(ranks: Sequence[TracedRank]) -> dict[str, ClockOffset]:
    """Estimate the clocks of all ranks that answer in time, a few at a time: more would delay each other's answers."""
    found: dict[str, ClockOffset] = {}
    deadline = time.monotonic() + PATIENCE
    for first in range(0, len(ranks), AT_A_TIME):
        some = list(ranks[first : first + AT_A_TIME])
        samples: dict[str, list[ClockSample]] = {rank.proc: [] for rank in some}
        for _ in range(ROUNDS):
            asked = [(rank, _RoundTrip(rank)) for rank in some]
            answers = _answers([(rank, trip.answer) for rank, trip in asked], deadline)
            for rank, trip in asked:
                if rank.proc in answers:
                    samples[rank.proc].append(ClockSample(trip.sent, answers[rank.proc], trip.received))
            some = [rank for rank in some if rank.proc in answers]
        for proc, taken in samples.items():
            best = estimate(taken)
            if best is not None:
                found[proc] = best
    return found


class _RoundTrip:
    """A query for a rank's time, which records when the answer arrives."""

    def __init__(self, rank: TracedRank) -> None:
        self.received = 0
        self.sent = introspection.trace_clock()
        self.answer: Future[Any] = rank.ask("clock")
        self.answer.add_done_callback(self._arrived)

    def _arrived(self, _answer: object) -> None:
        self.received = introspection.trace_clock()


# ``profile``: trace a block of a program, with Monarch's names; ``tracing`` has the code.


class profile:  # noqa: N801  # Monarch's name
    """Traces this controller and all its ranks over a block: ``with profile(url) as profiled: ...``.

    Args:
        telemetry_url: accepted for compatibility with Monarch; this process and its ranks are always traced.
        on_trace_ready: called with this object at the end of the block.

    Attributes:
        path: the last file written; None if there is none.
    """

    def __init__(self, telemetry_url: str, *, on_trace_ready: Callable[[profile], object] | None = None) -> None:
        del telemetry_url
        self.path: Path | None = None
        self._on_trace_ready = on_trace_ready
        self._trace: Trace | None = None

    def __enter__(self) -> Self:
        folder = tempfile.TemporaryDirectory(prefix="monarch-profile-", ignore_cleanup_errors=True)
        weakref.finalize(self, folder.cleanup)
        self._trace = Trace(os.path.join(folder.name, "trace.json")).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._trace is not None
        self._trace.stop()
        if self._on_trace_ready is not None and error is None:
            self._on_trace_ready(self)

    def export_perfetto_trace(self, output: os.PathLike[str] | str | None = None) -> Path:
        """Write the trace of the block as a file for ui.perfetto.dev. Return its path.

        Args:
            output: the file, or a folder; by default a new file in the temporary folder of this user.

        Raises:
            RuntimeError: the block has not ended.
        """
        if self._trace is None or self._trace.summary is None:
            raise RuntimeError("there is no trace before the end of the block: with job.profile() as profiled: ...")
        self.path = trace_path(output)
        shutil.copyfile(self._trace.summary.file, self.path)
        return self.path


def trace_path(output: os.PathLike[str] | str | None, suffix: str = ".json") -> Path:
    """Return the path of a trace file. Its folder is created if it is missing."""
    name = time.strftime("monarch-profile-%Y%m%d-%H%M%S") + suffix
    if output is None:
        return Path(tempfile.mkdtemp(prefix="monarch_profiles-")) / name
    path = Path(output).absolute()
    path = path / name if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
