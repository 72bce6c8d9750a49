"""`Tensor`: the controller's handle of one value on every rank of a mesh.

It is a wrapper subclass: it has the metadata of the value and no storage, so autograd, modules and optimizers work on
it, and each operation goes to the ranks. `TensorMesh` issues the operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.controller.spec import Spec

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh

_make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]  # torch gives no type


class ValueOwner:
    """Owns a value on the ranks: when its last handle goes, the value does.

    It holds the list of values to delete, and not the mesh, so that a collected handle keeps nothing alive.
    """

    __slots__ = ("_dead", "id")

    def __init__(self, number: int, dead: list[int]) -> None:
        self.id = number
        self._dead = dead

    def __del__(self) -> None:
        self._dead.append(self.id)  # one operation of the interpreter: it may run on any thread, at any time


class Tensor(torch.Tensor):
    """A tensor on every rank of a mesh, or, of a sharded mesh, one tensor whose parts are on the ranks.

    Made by torch operations while a mesh is active, by operations on other such tensors, and by `distribute`.
    """

    __slots__ = ("_constant", "_owner", "_spec")

    _spec: Spec
    _owner: ValueOwner
    #: Its value, where that is known here: a step counter, say.
    _constant: torch.Tensor | None

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # torch's stub has other names
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        mesh = mesh_among(args) or mesh_among(tuple((kwargs or {}).values()))
        assert mesh is not None  # torch calls this only if one of the arguments is one of ours
        return mesh.dispatch(func, args, kwargs)

    # torch looks for a storage in what it cannot flatten
    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError("a tensor on a mesh cannot be flattened into local tensors: fetch it first")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return self._spec.mesh.describe(self)

    @property
    def mesh(self) -> Any:
        """The proc mesh on whose ranks it is."""
        return self._spec.mesh.procs

    @property
    def stream(self) -> Any:
        """The stream in which operations on it run."""
        return self._spec.mesh.stream

    def item(self) -> Any:
        """Its value as a Python number: one round trip, unless it is known here."""
        if self.numel() != 1:
            raise RuntimeError(f"a Tensor with {self.numel()} elements cannot be converted to Scalar")
        if self._constant is not None:
            recording = self._spec.mesh.engine.recording
            return self._constant.item() if recording is None else recording.number(self)
        with _disable_current_modes():
            return self._spec.mesh.value_of(self, "item()").item()

    def tolist(self) -> Any:
        """Its values as nested lists of Python numbers: one round trip."""
        with _disable_current_modes():
            return self._spec.mesh.value_of(self, "tolist()").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Its values as an array here: one round trip.

        Raises:
            RuntimeError: it requires grad, and `force` is false, as for any tensor.
        """
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        with _disable_current_modes():
            return self._spec.mesh.value_of(self, "numpy()").numpy(force=force)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.item().__index__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._spec.mesh.reduce_handle(self)


def make_handle(spec: Spec, held: ValueOwner) -> Tensor:
    """A handle of a value; it does not require grad."""
    made = _make(Tensor, spec.size, spec.stride, dtype=spec.dtype, storage_offset=spec.offset)
    made._spec = spec
    made._owner = held
    made._constant = None
    return made


def mesh_among(args: Any) -> TensorMesh | None:
    """The mesh of the first handle among arguments, nested lists included."""
    for a in args:
        if type(a) is Tensor:
            return a._spec.mesh
        if type(a) in (list, tuple):
            mesh = mesh_among(a)
            if mesh is not None:
                return mesh
    return None
