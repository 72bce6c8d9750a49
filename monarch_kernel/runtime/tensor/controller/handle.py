"""The controller's handle of one value on every rank of a mesh: `Tensor`.

It is a wrapper subclass with the metadata of the value and no storage. Autograd, modules and optimizers work on it, and
each operation is sent to the ranks. `TensorMesh` issues the operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.controller.errors import TensorUseError
from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef
from monarch_kernel.runtime.tensor.controller.spec import Spec

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from monarch_kernel.runtime.tensor.controller.borrowing import Storage
    from monarch_kernel.runtime.tensor.controller.frames import Frames
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh

_make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]  # torch gives no type


_data: Any = torch.Tensor.data


class ValueOwner:
    """Owns a value on the ranks. The value is deleted with its last handle.

    It holds the list of values to delete instead of the mesh, so that a collected handle keeps nothing alive.

    Attributes:
        id: the number of the value.
        place: where the value was made, for tools.
        layout: the placements of a sharded tensor as text, if they were queried; otherwise the attribute is missing.
        storage: the state shared with views, if the value has views or is lent; otherwise the attribute is missing.
    """

    __slots__ = ("_dead", "id", "layout", "place", "storage")

    layout: tuple[str, ...]
    storage: Storage

    def __init__(self, number: int, dead: list[int], place: Frames | None = None) -> None:
        self.id = number
        self.place = place
        self._dead = dead

    def delete_in(self, dead: list[int]) -> None:
        """Delete the value in another stream, which is the only user from now on."""
        self._dead = dead

    def __del__(self) -> None:
        self._dead.append(self.id)  # one operation of the interpreter: it may run on any thread, at any time


class Tensor(torch.Tensor):
    """A tensor on every rank of a mesh. On a sharded mesh, it is one tensor whose parts are on the ranks.

    Created by torch operations while a mesh is active, by operations on other such tensors, and by `distribute`.
    """

    __slots__ = ("_constant", "_owner", "_spec")

    _spec: Spec
    _owner: ValueOwner
    #: Its value, if it is known here, for example of a step counter.
    _constant: torch.Tensor | None

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # torch's stub has other names
        cls, func: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        mesh = mesh_among(args) or mesh_among(tuple((kwargs or {}).values()))
        assert mesh is not None  # torch calls this only if an argument is one of these handles
        return mesh.dispatch(func, args, kwargs)

    # torch looks for a storage in objects that it cannot flatten
    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError("a tensor on a mesh cannot be flattened into local tensors: fetch it first")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return self._spec.mesh.describe(self)

    def _repr_html_(self) -> str:
        return _pictures().handle_html(self)

    def _short_form_(self) -> str:
        """Return the text that a debugger shows. No rank is queried."""
        return _pictures().short_form(self)

    def visualize(self) -> Any:
        """Show which rank has which part, as a picture in notebooks and as text elsewhere.

        This costs one round trip.
        """
        return _pictures().picture_of(self)

    @property
    def mesh(self) -> Any:
        """The proc mesh that holds the tensor."""
        return self._spec.mesh.procs

    @property
    def stream(self) -> Any:
        """The stream that runs operations on the tensor."""
        return self._spec.mesh.stream

    def drop(self) -> None:
        """Delete its value and the values of its views on the ranks. Later uses raise.

        Operations issued before still use it. A stream that has borrowed it can use it until the borrow is dropped.
        """
        self._constant = None
        self._spec.mesh.drop(self._owner)

    @property
    def dropped(self) -> bool:
        """Whether this tensor, or a tensor of which it is a view, was dropped."""
        storage = getattr(self._owner, "storage", None)
        return storage is not None and storage.dropped

    def item(self) -> Any:
        """Return its value as a Python number. This costs one round trip, unless the value is known here."""
        if self.numel() != 1:
            raise RuntimeError(f"a Tensor with {self.numel()} elements cannot be converted to Scalar")
        if self._constant is not None:
            recording = self._spec.mesh.engine.recording
            return self._constant.item() if recording is None else recording.number(self)
        with _disable_current_modes():
            return self._spec.mesh.value_of(self, "item()").item()

    def tolist(self) -> Any:
        """Return its values as nested lists of Python numbers. This costs one round trip."""
        with _disable_current_modes():
            return self._spec.mesh.value_of(self, "tolist()").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return its values as a local array. This costs one round trip.

        Raises:
            RuntimeError: the tensor requires grad and `force` is false, as for any tensor.
        """
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        with _disable_current_modes():
            return self._spec.mesh.value_of(self, "numpy()").numpy(force=force)

    # -- collectives ----------------------------------------------------------------------------------

    def reduce(
        self,
        dims: Sequence[str] | str | None = None,
        reduction: str = "sum",
        scatter: bool = False,
        mesh: Any = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Combine the values of the ranks that differ in these dimensions of the mesh.

        Gradients pass through "stack", "sum" and "avg", and through "min" and "max" without `scatter`. A backward pass
        differentiates the sum over all ranks. For other kinds it raises.

        ============================  =================  ======================================================
        call                          result on a rank   also known as
        ============================  =================  ======================================================
        ``("gpus", "sum")``           like the input     all-reduce; also avg, product, min, max, band, bor, bxor
        ``("gpus", "stack")``         one dimension more  all-gather
        ``("gpus", "sum", True)``     without dimension 0  reduce-scatter: part i of the sum to rank i
        ``("gpus", "stack", True)``   like the input     all-to-all: part i to rank i
        ``(..., mesh=part)``          only on that part  reduce, gather
        ============================  =================  ======================================================

        Args:
            dims: names of dimensions of the tensor's mesh; None for all of them.
            reduction: "stack", "sum", "avg", "product", "min", "max", "band", "bor" or "bxor".
            scatter: each rank keeps its part: dimension 0 must have one part for each participating rank.
            mesh: the mesh of the result: a slice of the tensor's mesh, or another mesh, as for `to_mesh`.
            out: a tensor that receives the result and is returned.

        Raises:
            KeyError: the mesh has no such dimension.
            TypeError: this dtype or shape is not supported.
            RuntimeError: `out` is given, and it or the tensor requires grad.
        """
        return self._spec.mesh.reduce(self, dims, reduction, scatter, mesh, out)

    def reduce_(
        self,
        dims: Sequence[str] | str | None = None,
        reduction: str = "sum",
        scatter: bool = False,
        mesh: Any = None,
    ) -> Tensor:
        """Do `reduce` in place, without allocating memory for a large contiguous tensor.

        Raises:
            RuntimeError: the tensor is a leaf that requires grad, as for any operation in place.
        """
        return self._spec.mesh.reduce(self, dims, reduction, scatter, mesh, self)

    def slice_mesh(self, **coords: int | slice) -> Tensor:
        """Restrict the tensor to a part of its ranks: ``t.slice_mesh(gpus=0)``. Nothing is copied; gradients pass.

        Args:
            coords: as for `ProcMesh.slice`: a number drops its dimension, a slice keeps a range of it.
        """
        return self._spec.mesh.slice_mesh(self, coords)

    def to_mesh(self, mesh: Any, stream: Any = None) -> Tensor:
        """Copy the tensor to other ranks. Each rank of `mesh` receives the value of the rank at its coordinates.

        Gradients move back. Along dimensions that only `mesh` has, the value is copied:
        ``t.slice_mesh(gpus=0).to_mesh(t.mesh)`` is a broadcast, and its gradient is a sum. Between processes that were
        spawned together, values move through process groups. Otherwise they move over the data plane, for which the
        controller waits.

        Args:
            mesh: a proc mesh (or slice).
            stream: the stream of the result; by default the stream of the tensor.

        Raises:
            ValueError: a dimension of the tensor's mesh has another size in `mesh`, or is missing there.
        """
        return self._spec.mesh.to_mesh(self, mesh, stream)

    # -- sharded tensors (`distribute`) ---------------------------------------------------------------

    @property
    def placements(self) -> Any:
        """The layout of a sharded tensor: a placement for each dimension of its mesh. This costs one round trip."""
        return self._spec.mesh.sharded_values("placements").placements(self)

    @property
    def device_mesh(self) -> Any:
        """The `Mesh` that a sharded tensor is on."""
        return self._spec.mesh.sharded_values("device_mesh").device_mesh(self)

    def redistribute(self, sharding_spec: object = None, *, placements: object = None) -> Tensor:
        """Change the layout of a sharded tensor. The layout is specified as for `distribute`; gradients pass."""
        values = self._spec.mesh.sharded_values("redistribute()")
        return values.redistribute(self, sharding_spec if placements is None else placements)

    def full_tensor(self) -> torch.Tensor:
        """Fetch a whole sharded tensor. Gradients pass. This costs one round trip."""
        return self._spec.mesh.sharded_values("full_tensor()").full_tensor(self)

    def to_local(self, **coords: int) -> torch.Tensor:
        """Fetch one rank's part of a sharded tensor. Coordinates default to 0. This costs one round trip."""
        return self._spec.mesh.sharded_values("to_local()").to_local(self, coords)

    def preview(self, count: int = 6) -> str:
        """Return what `print` shows, with up to `count` values of a sharded tensor. This costs one round trip."""
        return self._spec.mesh.sharded_values("preview()").preview(self, count)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else super().__format__(spec)

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise RuntimeError(
                f"Boolean value of Tensor with {'no values' if not self.numel() else 'more than one value'} is "
                f"ambiguous (it is {list(self.shape)}): use any() or all()"
            )
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.item().__index__()

    # -- indices ----------------------------------------------------------------------------------------

    # Torch takes an index without dimensions as one number. Here each rank has a separate number.

    def __getitem__(self, index: Any) -> Any:
        if not _has_number_of_ranks(index):
            return super().__getitem__(index)
        parts = list(index) if type(index) is tuple else [index]
        consumed = [_dimensions_of(part) for part in parts]
        found: Any = self
        for at, part in enumerate(parts):
            if _is_number_of_ranks(part):
                after = sum(consumed[at + 1 :])
                before = self.dim() - 1 - after if Ellipsis in map(_or_none, parts[:at]) else sum(consumed[:at])
                found = found[(*(slice(None),) * before, part.reshape(1))]
                parts[at] = 0
        return found[tuple(parts)]

    def __setitem__(self, index: Any, value: Any) -> None:
        if _is_number_of_ranks(index):
            index = index.reshape(1)
        super().__setitem__(index, value)

    # -- what torch would do to the memory of a tensor ------------------------------------------------

    @property
    def data(self) -> Tensor:
        """The same value without its graph. Assigning another tensor of the mesh replaces the value."""
        return _data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if type(value) is not Tensor or value._spec.mesh is not self._spec.mesh:
            kind = repr(value) if type(value) is Tensor else f"a local tensor {list(value.shape)}"
            raise TypeError(f"t.data = ...: {kind} is not on mesh {self._spec.mesh.name}: bring it there first")
        _data.__set__(self, value)
        self._spec, self._owner, self._constant = value._spec, value._owner, value._constant

    def cuda(self, *args: object, **kwargs: object) -> Tensor:
        """Return the tensor itself: the ranks determine its device."""
        return self

    def to(self, *args: object, **kwargs: Any) -> Any:
        """Implement `torch.Tensor.to`. A device argument means the device of each rank."""
        kept = {name: kwargs[name] for name in ("dtype", "copy", "memory_format") if kwargs.get(name)}
        for x in args:
            if isinstance(x, torch.dtype):
                kept["dtype"] = x
            elif isinstance(x, torch.Tensor):  # to(other)
                kept["dtype"] = x.dtype
        flags = [x for x in args if type(x) is bool]  # non_blocking, copy
        if len(flags) > 1:
            kept["copy"] = flags[1]
        kept.setdefault("dtype", self.dtype)
        return super().to(**kept)

    def share_memory_(self) -> Any:
        """Refuse: the memory is on the ranks."""
        raise RuntimeError(f"share_memory_(): the memory of {self!r} is on its ranks")

    def __dlpack__(self, **_: object) -> object:
        raise BufferError(f"{self!r} has no memory here: take its value first (inspect(t), t.full_tensor())")

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment: detach() it first"
            )
        with torch.no_grad():
            made: Any = self.detach().clone()
        if getattr(self, "_is_param", False):
            made = torch.nn.Parameter(made, self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = deepcopy(self.grad, memo)
        self._spec.mesh.copied(self, made)
        return made

    def __reduce_ex__(self, protocol: object) -> object:
        return self._spec.mesh.reduce_handle(self)


def _pictures() -> Any:
    from monarch_kernel.runtime.tensor.inspection import pictures

    return pictures


def _operator(kind: str, name: str) -> object:
    """Return a binary operator like torch's that raises the reason for a failure."""
    plain = getattr(torch.Tensor, f"__{kind}{name}__")
    forward = getattr(torch.Tensor, f"__{name}__")

    def reflected(self: Tensor, other: object) -> object:
        # Python prefers this to the operator of a local tensor, which may be a different one: a division, or a
        # reciprocal.
        return forward(other, self) if isinstance(other, torch.Tensor) else plain(self, other)

    function = reflected if kind == "r" else plain

    @functools.wraps(plain)
    def operator(self: Tensor, other: object) -> Any:
        made = function(self, other)
        return _why_not(function, self, other) if made is NotImplemented else made

    return operator


def _why_not(plain: Any, *operands: Any) -> object:
    TensorUseError.last.raised = None
    made = plain(*operands)
    raised: Any = TensorUseError.last.raised
    if raised is not None:
        kind, text = raised
        raise kind(text)
    return made


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
)
for _kind, _names in (("", (*_COMPARISONS, *_ARITHMETIC)), ("i", _ARITHMETIC), ("r", _ARITHMETIC)):
    for _name in _names:
        if hasattr(torch.Tensor, f"__{_kind}{_name}__"):
            setattr(Tensor, f"__{_kind}{_name}__", _operator(_kind, _name))


def _make_of(spec: Spec) -> Any:
    """Create a handle without a value."""
    if spec.plain:  # half of the time
        return _make(Tensor, spec.size, dtype=spec.dtype)
    return _make(Tensor, spec.size, spec.stride, dtype=spec.dtype, storage_offset=spec.offset)


def make_handle(spec: Spec, held: ValueOwner) -> Tensor:
    """Create a handle of a value. It does not require grad."""
    made = _make_of(spec)
    made._spec = spec
    made._owner = held
    made._constant = None
    return made


def handle_of(x: object) -> Tensor | None:
    """Return the handle that an argument is or wraps; None for any other object."""
    return x if type(x) is Tensor else x.key if isinstance(x, OpaqueRef) else None


def mesh_among(args: Any) -> TensorMesh | None:
    """Return the mesh of the first handle among arguments, including nested lists."""
    for a in args:
        if type(a) is Tensor:
            return a._spec.mesh
        if type(a) in (list, tuple):
            mesh = mesh_among(a)
            if mesh is not None:
                return mesh
    return None


def _is_number_of_ranks(index: object) -> bool:
    """Return whether an index is a number that may differ between ranks."""
    return (
        type(index) is Tensor
        and index.dim() == 0
        and index._constant is None
        and not index._spec.mesh.sharded
        and not (index.is_floating_point() or index.is_complex() or index.dtype is torch.bool)
    )


def _has_number_of_ranks(index: object) -> bool:
    if type(index) is tuple:
        return any(map(_is_number_of_ranks, index))
    return _is_number_of_ranks(index)


def _dimensions_of(index: object) -> int:
    """Return how many dimensions of the tensor a part of an index covers; 0 for `...`, which covers the rest."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    return index.dim() if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) else 1


def _or_none(index: object) -> object:
    """Return the part of an index, if it can be compared. Tensors cannot."""
    return None if isinstance(index, torch.Tensor) else index
