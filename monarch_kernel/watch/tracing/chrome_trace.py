"""Write records as a Chrome trace: the JSON format of ui.perfetto.dev and chrome://tracing.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
Slices are complete events ("X"). Times are microseconds since the trace was turned on, on the controller's clock. A
call is a slice at its caller, with an arrow ("s" to "f") to the slice of each rank, and one back from the rank that
ended last.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import msgspec

from monarch_kernel.introspection import trace_records
from monarch_kernel.watch.tracing.clocks import ClockAlignment

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

    def close(self, about: dict[str, Any]) -> None:
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
        args: dict[str, Any] = {}
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
        args: dict[str, Any] | None = None,
        duration: int | None = None,
        **more: Any,
    ) -> None:
        event: dict[str, Any] = {"ph": phase, "pid": pid, "tid": tid, "name": name}
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


def _json(value: dict[str, Any]) -> str:
    """Encode the value as JSON."""
    try:
        return _encode(value).decode()  # much faster than the fallback
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(_clean(value))


def _clean(value: Any) -> Any:
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
