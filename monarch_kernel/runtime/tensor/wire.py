"""What crosses between the controller and the ranks of the tensor engine.

Operations cross as *records*, runs of 64-bit integers: ``[definition, inputs..., floats..., outputs...]``. Inputs and
outputs are ids of values on the ranks, floats are positions in the floats that come with the message. What a
definition means (`Definition`) crosses once, ahead of the first record that names it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from monarch_kernel.runtime.mesh.shape import Extent

# -- records that are no operations ------------------------------------------------------------------

#: ``[DELETE, n, id...]``: forget these values.
DELETE = 0
#: ``[WAIT, token]``: go on when another stream of this rank has come to ``[SIGNAL, token]`` (borrowed values).
WAIT = 1
SIGNAL = 2
#: ``[LEND, token, n, id..., m, rank...]``: actors of these ranks are about to take these values.
LEND = 3
#: Definitions are numbered from here.
FIRST_DEFINITION = 16


# -- operations -------------------------------------------------------------------------------------


class Slot:
    """A place in a template: the `index`-th of its kind in the record."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.index,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index})"


class TensorSlot(Slot):
    """A value of the rank."""

    __slots__ = ()


class FloatSlot(Slot):
    """A float: by value, since the scalars of an optimizer differ at every step."""

    __slots__ = ()


class RankDevice:
    """The device of the rank, in place of one that the controller named: it may have none of that kind."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "RANK_DEVICE"

    def __repr__(self) -> str:
        return "RANK_DEVICE"


RANK_DEVICE = RankDevice()


@dataclass(frozen=True, slots=True)
class Recorded:
    """Records, with places of their own: values are numbered from 0, the inputs first, and floats likewise.

    Attributes:
        steps: records like those of a stream.
        inputs: how many values come from outside.
        floats: each float of the records; None for one that comes with every call, in order.
        results: the places of the values that the sequence gives.
        backend: what ``torch.compile`` makes of it on the ranks, or None: as it stands.
    """

    steps: tuple[tuple[int, ...], ...]
    inputs: int
    floats: tuple[float | None, ...]
    results: tuple[int, ...]
    backend: str | None


@dataclass(frozen=True, slots=True)
class Definition:
    """One operation with all that is fixed about it, as ranks get it.

    Attributes:
        number: what records name it by.
        operation: ``"aten::add.Tensor"``, a pickled function, or a recorded sequence of operations.
        template: pickled ``(args, kwargs)`` with slots.
        inputs: how many values a record names; `floats` and `outputs` likewise.
        new: for each result in turn, whether it is a new value; None where the result is a single new value, or none.
        mutates: positions of the inputs that the operation writes.
        sharded: whether values are DTensors.
        standins: for an operation in which ranks meet: size and dtype of each input. A rank on which an input has
            failed takes part with zeros of these, so that no other rank waits for it.
        label: what errors call it.
    """

    number: int
    operation: str | bytes | Recorded
    template: bytes
    inputs: int
    floats: int
    outputs: int
    new: tuple[bool, ...] | None
    mutates: tuple[int, ...]
    sharded: bool
    standins: tuple[tuple[tuple[int, ...], torch.dtype], ...] | None
    label: str


# -- values -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FailedValue:
    """In place of a value that an operation did not give.

    Attributes:
        record: the number of the record that failed first; -1 if the value was lost with a process.
        rank: where.
        text: the traceback there.
        lost: whether it was on a process that has died.
        steps: of a recorded sequence, the step that failed; of a sequence within one, the steps to it.
        of_peer: whether the rank only waited in a collective for another one that failed.
        nonfinite: whether it was a watch that found a NaN or Inf; the values are there.
    """

    record: int
    rank: int
    text: str
    lost: bool = False
    steps: tuple[int, ...] = ()
    of_peer: bool = False
    nonfinite: bool = False

    def packed(self) -> bytes:
        """As ranks exchange it."""
        text = self.text.encode(errors="backslashreplace").decode()  # it may hold lone surrogates
        return msgspec.msgpack.encode(replace(self, text=text))

    @staticmethod
    def unpacked(data: bytes) -> FailedValue:
        """What `packed` gave.

        Raises:
            msgspec.DecodeError: it is something else.
        """
        return msgspec.msgpack.decode(data, type=FailedValue)


class OperationFailed(Exception):
    """Raised by endpoints that are asked for a failed value, so that the call ends without waiting for other ranks."""

    def __init__(self, failed: FailedValue) -> None:
        super().__init__(failed.text)
        self.failed = failed
        self.of_peer = failed.of_peer

    def __reduce__(self) -> tuple[Any, ...]:
        return OperationFailed, (self.failed,)


#: Larger tensors go out of band (bytes).
SMALL = 16 << 10
#: A digest reads at most this many elements.
_SAMPLED = 1 << 16


class PackedTensor:
    """A small tensor in an answer; it arrives as a contiguous tensor.

    Torch's own pickling writes an archive for each tensor, which takes 0.2 ms.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self._tensor
        return unpacked, (tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), tensor.dtype, tensor.shape)


def packed(tensor: torch.Tensor) -> Any:
    """The tensor as it is sent: itself, if it is large or of a special kind."""
    if (
        tensor.numel() * tensor.element_size() >= SMALL
        or type(tensor) is not torch.Tensor
        or tensor.device.type != "cpu"
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return tensor
    return PackedTensor(tensor)


def unpacked(raw: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """The tensor, with memory of its own."""
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)


def digest(tensor: torch.Tensor) -> int:
    """A number that differs where the bytes differ; of a large tensor, those of elements at even distances.

    0 for sparse and quantized tensors, which are not compared.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        return 0
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous()
    return zlib.crc32(sample.view(torch.uint8).numpy().data) if sample.numel() else 0


# -- exchanges, pipes, offers -----------------------------------------------------------------------

#: What a program may ask for. "stack" keeps all values; the others make one of them.
REDUCTIONS = ("stack", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class Reduction:
    """A collective.

    Attributes:
        stream: the number of the stream: each has process groups of its own.
        groups: the ranks of the world that meet, each in one group, in the order of their values.
        kind: one of `REDUCTIONS`.
        scatter: whether each rank keeps only its part of the result: that at its position in the group.
        roots: the ranks that keep the result; None for all of them.
    """

    stream: int
    groups: tuple[tuple[int, ...], ...]
    kind: str
    scatter: bool
    roots: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class RankMoves:
    """A move of a value between ranks of one world.

    Attributes:
        stream: the number of the stream: each has process groups of its own.
        ranks: all ranks that take part.
        routes: the sender of each receiver, itself included.
        size, dtype: of the value.
    """

    stream: int
    ranks: tuple[int, ...]
    routes: tuple[tuple[int, int], ...]
    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PipeMesh:
    """The mesh of a pipe.

    Attributes:
        ranks: its ranks in the engine's world.
        labels, sizes: its dimensions.
        name: what errors call the generator.
        max_messages: how many values its processes make ahead of their use.
    """

    ranks: tuple[int, ...]
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    name: str
    max_messages: int

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank of the world is in the mesh."""
        return dict(Extent(self.labels, self.sizes).point(self.ranks.index(rank)))


@dataclass(frozen=True, slots=True)
class PipeYield:
    """What the shape function says that the next value is.

    Attributes:
        tree: how it is nested, as text: torch warns when it unpickles some of its own.
        leaves: for each part of it shape and dtype; None for what is no tensor.
    """

    tree: str
    leaves: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


@dataclass(frozen=True)
class OfferedLayout:
    """How a DTensor is laid out.

    Attributes:
        ranks, sizes, labels: its device mesh: ranks of the default process group in row-major order, how many there are
            in each dimension, and the dimensions' names, if they have any.
        placements: one for each dimension of the mesh.
        rank: the rank that offers it.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    labels: tuple[str, ...] | None
    placements: tuple[Any, ...]
    rank: int


@dataclass(frozen=True)
class OfferedTensor:
    """A tensor that stays on its rank until `adopt` makes handles of it.

    Attributes:
        proc: the process that has it.
        number: by what that process knows it.
        size, stride, dtype: of the tensor; of a DTensor, those of the whole.
        layout: of a DTensor; None for another tensor.
    """

    proc: str
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    layout: OfferedLayout | None

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        layout = "" if self.layout is None else f", {list(self.layout.placements)}"
        return f"OfferedTensor({list(self.size)}, {dtype}{layout})"
