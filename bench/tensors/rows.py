"""The measured metrics, and their bars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OURS, MONARCH, SPMD = "ours", "torchmonarch", "spmd"


@dataclass(frozen=True)
class TensorRow:
    """One line of the table for each number of ranks.

    Attributes:
        metric: its key in the results, without the ranks.
        label: as shown.
        beside: the peer that it is compared with.
        most: ours / theirs must be at most this.
        least: ours / theirs must be at least this.
        own: ours must be below this, in the unit of the metric.
        faster: the metric of ours that this one must beat, and by which factor.
        bar_at: the only number of ranks for which the bar applies; None: all.
    """

    metric: str
    label: str
    beside: str = MONARCH
    most: float | None = None
    least: float | None = None
    own: float | None = None
    faster: tuple[str, float] | None = None
    bar_at: int | None = None

    def verdict(self, ranks: int, value: Callable[[str, str], float | None]) -> str:
        """Render the bars, and whether they are met: "<= 0.25 ok", "own < 15 MISS"; "?": not measured.

        Args:
            ranks: the number of ranks of the line.
            value: returns the median of (peer, metric) with that many ranks; None if it was not measured.
        """
        if self.bar_at not in (None, ranks):
            return ""
        ours, theirs = value(OURS, self.metric), value(self.beside, self.metric)
        ratio = None if ours is None or not theirs else ours / theirs
        said: list[str] = []
        if self.most is not None:
            said.append(f"<= {self.most:g} {_mark(ratio, lambda r, bar=self.most: r <= bar)}")
        if self.least is not None:
            said.append(f">= {self.least:g} {_mark(ratio, lambda r, bar=self.least: r >= bar)}")
        if self.own is not None:
            said.append(f"own < {self.own:g} {_mark(ours, lambda v, bar=self.own: v < bar)}")
        if self.faster is not None:
            metric, times = self.faster
            slow = value(OURS, metric)
            speedup = None if slow is None or not ours else slow / ours
            said.append(f"{times:g} x eager {_mark(speedup, lambda s: s >= times)}")
        return ", ".join(said)


def _mark(value: float | None, met: Callable[[float], bool]) -> str:
    return "?" if value is None else "ok" if met(value) else "MISS"


ROWS = [
    TensorRow("start_s", "start, and the first fetch (s)", most=0.25, bar_at=8),
    TensorRow("ops_per_s", "operations/s, until the last has run", least=50),
    TensorRow("coalesced_per_s", "  same, inside coalescing()"),
    TensorRow("op_all_cpu_us", "  CPU of all processes for one (µs)"),
    TensorRow("op_cpu_us", "  controller's CPU for one (µs)", own=15),
    TensorRow("fetch_us", "fetch (µs)", most=0.35),
    TensorRow("fetch_p99_us", "  same, p99 (µs)"),
    TensorRow("fetch_cpu_us", "  same, CPU of all processes (µs)"),
    TensorRow("op_fetch_us", "an operation, then fetch (µs)", most=0.35),
    TensorRow("step_us", "MLP + SGD step of 33 operations (µs)", most=0.04, bar_at=8),
    TensorRow("step_cpu_us", "  same, CPU of all processes (µs)"),
    TensorRow("step_adamw_us", "MLP + AdamW step (µs)"),
    TensorRow("replay_us", "replay of 50 operations, until it has run (µs)", most=0.05, bar_at=8),
    TensorRow("replay_cpu_us", "  same, CPU of all processes (µs)"),
    TensorRow("replay_call_us", "  the call alone (µs)", most=0.05, bar_at=8),
    TensorRow("replay_step_us", "replay of the MLP + SGD step (µs)", faster=("step_us", 5)),
    TensorRow("replay_step_cpu_us", "  same, CPU of all processes (µs)", faster=("step_cpu_us", 5)),
    TensorRow("dtensor_add_us", "DTensor addition, 64 x 64 (µs)", beside=SPMD, most=1.2),
    TensorRow("dtensor_add_cpu_us", "  same, CPU of all processes (µs)", beside=SPMD),
    TensorRow("dtensor_matmul_us", "DTensor matmul, 256 x 256 (µs)", beside=SPMD, most=1.2),
    TensorRow("dtensor_matmul_cpu_us", "  same, CPU of all processes (µs)", beside=SPMD),
    TensorRow("allreduce_GBps", "1 GB all-reduced by gloo (GB/s)", beside=SPMD, least=0.95),
    TensorRow("allreduce_cpu_s", "  same, CPU of all processes (s)", beside=SPMD),
    TensorRow("death_waiting_ms", "SIGKILL until a fetch that waits fails (ms)", own=50),
    TensorRow("death_waiting_most_ms", "  the longest (ms)"),
    TensorRow("death_issuing_ms", "SIGKILL until an operation fails (ms)", own=50),
    TensorRow("heal_s", "heal from a snapshot (s)", own=1),
    TensorRow("heal_most_s", "  the longest (s)"),
    TensorRow("heal_differing", "  tensors of the state that are not as they were", own=1),
]
