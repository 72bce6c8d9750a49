"""``trace(FILE)``: record the activity of this controller and all its ranks, and write it to a file.

Each process keeps its records in a ring buffer until ``flush`` or the end collects them. Collected records are in a
temporary file, so that the controller's memory does not grow with the trace. The file is written one process at a time.
"""

from __future__ import annotations

import atexit
import gzip
import io
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

import msgspec

from monarch_kernel import introspection
from monarch_kernel.actor import Future
from monarch_kernel.display.quantities import duration
from monarch_kernel.introspection import TracedRank, trace_records
from monarch_kernel.meshes import on_change
from monarch_kernel.watch.tracing.chrome_trace import ChromeTrace, ProcessRecords
from monarch_kernel.watch.tracing.clocks import ClockAlignment, ClockOffset, ClockSample, estimate

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
    binary: Any = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=5) if compressed else raw
    return io.TextIOWrapper(binary, encoding="utf-8", write_through=False)


# -- asking ranks -----------------------------------------------------------------------------------


def _asked(ranks: Sequence[TracedRank], order: str, capacity: int = 0) -> dict[str, tuple[int, bytes]]:
    """Return the answers that arrive in time, by proc."""
    return _answers([(rank, rank.ask(order, capacity)) for rank in ranks], time.monotonic() + PATIENCE)


def _answers(asked: Sequence[tuple[TracedRank, Future[Any]]], deadline: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
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
