"""A mesh of any size without processes, with the computation, memory and communication of a program: ``Simulator``."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.display.quantities import shown_location, text_size
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.protocol.private_files import written_whole
from monarch_kernel.runtime.mesh.rankset import name_ranks
from monarch_kernel.runtime.tensor.simulation.ledger import Ledger, Line, RankClass, SimulatedRates
from monarch_kernel.runtime.tensor.simulation.mesh import SimulatedEngine, SimulatedMesh

# Report the computation, memory and communication of each simulated rank: `SimulationReport`.

#: The number of lines of the program that are shown.
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class SimulatedRanks:
    """Ranks that behave the same. All figures are for one of them.

    Attributes:
        ranks: the ranks.
        operations, flops: the numbers of operations and floating-point operations.
        seconds: the duration; `busy` is the part in operations, `communicating` the part in exchanges with other ranks.
        peak, kept: the maximum and final memory (bytes).
        peak_line: the line of the program that caused the peak: file, line, function.
        sent: the bytes that it sends, by kind of exchange.
    """

    ranks: tuple[int, ...]
    operations: int
    flops: int
    seconds: float
    busy: float
    communicating: float
    peak: int
    kept: int
    peak_line: Line
    sent: Mapping[str, int]


class SimulationReport(AsTable):
    """The results of a simulation, by ranks that behave the same, and by lines of the program.

    Attributes:
        groups: the groups of ranks.
        lines: for each line that caused exchanges, the bytes that a rank sent for it.
    """

    __slots__ = ("groups", "lines")

    def __init__(self, groups: Sequence[SimulatedRanks], lines: Mapping[Line, int]) -> None:
        self.groups = tuple(groups)
        self.lines = dict(lines)

    @classmethod
    def of(cls, ledger: Ledger) -> SimulationReport:
        """Create the report of a ledger."""
        groups = [
            SimulatedRanks(
                tuple(sorted(each.ranks)),
                each.operations,
                each.flops,
                each.time,
                each.busy,
                each.communicating,
                each.peak,
                each.current,
                each.peak_line,
                dict(each.sent),
            )
            for each in sorted(ledger.classes, key=lambda each: min(each.ranks))
        ]
        lines = {line: counts["sent"] for line, counts in ledger.lines.items() if counts["sent"]}
        return cls(groups, dict(sorted(lines.items(), key=lambda item: -item[1])))

    @property
    def seconds(self) -> float:
        """The duration of the slowest rank (seconds)."""
        return max(each.seconds for each in self.groups)

    @property
    def peak(self) -> int:
        """The maximum memory of a rank (bytes)."""
        return max(each.peak for each in self.groups)

    @property
    def sent(self) -> int:
        """The bytes that all ranks send."""
        return sum(len(each.ranks) * sum(each.sent.values()) for each in self.groups)

    def table(self) -> TableView:
        """Return a table with one row for each group of ranks."""
        rows = [
            (
                name_ranks(each.ranks),
                f"{each.operations:,}",
                _flops(each.flops),
                _time(each.seconds),
                _time(each.communicating),
                text_size(each.peak),
                shown_location(*each.peak_line[:2]) if each.peak_line[1] else "",
                text_size(each.kept),
                ", ".join(f"{text_size(size)} {kind}" for kind, size in sorted(each.sent.items())),
            )
            for each in self.groups
        ]
        headings = ("each of", "operations", "flops", "takes", "exchanges", "peak", "at", "kept", "sends")
        count = sum(len(each.ranks) for each in self.groups)
        caption = (
            f"{count:,} simulated ranks: {_time(self.seconds)} estimated, up to {text_size(self.peak)} on a rank, "
            f"{text_size(self.sent)} sent by all"
        )
        shown = [f"{shown_location(*line[:2])} {text_size(size)}" for line, size in list(self.lines.items())[:_SHOWN]]
        note = f"Sent by a rank, by line: {', '.join(shown)}" if shown else ""
        return TableView(headings, rows, caption, frozenset({1, 2, 3, 4, 5, 7}), note).without_empty_columns()


def _flops(count: int) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}" if count else ""


def _time(seconds: float) -> str:
    if not seconds:
        return ""
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} µs"
    )


class SimulatorInterface:
    """A simulated mesh and the results of a program on it. Created by `Simulator`."""

    def __init__(self, engine: SimulatedEngine, trace_path: str, group_workers: bool) -> None:
        self._engine = engine
        self._trace_path = trace_path
        self._group_workers = group_workers
        engine.shared["exit"] = self.write_trace

    @property
    def mesh(self) -> SimulatedMesh:
        """The simulated mesh."""
        return self._engine.mesh

    def report(self) -> SimulationReport:
        """Report the computation, memory and communication of each rank, since the beginning or the last `step`."""
        with self._engine.lock:
            self._engine.collect()
            return SimulationReport.of(self._engine.ledger)

    def step(self) -> tuple[float, float]:
        """End an iteration.

        Return its time (seconds) and the peak memory of a rank (MB). The next iteration begins at 0.
        """
        with self._engine.lock:
            report = self.report()
            self._engine.ledger.begin_again()
            return report.seconds, report.peak / 1e6

    def write_trace(self, path: str | None = None) -> str:
        """Write the timeline since the beginning or the last `step`, for ui.perfetto.dev. Return its path."""
        with self._engine.lock:
            self._engine.collect()
            path = self._trace_path if path is None else path
            write_trace(path, self._engine.ledger, self._group_workers)
            return path

    def display(self) -> None:
        """Show the report, as a table in a notebook or as text elsewhere."""
        getattr(builtins, "display", print)(self.report())


def Simulator(  # noqa: N802  # Monarch's name
    hosts: int,
    gpus: int,
    *,
    simulate_mode: Any = "simulate",
    trace_mode: Any = "stream_only",
    upload_trace: bool = False,
    trace_path: str = "trace.json",
    command_history_path: str | None = None,
    group_workers: bool = True,
    build_ir: bool = False,
    rates: SimulatedRates | None = None,
) -> SimulatorInterface:
    """Create a mesh of ``hosts * gpus`` ranks without processes, with dimensions ``host`` and ``gpu``.

    ```python
    sim = Simulator(hosts=32, gpus=8)
    with sim.mesh.activate():
        train_step()
    sim.report()          # memory, communication and estimated time of each rank
    sim.write_trace()     # for ui.perfetto.dev
    ```

    A program runs on it with shapes alone, including autograd, modules, optimizers, `reduce`, `to_mesh` and streams.
    Reads of values return zeros.

    Args:
        hosts, gpus: the number of hosts, and of ranks on each.
        trace_path: the path for `SimulatorInterface.write_trace` and ``mesh.exit()``.
        group_workers: show ranks that behave the same once in the trace.
        rates: the speed of ranks, for time estimates.
        simulate_mode, trace_mode: accepted as in Monarch: all modes simulate, and trace the streams of the ranks.

    Raises:
        ValueError: the number of ranks is invalid, or an option exists only in Monarch (`upload_trace`,
            `command_history_path`, `build_ir`).
    """
    for name, size in (("hosts", hosts), ("gpus", gpus)):
        if size < 1:
            raise ValueError(f"Simulator({name}={size}): at least 1")
    for name, given in (
        ("upload_trace", upload_trace),
        ("command_history_path", command_history_path),
        ("build_ir", build_ir),
    ):
        if given:
            raise ValueError(f"Simulator({name}={given!r}): there is no such thing here: leave it away")
    engine = SimulatedEngine({"host": hosts, "gpu": gpus}, rates or SimulatedRates(), hosts)
    return SimulatorInterface(engine, trace_path, group_workers)


def write_trace(path: str, ledger: Ledger, group_workers: bool) -> None:
    """Write the operations and the memory of each rank to a file.

    Args:
        group_workers: show ranks that behave the same once.
    """
    with written_whole(path, None) as file:
        file.write(b'{"displayTimeUnit": "ns", "traceEvents": [')
        separator = "\n"
        for event in _events(ledger, group_workers):
            file.write(f"{separator}{json.dumps(event)}".encode())
            separator = ",\n"
        file.write(b"\n]}\n")


def _events(ledger: Ledger, group_workers: bool) -> Iterator[dict[str, Any]]:
    shown: list[tuple[int, str, RankClass]] = []
    for each in ledger.classes:
        if group_workers:
            shown.append((min(each.ranks), name_ranks(sorted(each.ranks)), each))
        else:
            shown += [(rank, f"rank {rank}", each) for rank in each.ranks]
    for rank, name, each in sorted(shown, key=lambda item: item[0]):
        pid = rank + 1
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
        threads: dict[str, int] = {}
        for event in each.events:
            tid = threads.get(event.stream)
            if tid is None:
                tid = threads[event.stream] = len(threads) + 1
                name = f"stream {event.stream}"
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": event.name,
                "cat": "communication" if event.communicates else "compute",
                "ts": event.start * 1e6,
                "dur": event.duration * 1e6,
                "args": {"line": "{}:{} in {}".format(*event.line), "bytes": event.size},
            }
        for level in each.levels:
            yield {"ph": "C", "pid": pid, "name": "memory", "ts": level.time * 1e6, "args": {"bytes": level.size}}
