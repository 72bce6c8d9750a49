"""The messages between the controller and the ranks of the tensor engine.

Operations are sent as *records*, sequences of 64-bit integers: ``[definition, inputs..., floats..., outputs...]``.
Inputs and outputs are ids of values on the ranks; floats are positions in the floats of the message. A `Definition` is
sent once, before the first record that names it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch.utils._pytree import register_pytree_node

from monarch_kernel.runtime.actor.meshes.tool_methods import RankCoordinates
from monarch_kernel.runtime.mesh.shape import Extent

# An argument `mesh.ranks` is the dictionary of its tensors.
register_pytree_node(
    RankCoordinates,
    lambda ranks: (list(ranks.values()), list(ranks)),
    lambda values, names: dict(zip(names, values, strict=True)),
)

# -- records that are no operations ------------------------------------------------------------------

#: ``[DELETE, n, id...]``: delete these values.
DELETE = 0
#: ``[WAIT, token]``: continue when another stream of this rank has reached ``[SIGNAL, token]`` (borrowed values).
WAIT = 1
SIGNAL = 2
#: ``[LEND, token, n, id..., m, rank...]``: actors of these ranks are about to take these values.
LEND = 3
#: The first number of definitions.
FIRST_DEFINITION = 16


# -- operations -------------------------------------------------------------------------------------


class Slot:
    """A position in a template: the `index`-th of its kind in the record."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.index,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index})"


class TensorSlot(Slot):
    """A value of the rank."""

    __slots__ = ()


class FloatSlot(Slot):
    """A float, which is sent by value because the scalars of an optimizer differ at every step."""

    __slots__ = ()


class RankDevice:
    """The device of the rank, in place of the controller's device, whose kind the rank may lack."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "RANK_DEVICE"

    def __repr__(self) -> str:
        return "RANK_DEVICE"


RANK_DEVICE = RankDevice()


@dataclass(frozen=True, slots=True)
class Recorded:
    """A sequence of records with separate numbering: values are numbered from 0, inputs first, and floats likewise.

    Attributes:
        steps: records like those of a stream.
        inputs: the number of external values.
        floats: each float of the records; None for a float that is sent with each call, in order.
        results: the numbers of the resulting values.
        backend: the backend of ``torch.compile`` on the ranks; None: do not compile.
    """

    steps: tuple[tuple[int, ...], ...]
    inputs: int
    floats: tuple[float | None, ...]
    results: tuple[int, ...]
    backend: str | None


@dataclass(frozen=True, slots=True)
class Definition:
    """One operation with all its fixed properties, as sent to ranks.

    Attributes:
        number: its number in records.
        operation: ``"aten::add.Tensor"``, a pickled function, or a recorded sequence of operations.
        template: pickled ``(args, kwargs)`` with slots.
        inputs: the number of inputs in a record; `floats` and `outputs` likewise.
        new: for each result in turn, whether it is a new value; None if there is a single new value or no result.
        mutates: positions of the inputs that the operation writes.
        sharded: whether values are DTensors.
        standins: for a collective: size and dtype of each input. A rank with a failed input takes part with such zeros,
            so that no other rank waits for it.
        label: its name in errors.
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
    """Replaces a value that an operation failed to compute.

    Attributes:
        record: the number of the record that failed first; -1 if the value was lost with a process.
        rank: the rank of the failure.
        text: the traceback on the rank.
        lost: whether the value was on a process that has died.
        steps: in a recorded sequence, the failed step; in nested sequences, the steps that lead to it.
        of_peer: whether the rank only waited in a collective for another one that failed.
        nonfinite: whether a watch found a NaN or Inf; the values are available.
    """

    record: int
    rank: int
    text: str
    lost: bool = False
    steps: tuple[int, ...] = ()
    of_peer: bool = False
    nonfinite: bool = False

    def packed(self) -> bytes:
        """Encode the failure for exchanges between ranks."""
        text = self.text.encode(errors="backslashreplace").decode()  # it may have lone surrogates
        return msgspec.msgpack.encode(replace(self, text=text))

    @staticmethod
    def unpacked(data: bytes) -> FailedValue:
        """Decode the result of `packed`.

        Raises:
            msgspec.DecodeError: the data is not a packed failure.
        """
        return msgspec.msgpack.decode(data, type=FailedValue)


class OperationFailed(Exception):
    """Raised by endpoints when they read a failed value, so that the call ends without waiting for other ranks."""

    def __init__(self, failed: FailedValue) -> None:
        super().__init__(failed.text)
        self.failed = failed
        self.of_peer = failed.of_peer

    def __reduce__(self) -> tuple[object, ...]:
        return OperationFailed, (self.failed,)


#: Larger tensors are sent out of band (bytes).
SMALL = 16 << 10
#: The maximum number of elements that a digest reads.
_SAMPLED = 1 << 16


class PackedTensor:
    """A small tensor in an answer. It arrives as a contiguous tensor.

    Torch's pickling writes an archive for each tensor, which takes 0.2 ms.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
        tensor = self._tensor
        return unpacked, (tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), tensor.dtype, tensor.shape)


def packed(tensor: torch.Tensor) -> object:
    """Return the form in which a tensor is sent: the tensor itself, if it is large or of a special kind."""
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
    """Restore the tensor in separate memory."""
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)


def digest(tensor: torch.Tensor) -> int:
    """Return a number that differs if the bytes differ. For a large tensor, it covers evenly spaced elements.

    It is 0 for sparse and quantized tensors, which are not compared.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        return 0
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous()
    return zlib.crc32(sample.view(torch.uint8).numpy().data) if sample.numel() else 0


# -- exchanges, pipes, offers -----------------------------------------------------------------------

#: The reductions for programs. "stack" keeps all values; the others combine them.
REDUCTIONS = ("stack", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class Reduction:
    """A collective.

    Attributes:
        stream: the number of the stream: each has separate process groups.
        groups: the groups of ranks of the world, in the order of their values.
        kind: one of `REDUCTIONS`.
        scatter: whether each rank keeps only its part of the result: the part at its position in the group.
        roots: the ranks that receive the result; None for all ranks.
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
        stream: the number of the stream: each has separate process groups.
        ranks: the participating ranks.
        routes: the sender for each receiver, which may be the receiver itself.
        size, dtype: the size and dtype of the value.
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
        name: the name of the generator in errors.
        max_messages: how many values each process produces in advance.
    """

    ranks: tuple[int, ...]
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    name: str
    max_messages: int

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates in the mesh of a rank of the world."""
        return dict(Extent(self.labels, self.sizes).point(self.ranks.index(rank)))


@dataclass(frozen=True, slots=True)
class PipeYield:
    """The form of the next value according to the shape function.

    Attributes:
        tree: the structure as text, because torch warns when it unpickles some of its own structures.
        leaves: shape and dtype of each part; None for parts that are not tensors.
    """

    tree: str
    leaves: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


@dataclass(frozen=True)
class OfferedLayout:
    """The layout of a DTensor.

    Attributes:
        ranks, sizes, labels: its device mesh: ranks of the default process group in row-major order, their number in
            each dimension, and the dimensions' names, if they have any.
        placements: one for each dimension of the mesh.
        rank: the offering rank.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    labels: tuple[str, ...] | None
    placements: tuple[Any, ...]
    rank: int


@dataclass(frozen=True)
class OfferedTensor:
    """A tensor that stays on its rank until `adopt` creates handles of it.

    Attributes:
        proc: the process that holds it.
        number: its number in that process.
        size, stride, dtype: the metadata of the tensor; for a DTensor, of the whole tensor.
        layout: the layout of a DTensor; None for other tensors.
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
