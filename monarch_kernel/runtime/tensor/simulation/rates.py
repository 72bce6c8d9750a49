"""The speed of ranks for the time estimates of a simulation: `SimulatedRates`."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_kernel.runtime.tensor.wire import Reduction


@dataclass(frozen=True, slots=True)
class SimulatedRates:
    """Rates of one rank. The defaults are approximate data sheet values (H100, NVLink, 400 Gbit/s). Set measured ones.

    Attributes:
        flops: floating-point operations per second, of matrix products, convolutions and attention.
        memory: bytes per second that an operation reads and writes.
        link: bytes per second that a rank sends within its host; `network`: to other hosts.
        launch: the minimum duration of an operation (seconds).
        latency: the minimum duration of each step of a collective (seconds).
    """

    flops: float = 400e12
    memory: float = 3e12
    link: float = 300e9
    network: float = 40e9
    launch: float = 5e-6
    latency: float = 10e-6

    def operation(self, flops: int, moved: int) -> float:
        """Return the duration of an operation on one rank (seconds).

        Args:
            moved: the bytes that it reads and writes.
        """
        return max(self.launch, flops / self.flops, moved / self.memory)

    def transfer(self, sent: float, steps: int, within_host: bool) -> float:
        """Return the duration of an exchange in which a rank sends this many bytes in this many steps (seconds)."""
        return self.latency * steps + sent / (self.link if within_host else self.network)


def sent_in(how: Reduction, size: int) -> tuple[str, float, int]:
    """Return the data that a rank sends in a collective over `size` bytes: the bytes of a ring, in the steps of a tree.

    Returns:
        The usual name of the collective, the bytes that each rank sends, and the number of steps.
    """
    count = len(how.groups[0])
    if count == 1:
        return "nothing", 0.0, 0
    others, steps = count - 1, (count - 1).bit_length()
    if how.kind == "stack":
        if how.scatter:
            return "all-to-all", size * others / count, steps
        return ("gather", float(size), steps) if how.roots is not None else ("all-gather", float(size * others), steps)
    if how.scatter:
        return "reduce-scatter", size * others / count, steps
    if how.roots is not None:
        return "reduce", float(size), steps
    return "all-reduce", 2 * size * others / count, 2 * steps
