"""Read tensors as arrays of blocks: hash, measure and compare them on their device, without moving or copying them.

torch operations do all work, on a few blocks at a time. A device therefore reads its tensors itself, at the speed of
its memory, and sends only 16 bytes and three figures per block. On a CPU, a block stays in the cache. This module is
imported only when a value is a tensor, so torch is already imported.

The digest of a block is a pair of multilinear hashes modulo 2**64 (with fixed odd keys) over its 64-bit words, after a
bijective mixer was applied to each word. Without the mixer, changes in high bits only (signs) would collide too easily.
The digest does not withstand a search for collisions, which a debugger does not need. It depends only on the bytes:
equal tensors have equal digests on every device, whatever their strides.
"""

from __future__ import annotations

import ctypes
import math
import struct
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from monarch_kernel.debugger.model.readings import Contrast, Stats, shown, shown_pair
from monarch_kernel.debugger.rank.values.blocks import BLOCK_BYTES, Array, Deadline

#: The number of bytes that a device processes at once. It needs four times as much for intermediate results.
SLAB = 1 << 25
#: The maximum number of threads that read one large tensor on a CPU, if torch may use so many.
MOST_WORKERS = 8
#: How long to wait for a device to finish its work before its memory is read in its current state (seconds).
SETTLE = 1.0

_WORDS = BLOCK_BYTES // 8
_FLOATS = (torch.float32, torch.float64)
_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15, the odd integer nearest to 2**64 / golden ratio
_STAFFORD = (-4658895280553007687, -7723592293110705685)  # from the finalizer of SplitMix64
_SMALLEST_NORM = 1e-15  # the square of a smaller number loses digits in single precision
_SPANS_PER_WORKER = 256
#: The function of the OpenMP that torch has loaded; None if torch does not use OpenMP.
_set_threads: Any = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
_busy: dict[torch.device, float] = {}  # by device: the last time when it did not finish in time
_keys: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


class TensorArray(Array):
    """A strided tensor.

    Args:
        tensor: a tensor on any device. Its contents may change during the reading. It is never written to.
        needs_grad: whether it needs a gradient, which a detached tensor no longer shows.
        slab: the number of bytes to process at once; None for the default of its device.
    """

    kind = "tensor"

    def __init__(self, tensor: torch.Tensor, needs_grad: bool = False, slab: int | None = None) -> None:
        super().__init__(tensor.shape, tensor.element_size())
        self._tensor = tensor.detach()
        self._needs_grad = needs_grad
        self._slab = slab or (BLOCK_BYTES if tensor.device.type == "cpu" else SLAB)
        #: Whether its device was still computing when it was read.
        self.unsettled = False

    def facts(self) -> str:
        """Return element type, shape, kind of device unless it is the CPU, and whether it needs a gradient."""
        return facts_of(self._tensor, self._needs_grad)

    def read(self, deadline: Deadline) -> None:
        """See `Array`."""
        threads = torch.get_num_threads()
        with _aside(self._tensor.device) as settled:
            self.unsettled = not settled
            found = self._measured(deadline, threads)
            first = _numbers([each.hashes[0] for each in found])
            second = _numbers([each.hashes[1] for each in found])
            self.stats = self._stats(found, deadline)
        words = [word for pair in zip(first, second, strict=True) for word in pair]
        self.digests = struct.pack(f"<{len(words)}q", *words)

    def _measured(self, deadline: Deadline, threads: int) -> list[_Measured]:
        """Measure all blocks, in slabs, and return the results in order."""

        def measure(spans: Sequence[tuple[int, int]]) -> list[_Measured]:
            done: list[_Measured] = []
            with torch.no_grad(), _alone():
                scratch = torch.empty(2, _WORDS, dtype=torch.int64) if self._tensor.device.type == "cpu" else None
                for start, count in spans:
                    deadline.check()
                    rows = window(self._tensor, start, count).view(-1, min(self.block, count))
                    done.append(_Measured(rows, scratch if len(rows) == 1 else None))
            return done

        spans = self._spans()
        workers = min(MOST_WORKERS, threads, len(spans) // _SPANS_PER_WORKER)
        if self._tensor.device.type != "cpu" or workers < 2:
            return measure(spans)
        share = -(-len(spans) // workers)
        parts = [spans[at : at + share] for at in range(0, len(spans), share)]
        with ThreadPoolExecutor(workers, thread_name_prefix="monarch-debugger") as pool:
            return [each for part in pool.map(measure, parts) for each in part]

    def _spans(self) -> list[tuple[int, int]]:
        """Split the tensor into runs of whole blocks, and the last, shorter block. Return start and length of each."""
        whole = self.size // self.block * self.block
        step = max(1, self._slab // BLOCK_BYTES) * self.block
        spans = [(start, min(step, whole - start)) for start in range(0, whole, step)]
        return spans if whole == self.size else [*spans, (whole, self.size - whole)]

    def _stats(self, found: list[_Measured], deadline: Deadline) -> Stats | None:
        lows = _numbers([each.low for each in found if each.low is not None])
        highs = _numbers([each.high for each in found if each.high is not None])
        norms = _numbers([each.norm for each in found if each.norm is not None])
        if not lows:
            return None
        if not norms:
            return Stats(None, min(lows), max(highs))
        nans = infs = 0
        for at, (low, high, norm) in enumerate(zip(lows, highs, norms, strict=True)):
            fits = _SMALLEST_NORM < norm < math.inf or low == high == 0
            if fits and math.isfinite(low) and math.isfinite(high):
                continue
            deadline.check()  # NaN or infinite elements, or squares that do not fit the type
            start = at * self.block
            block = window(self._tensor, start, min(self.block, self.size - start))
            norms[at], lows[at], highs[at], more_nans, more_infs = _carefully(block)
            nans += more_nans
            infs += more_infs
        low, high = min(lows), max(highs)
        ordered = low <= high and not self._tensor.is_complex()
        return Stats(math.hypot(*norms), low if ordered else None, high if ordered else None, nans, infs)

    def digest_now(self, block: int) -> bytes:
        """See `Array`."""
        start = block * self.block
        with _aside(self._tensor.device):
            rows = window(self._tensor, start, min(self.block, self.size - start)).view(1, -1)
            return struct.pack("<2q", *(_numbers([word])[0] for word in _hashed(rows)))

    def piece(self, start: int, count: int) -> bytes:
        """See `Array`."""
        host = self._host(start, count)
        return ctypes.string_at(host.data_ptr(), host.numel() * self.itemsize)

    def _host(self, start: int, count: int) -> torch.Tensor:
        with _aside(self._tensor.device):
            return window(self._tensor, start, count).cpu()

    def contrast(self, start: int, other: bytes) -> Contrast:
        """See `Array`."""
        with _aside(self._tensor.device):
            return self._contrast(start, other)

    def _contrast(self, start: int, other: bytes) -> Contrast:
        count = len(other) // self.itemsize
        ours = window(self._tensor, start, count).cpu()
        theirs = torch.frombuffer(bytearray(other), dtype=torch.uint8).view(ours.dtype)
        differ = (_bytes(ours) != _bytes(theirs)).view(count, self.itemsize).any(1)
        where = differ.nonzero().flatten()
        if not len(where):
            return Contrast(compared=count)
        first = int(where[0])
        texts = shown_pair(_item(ours, first), _item(theirs, first))
        one, two = _wide(ours)[where], _wide(theirs)[where]
        gap = (one - two).abs()
        known = gap.isfinite()
        scale = torch.maximum(one.abs(), two.abs())
        ratio = (gap / scale)[known & (scale > 0)]
        gap = gap[known]
        most = float(gap.max()) if len(gap) else None
        relative = float(ratio.max()) if len(ratio) else (0.0 if len(gap) else None)
        return Contrast((start + first,), *texts, len(where), most, relative, count)

    def sample(self, count: int) -> str:
        """See `Array`."""
        host = self._host(0, min(count, self.size))
        items = [shown(_item(host, at)) for at in range(len(host))]
        return items[0] if not self.shape else f"[{', '.join(items)}]"


class _Measured:
    """Hashes, smallest and largest element, and norm of every row; None for figures that its type does not have."""

    def __init__(self, rows: torch.Tensor, scratch: torch.Tensor | None) -> None:
        self.hashes = _hashed(rows, scratch)
        self.low = self.high = self.norm = None
        numbers = _measurable(rows, scratch)
        if numbers is None:
            return
        self.low, self.high = torch.amin(numbers, 1), torch.amax(numbers, 1)
        if rows.is_floating_point() or rows.is_complex():
            self.norm = torch.linalg.vector_norm(numbers, dim=1)


def facts_of(tensor: torch.Tensor, needs_grad: bool = False) -> str:
    """Return the facts of any tensor, as `TensorArray.facts` does."""
    parts = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"]
    if tensor.device.type != "cpu":
        parts.append(tensor.device.type)
    if needs_grad:
        parts.append("needs grad")
    return ", ".join(parts)


def window(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return `count` elements in row-major order as a contiguous vector: a view if possible, otherwise a copy."""
    return _window(tensor, start, count).resolve_conj().resolve_neg()


def _window(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)[start : start + count]
    if tensor.dim() == 1:
        return tensor[start : start + count].contiguous()
    row = tensor.numel() // tensor.shape[0]
    first, end = start // row, start + count
    if end <= (first + 1) * row:
        return _window(tensor[first], start - first * row, count)
    parts: list[torch.Tensor] = []
    if start > first * row:
        parts.append(_window(tensor[first], start - first * row, (first + 1) * row - start))
        first += 1
    whole = end // row
    if whole > first:
        parts.append(tensor[first:whole].reshape(-1).contiguous())
    if end > whole * row:
        parts.append(_window(tensor[whole], 0, end - whole * row))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous vector as bytes."""
    return tensor.view(torch.uint8)


def _hashed(rows: torch.Tensor, scratch: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute two hashes of every row.

    Args:
        scratch: for a single row on a CPU, two vectors of words to compute in; allocating memory for every block would
            cost more than the computation.
    """
    words = _as_words(rows)
    first, second = (keys[: words.shape[1]] for keys in _keys_on(words.device))
    if scratch is None:
        mixed, high = torch.empty_like(words), torch.empty_like(words)
    else:
        mixed, high = scratch[:, None, : words.shape[1]].unbind()
    torch.mul(words, _MIX, out=mixed)
    mixed.bitwise_xor_(torch.bitwise_right_shift(mixed, 32, out=high)).mul_(_MIX)
    mixed.bitwise_xor_(torch.bitwise_right_shift(mixed, 29, out=high))
    if scratch is not None:
        return torch.dot(mixed[0], first).view(1), torch.dot(mixed[0], second).view(1)
    return torch.mul(mixed, first, out=high).sum(1), mixed.mul_(second).sum(1)


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """View the same bytes as 64-bit integers. Rows are padded with zeros."""
    width = rows.shape[1] * rows.element_size()
    if width % 8 == 0:
        if rows.storage_offset() * rows.element_size() % 8:
            rows = rows.clone()  # a view as larger elements must be aligned
        return rows.view(torch.int64)
    padded = torch.zeros(len(rows), (width + 7) // 8 * 8, dtype=torch.uint8, device=rows.device)
    padded[:, :width] = rows.view(torch.uint8)
    return padded.view(torch.int64)


def _keys_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of both hashes: the first outputs of SplitMix64, made odd; the same on every device."""
    keys = _keys.get(device)
    if keys is None:
        state = torch.arange(1, 2 * _WORDS + 1, dtype=torch.int64, device=device) * _MIX
        state = (state ^ _shifted(state, 30)) * _STAFFORD[0]
        state = (state ^ _shifted(state, 27)) * _STAFFORD[1]
        state = (state ^ _shifted(state, 31)) | 1
        keys = _keys[device] = (state[:_WORDS].clone(), state[_WORDS:].clone())
    return keys


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shift logically to the right."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _measurable(rows: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return `rows` as a type that torch can compare and sum; None if there is none. `scratch` is as for `_hashed`."""
    kind = rows.dtype
    if kind in _FLOATS:
        return rows
    if kind.is_complex:
        return torch.view_as_real(rows).flatten(1)
    try:
        if kind.is_floating_point:
            if scratch is None or rows.numel() > 2 * scratch.numel():
                return rows.float()
            return scratch.view(-1).view(torch.float32)[: rows.numel()].view_as(rows).copy_(rows)
        if kind is torch.bool:
            return rows.to(torch.uint8)
        if kind in (torch.uint16, torch.uint32):
            return rows.to(torch.int64)
        return rows.double() if kind is torch.uint64 else rows
    except (RuntimeError, NotImplementedError):  # packed types, which only special kernels can read
        return None


def _carefully(block: torch.Tensor) -> tuple[float, float, float, int, int]:
    """Return norm, smallest and largest of the finite elements of a block, and the numbers of NaN and infinite ones."""
    numbers = _wide(block)
    nan = numbers.isnan()
    infinite = numbers.isinf() & ~nan
    fine = numbers[~(nan | infinite)]
    if not len(fine):
        return 0.0, math.inf, -math.inf, int(nan.sum()), int(infinite.sum())
    size = fine.abs()
    largest = float(size.max())
    norm = largest * float(torch.linalg.vector_norm(size / largest)) if largest else 0.0
    real = fine.real if fine.is_complex() else fine
    return norm, float(real.min()), float(real.max()), int(nan.sum()), int(infinite.sum())


def _wide(block: torch.Tensor) -> torch.Tensor:
    """Convert `block` to the widest type of its kind."""
    if block.dtype.is_complex:
        return block.to(torch.complex128)
    if block.dtype.is_floating_point and block.dtype not in _FLOATS:
        block = block.float()
    return block.double()


def _numbers(parts: list[torch.Tensor]) -> list[Any]:
    """Convert concatenated vectors to Python numbers. This is the only place that waits for a device."""
    return torch.cat(parts).tolist() if parts else []


def _item(vector: torch.Tensor, at: int) -> object:
    try:
        return vector[at].item()
    except (RuntimeError, NotImplementedError):
        return bytes(_bytes(vector[at : at + 1]).tolist()).hex()


@contextmanager
def _alone() -> Generator[None]:
    """Run torch on the calling thread only: passing a block to other threads takes longer than processing it.

    This sets OpenMP's number of threads for the calling thread. It does not set torch's, which applies to the whole
    process.
    """
    threads = torch.get_num_threads()  # also sets the number for a thread that has not used torch before
    if _set_threads is None or threads == 1:
        yield
        return
    _set_threads(1)
    try:
        yield
    finally:
        _set_threads(threads)


@contextmanager
def _aside(device: torch.device) -> Generator[bool]:
    """Work on a tensor without disturbing other work. Yields the result of `_settled`."""
    with torch.no_grad(), _alone(), _settled(device) as settled:
        yield settled


@contextmanager
def _settled(device: torch.device) -> Generator[bool]:
    """Work on a device in parallel to its other work. Yields whether previously queued work has finished.

    On CUDA, this uses a separate stream. The default stream may wait for a collective that never ends. The debugger
    must find the reason, so it must not wait for that collective.
    """
    if device.type != "cuda":
        yield True
        return
    done = torch.cuda.Event()
    done.record(torch.cuda.default_stream(device))
    now = time.monotonic()
    # If the wait for the first of many tensors timed out, the others do not wait again.
    end = now + (SETTLE if now - _busy.get(device, -math.inf) > 10 * SETTLE else 0.0)
    while not (settled := done.query()) and time.monotonic() < end:
        time.sleep(0.001)
    if not settled and end > now:
        _busy[device] = end
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield settled


# Split special tensors into the plain strided tensors that they consist of.
#
# These are sharded, sparse, quantized, nested and wrapped tensors, and those without data. No function here starts or
# waits for a collective: of a sharded tensor, only this rank's shard is read.


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor: a plain tensor, or a description only.

    Attributes:
        path: the path from the tensor to the part.
        tensor: the strided, detached tensor; None if there is only `text`.
        facts: the facts that must be equal on all ranks; "" for the facts of the tensor itself.
        text: the text shown with it; for a piece without a tensor, its description.
        part: the shard of a sharded tensor.
        nested: whether the piece has to be taken apart in turn.
        unread: whether `text` describes why it cannot be read.
    """

    path: str
    tensor: torch.Tensor | None = None
    facts: str = ""
    text: str = ""
    part: str = ""
    nested: bool = False
    unread: bool = False


def pieces_of(value: torch.Tensor) -> list[Piece]:
    """Return the plain tensors that `value` consists of; usually only itself."""
    if torch.nn.parameter.is_lazy(value):
        return [Piece("", text=f"{type(value).__name__}, not initialized yet")]
    kinds = {base.__name__ for base in type(value).__mro__}
    if "AsyncCollectiveTensor" in kinds:
        return [Piece("", text="the result of a collective that has not been waited for yet", unread=True)]
    if "DTensor" in kinds or (hasattr(value, "to_local") and hasattr(value, "placements")):
        return _sharded(value)
    if value.is_meta or "FakeTensor" in kinds:
        return [Piece("", text=f"{facts_of(value, value.requires_grad)}, no data")]
    if hasattr(value, "__tensor_flatten__"):
        return _wrapped(value)
    if value.is_nested:
        inner = value.detach().unbind()
        return [
            _words("nested", value),
            *(Piece(f".unbind()[{at}]", each, nested=True) for at, each in enumerate(inner)),
        ]
    if value.layout is not torch.strided:
        return _sparse(value)
    if value.is_quantized:
        return _quantized(value)
    plain = value.detach()
    return [Piece("", plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor))]


def _words(kind: str, value: torch.Tensor, more: str = "") -> Piece:
    text = f"{kind} {str(value.dtype).removeprefix('torch.')}"
    text += "" if value.is_nested else f" {list(value.shape)}"
    return Piece(" (kind)", text=f"{text}{more}{', needs grad' if value.requires_grad else ''}")


def _sharded(value: Any) -> list[Piece]:
    local: torch.Tensor = value.to_local()
    place = value.device_mesh.get_coordinate()
    parts = [
        f"{placement}" if place is None else f"{placement} {place[at]} of {value.device_mesh.size(at)}"
        for at, placement in enumerate(value.placements)
        if not placement.is_replicate()
    ]
    placements = ", ".join(map(str, value.placements))
    facts = f"{facts_of(value, value.requires_grad)}, {type(value).__name__}({placements})"
    if "AsyncCollectiveTensor" in {base.__name__ for base in type(local).__mro__}:
        return [Piece("", text=f"{facts}, the result of a collective that has not been waited for yet", unread=True)]
    note = f"local {list(local.shape)}" if local.shape != value.shape else ""
    return [Piece("", local.detach(), facts, note, ", ".join(parts))]


def _wrapped(value: Any) -> list[Piece]:
    """Split a Python tensor class that wraps other tensors and names them, by the protocol of `torch.compile`."""
    names, _context = value.__tensor_flatten__()
    inner = [Piece(f".{name}", getattr(value, name), nested=True) for name in names]
    return [_words(type(value).__name__, value), *inner]


def _sparse(value: torch.Tensor) -> list[Piece]:
    value, given = value.detach(), value
    kind = str(value.layout).removeprefix("torch.")
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        inner = {"indices": value.indices(), "values": value.values()}
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        inner = {name: getattr(value, name)() for name in ("crow_indices", "col_indices", "values")}
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        inner = {name: getattr(value, name)() for name in ("ccol_indices", "row_indices", "values")}
    else:
        return [Piece("", value.to_dense(), f"{facts_of(given, given.requires_grad)}, {kind}")]
    more = f", elements stored: {inner['values'].shape[0]:,}"
    return [_words(kind, given, more), *(Piece(f".{name}()", each) for name, each in inner.items())]


def _quantized(value: torch.Tensor) -> list[Piece]:
    facts = facts_of(value)
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        facts += f", scale {value.q_scale():g}, zero point {value.q_zero_point()}"
        return [Piece("", value.int_repr(), facts)]
    scales = [
        Piece(".q_per_channel_scales()", value.q_per_channel_scales()),
        Piece(".q_per_channel_zero_points()", value.q_per_channel_zero_points()),
    ]
    return [Piece("", value.int_repr(), facts), *scales]
