"""Read NumPy arrays and plain lists of numbers as arrays of blocks; see `blocks`."""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Sequence
from typing import Any

from monarch_kernel.debugger.model.readings import Contrast, Stats, shown, shown_pair
from monarch_kernel.debugger.rank.values.blocks import Array, Deadline, digest_of_block

#: A list of at least this many numbers is read as an array.
LONG = 64

_SMALLEST_NORM = 1e-15  # the square of a smaller number loses digits in single precision


def number_array(values: Sequence[Any]) -> NumberArray | None:
    """Convert a long list or tuple of floats only, or of integers only, to an array; None for any other."""
    if len(values) < LONG or type(values[0]) not in (int, float):
        return None
    kind = type(values[0])
    if not all(type(value) is kind for value in values):
        return None
    try:
        return NumberArray(array.array("d" if kind is float else "q", values), type(values).__name__)
    except OverflowError:  # integers beyond 64 bits
        return None


class NumberArray(Array):
    """Packed Python numbers.

    Args:
        numbers: packed as C doubles or 64-bit integers.
        name: the type name of their original container.
    """

    def __init__(self, numbers: array.array[Any], name: str) -> None:
        super().__init__((len(numbers),), numbers.itemsize)
        self._numbers = numbers
        self._name = name

    def facts(self) -> str:
        """Describe the container and the type of the numbers: `list of 1,000 float`."""
        return f"{self._name} of {self.size:,} {'float' if self._numbers.typecode == 'd' else 'int'}"

    def read(self, deadline: Deadline) -> None:
        """See `Array`."""
        view = memoryview(self._numbers).cast("B")
        step = self.block * self.itemsize
        digests: list[bytes] = []
        for start in range(0, len(view), step):
            deadline.check()
            digests.append(digest_of_block(view[start : start + step]))
        self.digests = b"".join(digests)
        if self._numbers.typecode == "q":
            self.stats = Stats(None, min(self._numbers), max(self._numbers))
            return
        fine = [number for number in self._numbers if math.isfinite(number)]
        nans = sum(map(math.isnan, self._numbers))
        infs = self.size - nans - len(fine)
        self.stats = Stats(math.hypot(*fine), min(fine, default=None), max(fine, default=None), nans, infs)

    def digest_now(self, block: int) -> bytes:
        """See `Array`."""
        return digest_of_block(self.piece(block * self.block, self.block))

    def piece(self, start: int, count: int) -> bytes:
        """See `Array`."""
        return self._numbers[start : start + count].tobytes()

    def contrast(self, start: int, other: bytes) -> Contrast:
        """See `Array`."""
        theirs = array.array(self._numbers.typecode, other)
        ours = self._numbers[start : start + len(theirs)]
        size = self.itemsize
        mine = ours.tobytes()
        where = [
            at for at in range(len(ours)) if mine[at * size : at * size + size] != other[at * size : at * size + size]
        ]
        return contrast_of([(ours[at], theirs[at]) for at in where], start + where[0] if where else 0, len(theirs))

    def sample(self, count: int) -> str:
        """See `Array`."""
        return f"[{', '.join(map(shown, self._numbers[:count]))}]"


class NumpyArray(Array):
    """A NumPy array of any type that does not hold Python objects.

    Args:
        values: the array; it is not written to.
    """

    def __init__(self, values: Any) -> None:
        super().__init__(values.shape, values.itemsize)
        self._values = values
        self._numpy: Any = sys.modules["numpy"]

    @property
    def block(self) -> int:
        """The number of elements per block."""
        return super().block if self.itemsize else 1

    def facts(self) -> str:
        """Describe element type and shape: `float32 [3, 4]`."""
        return f"{self._values.dtype.name if not self._values.dtype.names else self._values.dtype} {list(self.shape)}"

    def read(self, deadline: Deadline) -> None:
        """See `Array`."""
        digests: list[bytes] = []
        stats: list[Stats] = []
        with self._numpy.errstate(all="ignore"):
            for start in range(0, self.size, self.block):
                deadline.check()
                block = self._window(start, min(self.block, self.size - start))
                digests.append(digest_of_block(block.tobytes() if block.nbytes < 64 else block.view("u1").data))
                measured = self._measured(block)
                if measured is not None:
                    stats.append(measured)
        self.digests = b"".join(digests)
        self.stats = Stats.over(stats) if stats else None

    def _window(self, start: int, count: int) -> Any:
        """Return elements in row-major order, contiguous, in native byte order; copied only if necessary."""
        values = self._values
        if values.flags.c_contiguous:
            found = values.reshape(-1)[start : start + count]
        else:
            found = values.flat[start : start + count]  # copies only these elements
        if not found.dtype.isnative:
            found = found.astype(found.dtype.newbyteorder("="))
        return found.view(self._numpy.ndarray)

    def _measured(self, block: Any) -> Stats | None:
        numpy = self._numpy
        kind = block.dtype.kind
        if kind in "iub":
            return Stats(None, int(block.min()), int(block.max()))
        if kind not in "fc":
            return None
        if kind == "f" and block.itemsize >= 4:
            low, high, norm = float(block.min()), float(block.max()), math.sqrt(numpy.dot(block, block))
            fits = _SMALLEST_NORM < norm < math.inf or low == high == 0
            if fits and math.isfinite(low) and math.isfinite(high):
                return Stats(norm, low, high)
        # NaN or infinite elements, squares that do not fit the type, or a type for which NumPy is slow.
        wide = block.astype(numpy.complex128 if kind == "c" else numpy.float64)
        fine = wide[numpy.isfinite(wide)]
        nans = int(numpy.isnan(wide).sum())
        infs = len(wide) - nans - len(fine)
        largest = float(abs(fine).max()) if len(fine) else 0.0
        norm = largest * float(numpy.linalg.norm(fine / largest)) if largest else 0.0
        if kind == "c" or not len(fine):
            return Stats(norm, None, None, nans, infs)
        return Stats(norm, float(fine.min()), float(fine.max()), nans, infs)

    def digest_now(self, block: int) -> bytes:
        """See `Array`."""
        start = block * self.block
        return digest_of_block(self.piece(start, min(self.block, self.size - start)))

    def piece(self, start: int, count: int) -> bytes:
        """See `Array`."""
        return self._window(start, count).tobytes()

    def contrast(self, start: int, other: bytes) -> Contrast:
        """See `Array`."""
        numpy = self._numpy
        count = len(other) // self.itemsize
        ours = self._window(start, count)
        theirs = numpy.frombuffer(other, dtype=ours.dtype)
        raw = numpy.frombuffer(ours.tobytes(), "u1") != numpy.frombuffer(other, "u1")
        where = raw.reshape(count, self.itemsize).any(1).nonzero()[0]
        if not len(where):
            return Contrast(compared=count)
        first = int(where[0])
        texts = shown_pair(ours[first].item(), theirs[first].item())
        if ours.dtype.kind not in "biufc":
            return Contrast((start + first,), *texts, len(where), None, None, count)
        wide = numpy.complex128 if ours.dtype.kind == "c" else numpy.float64
        with numpy.errstate(all="ignore"):
            one, two = ours[where].astype(wide), theirs[where].astype(wide)
            gap = abs(one - two)
            scale = numpy.maximum(abs(one), abs(two))
            known = numpy.isfinite(gap)
            ratio = (gap / scale)[known & (scale > 0)]
        gap = gap[known]
        most = float(gap.max()) if len(gap) else None
        relative = float(ratio.max()) if len(ratio) else (0.0 if len(gap) else None)
        return Contrast((start + first,), *texts, len(where), most, relative, count)

    def sample(self, count: int) -> str:
        """See `Array`."""
        items = [shown(item) for item in self._window(0, min(count, self.size)).tolist()]
        return items[0] if not self.shape else f"[{', '.join(items)}]"


def contrast_of(pairs: Sequence[tuple[float, float]], first: int, compared: int) -> Contrast:
    """Compute the contrast of pairs of numbers that differ, the first of which is at position `first`."""
    if not pairs:
        return Contrast(compared=compared)
    most = relative = None
    for one, two in pairs:
        gap = abs(one - two)
        if math.isfinite(gap):
            scale = max(abs(one), abs(two))
            most = max(most or 0.0, float(gap))
            relative = max(relative or 0.0, gap / scale if scale else 0.0)
    return Contrast((first,), *shown_pair(*pairs[0]), len(pairs), most, relative, compared)
