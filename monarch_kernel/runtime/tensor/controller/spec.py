"""The tensor metadata on which an operation's result can depend: `Spec`.

Equal specs are one object, so keys compare fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


class Spec:
    """Metadata of a tensor on a mesh.

    Attributes:
        mesh: the mesh of its values; tensors of different meshes never have equal specs.
        size, stride, offset, dtype: the metadata of the tensor on a rank; on a sharded mesh, of the whole tensor.
        plain: whether stride and offset are the defaults of a new contiguous tensor, which torch need not be given.
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
        """Create a tensor with this metadata, inside a FakeTensorMode."""
        if self.offset == 0:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        reach = 0 if 0 in self.size else 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride))
        return torch.empty(self.offset + reach, dtype=self.dtype).as_strided(self.size, self.stride, self.offset)

    def __repr__(self) -> str:
        return f"Spec({list(self.size)}, {self.dtype}, on {self.mesh.name})"


def spec_of(mesh: TensorMesh, tensor: torch.Tensor) -> Spec:
    """Return the spec of a tensor with the same metadata on a mesh.

    Raises:
        TypeError: the tensor is sparse, quantized or nested.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError(
            f"{tensor.layout} tensors cannot be on mesh {mesh.name}: only dense ones (torch.strided); "
            "convert it first (to_dense(), dequantize()), or work with it in a function of the ranks (remote)"
        )
    return _known(mesh, (tuple(tensor.size()), tensor.stride(), tensor.storage_offset(), tensor.dtype))


def spec_on(mesh: TensorMesh, spec: Spec) -> Spec:
    """Return the same spec on another mesh."""
    return _known(mesh, (tuple(spec.size), spec.stride, spec.offset, spec.dtype))


def _known(mesh: TensorMesh, key: tuple[Any, ...]) -> Spec:
    spec = mesh.specs.get(key)
    if spec is None:
        spec = mesh.specs[key] = Spec(mesh, *key)
    return spec
