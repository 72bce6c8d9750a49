"""`Spec`: what the result of an operation on a tensor can depend on. Equal ones are one object: keys compare fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


class Spec:
    """Metadata of a tensor on a mesh.

    Attributes:
        mesh: where its values are: tensors of different meshes never have equal specs.
        size, stride, offset, dtype: as of the tensor on a rank; of a sharded mesh, as of the whole tensor.
        plain: whether stride and offset are those of a new contiguous tensor, of which torch need not be told.
    """

    __slots__ = ("dtype", "mesh", "offset", "plain", "size", "stride")

    mesh: TensorMesh
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    plain: bool

    def __init__(
        self, mesh: TensorMesh, size: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype
    ) -> None:
        self.mesh = mesh
        self.size = torch.Size(size)
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.plain = offset == 0 and torch.empty(size, device="meta").stride() == tuple(stride)

    def fake(self) -> torch.Tensor:
        """A tensor of this kind, for a FakeTensorMode."""
        if self.offset == 0:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        reach = 0 if 0 in self.size else 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride))
        return torch.empty(self.offset + reach, dtype=self.dtype).as_strided(self.size, self.stride, self.offset)

    def __repr__(self) -> str:
        return f"Spec({list(self.size)}, {self.dtype}, on {self.mesh.name})"


def spec_of(mesh: TensorMesh, tensor: torch.Tensor) -> Spec:
    """The spec of a tensor like this one on a mesh.

    Raises:
        TypeError: it is sparse, quantized or nested.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError(
            f"{tensor.layout} tensors cannot be on mesh {mesh.name}: only dense ones (torch.strided); "
            "convert it first (to_dense(), dequantize()), or work with it in a function of the ranks (remote)"
        )
    return _known(mesh, (tuple(tensor.size()), tensor.stride(), tensor.storage_offset(), tensor.dtype))


def spec_on(mesh: TensorMesh, spec: Spec) -> Spec:
    """The same spec on another mesh."""
    return _known(mesh, (tuple(spec.size), spec.stride, spec.offset, spec.dtype))


def _known(mesh: TensorMesh, key: tuple[Any, ...]) -> Spec:
    spec = mesh.specs.get(key)
    if spec is None:
        spec = mesh.specs[key] = Spec(mesh, *key)
    return spec
