"""Summaries of tensors that compare shards with a whole without gathering them.

`summarize` reads a tensor once, on its device, and returns figures that add up over shards: the sum of squares, the
largest magnitude, the number of NaN and infinite elements, and a projection on a fixed random tensor. That tensor is an
outer product of one vector per dimension, so each shard computes its part with its slices of the vectors, and the
projection of the whole is the sum of the projections of its shards. A hash of the bytes shows exact equality.

Sums in single precision are accurate to about 4e-7 times the tensor's norm. `Placement` describes which part of a
global tensor a rank has. It comes from DTensor (tensor parallelism, FSDP2) or from patterns of names (`Shard`).
"""

from __future__ import annotations

import base64
import hashlib
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: Bytes that are read at once on a CPU. They stay in a core's cache.
BLOCK_BYTES = 1 << 19

_WORDS = BLOCK_BYTES // 8
_MODULUS = (1 << 64) - 1
_POLYNOMIAL = 0x9E3779B97F4A7C15
_STEADY = 1e-15  # squares of a smaller norm lose digits in single precision
_ROW = 1024
_LONG = 1 << 12  # single precision loses digits in longer sums
_SEED = 0x5EED


# -- placements ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """The part of a global tensor that this rank has.

    Attributes:
        global_shape: the shape of the whole.
        offsets: the index of the part's first element in each dimension.
        partial: whether the whole is the sum of the ranks' tensors, which have all its elements.
        replicas: how many ranks have the same part; 0 if unknown.
        is_pending: whether the ranks' tensors are no plain terms yet, as those of an embedding whose rows are sharded:
            other ranks' rows are masked only while they are summed.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    partial: bool = False
    replicas: int = 0
    is_pending: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-compatible data."""
        return {
            "global_shape": list(self.global_shape),
            "offsets": list(self.offsets),
            "partial": self.partial,
            "replicas": self.replicas,
            **({"is_pending": True} if self.is_pending else {}),
        }

    def indices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return where in the whole tensor a part of this shape lies."""
        return tuple(slice(start, start + length) for start, length in zip(self.offsets, shape, strict=True))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Placement:
        """Read what `to_dict` returned."""
        places = tuple(data["global_shape"]), tuple(data["offsets"])
        return cls(*places, data["partial"], data["replicas"], data.get("is_pending", False))


@dataclass(frozen=True, slots=True)
class Shard:
    """A split of a tensor along one dimension over the ranks of a group, in equal parts or as `torch.chunk` splits.

    Attributes:
        dim: the dimension; negative ones count from the last.
        ranks: the global ranks of the group in the order of their parts. By default, those of all groups of this size
            (`size`), one after the other: with 8 ranks and `size=2`, ranks 0 and 1, 2 and 3, and so on.
        size: the number of parts; by default, the whole world.
        length: the global length of the dimension if the parts are uneven; by default, the local length times `size`.
    """

    dim: int
    ranks: tuple[int, ...] | None = None
    size: int | None = None
    length: int | None = None

    def place(self, shape: Sequence[int], rank: int, world_size: int) -> Placement:
        """Return the placement of a local tensor. Raises ValueError if the tensor cannot be split in this way."""
        dim = self.dim + len(shape) if self.dim < 0 else self.dim
        if not 0 <= dim < len(shape):
            raise ValueError(f"Shard({self.dim}) does not fit a tensor with {len(shape)} dimensions")
        size = len(self.ranks) if self.ranks is not None else self.size or world_size
        if self.ranks is not None:
            if rank not in self.ranks:
                raise ValueError(f"rank {rank} is not one of the ranks {list(self.ranks)} of Shard({self.dim})")
            part = self.ranks.index(rank)
        else:
            part = rank % size
        length = self.length if self.length is not None else shape[dim] * size
        offset = part * -(-length // size) if self.length is not None else part * shape[dim]
        if offset + shape[dim] > length:
            raise ValueError(f"part {part} of {size} does not have {shape[dim]} of {length} elements")
        whole, offsets = list(shape), [0] * len(shape)
        whole[dim], offsets[dim] = length, offset
        return Placement(tuple(whole), tuple(offsets), replicas=max(1, world_size // size))


@dataclass(frozen=True, slots=True)
class Partial:
    """A tensor whose whole is the sum over ranks."""

    def place(self, shape: Sequence[int], rank: int, world_size: int) -> Placement:
        """Return the placement of a local tensor."""
        return Placement(tuple(shape), (0,) * len(shape), partial=True)


@dataclass(frozen=True, slots=True)
class Replicate:
    """A tensor that is equal on all ranks."""

    def place(self, shape: Sequence[int], rank: int, world_size: int) -> Placement:
        """Return the placement of a local tensor."""
        return Placement(tuple(shape), (0,) * len(shape), replicas=world_size)


Split = Shard | Partial | Replicate


def check_placements(placements: Mapping[str, Split]) -> dict[str, Split]:
    """Return placements by pattern of names. Raises TypeError with the pattern whose value is none."""
    for pattern, split in placements.items():
        if not isinstance(split, Shard | Partial | Replicate):
            raise TypeError(
                f"placements[{pattern!r}] is {split!r}: give Shard(DIM), Replicate() or Partial() "
                "of monarch_kernel.numerics.summaries"
            )
    return dict(placements)


class Placements:
    """Placements of tensors by name.

    Args:
        patterns: by pattern of names as in `fnmatch`: `"*.wq.weight"` for a parameter with its gradients and update,
            `"*.wq:output"` and `"*.wq:input:0"` for tensors of a module's call with their gradients.
        rank, world_size: of this process.
    """

    def __init__(self, patterns: Mapping[str, Split] | None, rank: int, world_size: int) -> None:
        self._patterns = check_placements(patterns or {})
        self._rank = rank
        self._world_size = world_size
        self.unused = set(self._patterns)
        self._known: dict[str, tuple[str, Split] | None] = {}

    def of(self, name: str, tensor: torch.Tensor) -> Placement | None:
        """Return the placement of a tensor, of a DTensor its own; None if it is not known."""
        own = placement_of(tensor)
        if own is not None:
            return own
        split = self.split_of(name)
        if split is None:
            return None
        try:
            return split.place(tensor.shape, self._rank, self._world_size)
        except ValueError as error:
            pattern = next(each for each, value in self._patterns.items() if value is split)
            raise ValueError(f"placement {pattern!r} of {name}: {error}") from None

    def split_of(self, name: str) -> Split | None:
        """Return the split of the first pattern that fits a name; None if there is none."""
        if name not in self._known:
            matching = (each for each in self._patterns.items() if fnmatchcase(name, each[0]))
            self._known[name] = next(matching, None)
        found = self._known[name]
        if found is None:
            return None
        self.unused.discard(found[0])
        return found[1]


def placement_of(tensor: torch.Tensor) -> Placement | None:
    """Return the placement of a DTensor; None for other tensors."""
    found = _as_dtensor(tensor)
    if found is None:
        return None
    from torch.distributed.tensor import Partial as Term
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = found.device_mesh, found.placements
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    partial = any(each.is_partial() for each in placements)
    is_pending = any(each.is_partial() and not (type(each) is Term and each.reduce_op == "sum") for each in placements)
    replicas = math.prod(mesh.size(at) for at, each in enumerate(placements) if each.is_replicate())
    offsets = tuple(min(offset, length) for offset, length in zip(offsets, tensor.shape, strict=True))
    return Placement(tuple(tensor.shape), offsets, partial, replicas, is_pending)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank has, without waiting for others."""
    tensor = tensor.detach()
    found = _as_dtensor(tensor)
    if found is not None:
        tensor = found._local_tensor
    wait = getattr(tensor, "wait", None)  # an AsyncCollectiveTensor: its collective was already called
    return wait() if wait is not None and type(tensor).__name__ == "AsyncCollectiveTensor" else tensor


def _as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """Return the tensor if it is a DTensor. Does not load that class."""
    if "torch.distributed.tensor" not in sys.modules or type(tensor) is torch.Tensor:
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


# -- summaries ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a local tensor.

    Attributes:
        shape: the local shape.
        dtype: the element type, such as "float32".
        sum_of_squares: over finite elements.
        maximum: the largest magnitude of finite elements; 0 if there are none.
        nonfinite: the number of NaN and infinite elements.
        hash: 16 hexadecimal digits. Equal tensors have equal hashes. Different ones have different hashes, except with
            a probability of about 2**-31, or if they differ in nothing but the signs of some elements, which the
            projection shows.
        projection: the sum over finite elements of element times the fixed random tensor at its global index.
    """

    shape: tuple[int, ...]
    dtype: str
    sum_of_squares: float
    maximum: float
    nonfinite: int
    hash: str
    projection: float


def summarize(tensor: torch.Tensor, placement: Placement | None = None) -> Summary:
    """Summarize the local part of a tensor. Reads it once; calls no collective.

    Args:
        tensor: any strided tensor; of a DTensor, its local part.
        placement: which part of a global tensor it is; by default, that of a DTensor, else the whole.
    """
    if placement is None:
        placement = placement_of(tensor)
    local = local_of(tensor)
    offsets = placement.offsets if placement is not None else (0,) * local.dim()
    with torch.no_grad(), _without_modes():
        return _summarize(_dense(local), offsets)


def _without_modes() -> Any:
    """Hide the operations from dispatch modes of the program, such as counters of operations."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return tensor.resolve_conj().resolve_neg().contiguous()


def _summarize(tensor: torch.Tensor, offsets: Sequence[int]) -> Summary:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    digest = hash_of(tensor)
    numbers = _numbers(tensor)
    if tensor.is_complex():  # the parts are one more dimension
        offsets = (*offsets, 0)
    if not numbers.numel():
        return Summary(shape, dtype, 0.0, 0.0, 0, digest, 0.0)
    squares, largest, projection = _figures(numbers, offsets)
    nonfinite = 0
    if not math.isfinite(largest) or not math.isfinite(squares) or 0 < largest < _STEADY:
        # NaN or infinite elements, or squares that single precision cannot represent
        finite = torch.isfinite(numbers)
        nonfinite = numbers.numel() - int(finite.sum())
        wide = torch.where(finite, numbers, 0).double()
        squares, largest, projection = _figures(wide, offsets)
    return Summary(shape, dtype, squares, largest, nonfinite, digest, projection)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in a type that torch computes with: single precision, or double where that loses digits."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    if tensor.is_floating_point() and tensor.element_size() <= 2:
        return tensor.float()
    return tensor.double()


def _figures(numbers: torch.Tensor, offsets: Sequence[int]) -> tuple[float, float, float]:
    """Return sum of squares, largest magnitude and projection of a contiguous tensor with elements."""
    on_cpu = numbers.device.type == "cpu"
    inner, outer = _vectors(tuple(offsets), numbers.shape, numbers.dtype, numbers.device)
    rows = numbers.view(-1, len(inner))
    step = max(1, BLOCK_BYTES // (len(inner) * numbers.element_size())) if on_cpu else len(rows)
    norms: list[torch.Tensor] = []
    bounds: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for part in rows.split(step):
        if len(inner) <= _LONG:
            norms.append(torch.linalg.vector_norm(part, dim=1))
            sums.append(torch.mv(part, inner))
        else:
            norms.append(_norms(part))
            columns = zip(part.split(_LONG, dim=1), inner.split(_LONG), strict=True)
            sums.append(torch.stack([torch.mv(*each).double() for each in columns]).sum(0))
        bounds.extend(torch.aminmax(part))
    lengths = (norms[0] if len(norms) == 1 else torch.cat(norms)).double()
    whole = (sums[0] if len(sums) == 1 else torch.cat(sums)).double()
    for vector in outer:
        whole = whole.view(-1, len(vector)) @ vector
    squares = torch.dot(lengths, lengths)
    if on_cpu and len(bounds) == 2:
        return squares.item(), max(abs(bounds[0].item()), abs(bounds[1].item())), whole.item()
    found = torch.stack([squares, torch.stack(bounds).abs().amax().double(), whole.view(())]).tolist()
    return found[0], found[1], found[2]


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """Return norms that add up to those of long rows: single precision loses digits in a long sum."""
    flat = rows.reshape(-1)
    whole = len(flat) // _ROW * _ROW
    parts = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    return torch.cat([parts, torch.linalg.vector_norm(flat[whole:]).reshape(1)])


@lru_cache(maxsize=512)
def _vectors(
    offsets: tuple[int, ...], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the product of the random vectors of the innermost dimensions, and the others, innermost first."""
    spans = zip(offsets, shape, strict=True)
    vectors = [_vector(dim, offset, length) for dim, (offset, length) in enumerate(spans)]
    inner = torch.ones(1, dtype=torch.float64)
    while vectors and (len(inner) < _ROW // 4 or len(inner) * len(vectors[-1]) <= _ROW):
        inner = torch.outer(vectors.pop(), inner).flatten()
    return inner.to(device, dtype), [vector.to(device) for vector in reversed(vectors)]


def _vector(dim: int, offset: int, length: int) -> torch.Tensor:
    """Return a slice of the random vector of a dimension: magnitudes from 0.5 to 1.5 with random signs, in float64.

    An element depends only on the dimension and its index (SplitMix64), on every machine and version.
    """
    index = torch.arange(offset, offset + length, dtype=torch.int64)
    bits = (index + 1) * _signed(_POLYNOMIAL) + _signed((_SEED + dim) * 0xBF58476D1CE4E5B9 & _MODULUS)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ _shifted(bits, shift)) * _signed(factor)
    bits ^= _shifted(bits, 31)
    magnitude = _shifted(bits, 11).double() / (1 << 53) + 0.5
    return torch.where(bits & 1 == 0, magnitude, -magnitude)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def generator_states() -> dict[str, bytes]:
    """Return the states of the random generators of torch, Python and NumPy by name."""
    states = {"torch.cpu": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        states[f"torch.cuda:{device}"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    states["python"] = repr(random.getstate()).encode()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = f"{kind} {rest} {base64.b64encode(keys.tobytes()).decode()}".encode()
    return states


def generator_summaries() -> Iterator[tuple[str, torch.Tensor, Summary]]:
    """Yield the state of each random generator: its name, its bytes, and their summary, which is a hash alone."""
    for name, state in generator_states().items():
        digest = hashlib.blake2b(state, digest_size=8).hexdigest()
        yield (
            name,
            torch.frombuffer(bytearray(state), dtype=torch.uint8),
            Summary((len(state),), "uint8", 0.0, 0.0, 0, digest, 0.0),
        )


def perturbed(tensor: torch.Tensor, units: int) -> torch.Tensor:
    """Return a floating-point tensor with each element moved by units in the last place, in fixed random directions."""
    local = local_of(tensor)
    generator = torch.Generator().manual_seed(units)
    signs = (torch.rand(local.shape, generator=generator) < 0.5).to(local.device)
    factor = 1 + torch.where(signs, 1.0, -1.0).to(local.dtype) * (abs(units) * torch.finfo(local.dtype).eps)
    return tensor * factor


# -- hashes ------------------------------------------------------------------------------------------


def hash_of(tensor: torch.Tensor) -> str:
    """Return a hash of the bytes of a contiguous tensor, computed on its device.

    It is multilinear over 64-bit words, modulo 2**64, with fixed odd keys. It does not resist a search for collisions.
    """
    value = tensor.numel() * tensor.element_size()
    data = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    wide = data.element_size() == 8
    per_word = 8 // data.element_size()
    whole = len(data) // per_word * per_word
    words = data[:whole]
    if words.dtype != torch.int64:
        words = (words if words.storage_offset() % per_word == 0 else words.clone()).view(torch.int64)
    keys = _keys(data.device)
    parts = [_hash_words(part, keys, wide) for part in words.split(_WORDS)] if whole else []
    for part in parts if data.device.type == "cpu" or not parts else torch.stack(parts).tolist():
        value = (value * _POLYNOMIAL + int(part)) & _MODULUS
    tail = data[whole:]
    if len(tail):
        value ^= int.from_bytes(hashlib.blake2b(bytes(tail.view(torch.uint8).tolist()), digest_size=8).digest(), "big")
    return f"{value:016x}"


def _hash_words(words: torch.Tensor, keys: torch.Tensor, wide: bool) -> torch.Tensor:
    if wide:  # signs are the highest bits of words, in which pairs of changes cancel
        words = words ^ (words >> 32)
    if words.device.type == "cpu":
        return torch.dot(words, keys[: len(words)])
    return (words * keys[: len(words)]).sum()


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> torch.Tensor:
    index = torch.arange(_WORDS, dtype=torch.int64)
    bits = (index + 1) * _signed(_POLYNOMIAL)
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return ((bits ^ _shifted(bits, 31)) | 1).to(device)
