"""Read and write files of records: those that a report has saved, and traces of `torch.profiler`.

Nothing in a file is executed. Both kinds are JSON and are validated when they are read.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from monarch_kernel.debugger.controller.stragglers.stragglers_report import LAST, StragglerReport
from monarch_kernel.debugger.model.collective_times import CollectiveTimes, TimedCollective
from monarch_kernel.debugger.source_locations import Label
from monarch_kernel.private_files import write_own_file

#: The value that identifies a file of saved records.
_FORM = "monarch-collectives-1"
#: Limits for decompressing a file: bytes, and multiples of its size. JSON traces rarely compress more than 30 times.
_LARGEST, _RATIO = 16 << 20, 64


class RecordsError(ValueError):
    """A file has no records of collectives. The message contains its name and the reason."""


class _File(msgspec.Struct):
    form: str
    name: str
    records: list[CollectiveTimes]


class _Profiled(msgspec.Struct):
    """The part of a trace of `torch.profiler` that is read."""

    events: list[dict[str, Any]] = msgspec.field(name="traceEvents")
    distributed: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="distributedInfo")
    host: str = msgspec.field(default="", name="host_name")
    base: int = msgspec.field(default=0, name="baseTimeNanoseconds")


def save(report: StragglerReport, path: str) -> None:
    """Write the records of a report to a file that only this user can read.

    Raises:
        OSError: the file cannot be written.
    """
    write_own_file(path, msgspec.json.encode(_File(_FORM, report.name, list(report.records))))


def report_of(
    paths: Sequence[str], last: int = LAST, *, label: Label | None = None, each: bool = False
) -> StragglerReport:
    """Build a report from files: one that was saved, or a `torch.profiler` trace of each rank.

    Args:
        paths: the files; those that end in `.gz` are compressed.
        last: how many of the latest collectives of each line to examine.
        label: labels files, such as `Cell In[3]`.
        each: also show when each rank arrived at each of the latest collectives.

    Raises:
        RecordsError: a file cannot be read or has another format, or two files are of the same rank.
    """
    records: list[CollectiveTimes] = []
    names: list[str] = []
    for path in paths:
        data = _contents(path)
        try:
            saved = msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError):
            records.append(_of_profile(path, data))
            continue
        if saved.form != _FORM:
            raise RecordsError(f"{path} was written by another version ({saved.form!r})")
        records += saved.records
        names.append(saved.name)
    ranks = [record.rank for record in records]
    if len(set(ranks)) < len(ranks):
        raise RecordsError(f"several of these files are of rank {next(r for r in ranks if ranks.count(r) > 1)}")
    name = ", ".join(names) or f"{len(records)} traces of torch.profiler"
    return StragglerReport(name, records, last, label=label, each=each)


def _contents(path: str) -> bytes:
    try:
        if not path.endswith(".gz"):
            with open(path, "rb") as file:
                return file.read()
        most = _LARGEST + _RATIO * os.stat(path).st_size
        with gzip.open(path) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise RecordsError(f"{path} is larger than what a compressed trace of its size can be")
        return data
    except (EOFError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RecordsError(f"{path} cannot be read: {why}") from None


def _of_profile(path: str, data: bytes) -> CollectiveTimes:
    """Read the collectives in a trace of one rank.

    Their durations last until all ranks have arrived, so clocks do not matter. Numbers count from the beginning of the
    trace, so the traces of all ranks must begin at the same step.
    """
    try:
        trace = msgspec.json.decode(data, type=_Profiled)
        rank = int(trace.distributed["rank"])
        groups = {
            str(group["pg_name"]): tuple(int(member) for member in group["ranks"])
            for group in trace.distributed["pg_config"]
        }
        events = [(float(event["ts"]), event) for event in trace.events if _is_collective(event)]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise RecordsError(
            f"{path} has no records of collectives: it is neither a file of 'stragglers --save' nor a trace that "
            f"torch.profiler has exported in a distributed program ({type(error).__name__}: {error})"
        ) from None
    several = [name for name, members in groups.items() if len(members) > 1]
    if len(several) > 1:
        raise RecordsError(
            f"{path}: the program has {len(several)} process groups, and traces of gloo do not say of which a "
            "collective is; %mesh stragglers reads PyTorch's Flight Recorder, which does"
        )
    calls = _calls(sorted(events, key=lambda each: each[0]), several[0] if several else "", trace.base)
    return CollectiveTimes(rank, rank, "", trace.host, trace.host, groups, tuple(calls))


def _is_collective(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") == "user_annotation" and event["name"].startswith("gloo:")


def _calls(events: Iterable[tuple[float, dict[str, Any]]], group: str, base: int) -> Iterable[TimedCollective]:
    """Convert these events to collectives, ordered by time."""
    for number, (moment, event) in enumerate(events, 1):
        op = str(event["name"]).partition(":")[2]
        entered = base / 1e9 + moment / 1e6
        yield TimedCollective(group, number, op, op, None, entered, float(event.get("dur") or 0.0) / 1e6)
