"""Create tensors in parts: ``zeros``, ``ones``, ``randn`` and other functions of ``monarch_kernel.distributed``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.api.activation import active_sharded
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.sharded.controller.generator import Handover
from monarch_kernel.runtime.tensor.sharded.controller.layout import placements_of
from monarch_kernel.runtime.tensor.sharded.controller.mesh import mesh_from
from monarch_kernel.runtime.tensor.sharded.rank import factories

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.sharded.controller.target import ShardedMesh


def zeros(*size: Any, **options: Any) -> Tensor:
    """Create a tensor of zeros. Each rank creates its part.

    ```python
    zeros(1024, 64, mesh=mesh, sharding_spec=["data", None])
    ```

    Args:
        size: integers, or one sequence of integers.
        options: common keyword options of this module's functions:

            * ``mesh`` (or ``device_mesh``): as for `distribute`; by default the active mesh (``with
              mesh.activate():``);
            * ``sharding_spec`` (or ``placements``): as for `distribute`; by default the tensor is replicated on every
              rank;
            * ``dtype``, ``requires_grad``, ``layout`` (only ``torch.strided``): as in torch.

    Raises:
        ValueError: no mesh is given or active; the layout does not fit; the tensor would be a sum of terms (Partial).
        TypeError: an option is unknown, or a size is not an integer.
    """
    return _filled("zeros", _size(size), 0, torch.get_default_dtype(), options)


def ones(*size: Any, **options: Any) -> Tensor:
    """Create a tensor of ones; see `zeros`."""
    return _filled("ones", _size(size), 1, torch.get_default_dtype(), options)


def empty(*size: Any, **options: Any) -> Tensor:
    """Create an uninitialised tensor; see `zeros`."""
    return _filled("empty", _size(size), None, torch.get_default_dtype(), options)


def full(size: Any, fill_value: Any, **options: Any) -> Tensor:
    """Create a tensor filled with one number, with the dtype that ``torch.full`` selects; see `zeros`."""
    with _disable_current_modes():
        dtype = torch.full((), fill_value).dtype
    return _filled("full", _size((size,)), fill_value, dtype, options)


def rand(*size: Any, **options: Any) -> Tensor:
    """Draw random numbers from [0, 1): the numbers of ``torch.rand`` on one device, in any layout; see `zeros`."""
    return _drawn("rand", _size(size), options)


def randn(*size: Any, **options: Any) -> Tensor:
    """Draw normal random numbers: the numbers of ``torch.randn`` on one device, in any layout; see `zeros`."""
    return _drawn("randn", _size(size), options)


def arange(start: Any, end: Any = None, step: Any = 1, **options: Any) -> Tensor:
    """Implement ``torch.arange``; for the options see `zeros`."""
    bounds = (0, start, step) if end is None else (start, end, step)
    dtype = options.pop("dtype", None)
    with _disable_current_modes():
        like = torch.arange(*bounds, dtype=dtype, device="meta")
    new = _New("arange", (like.numel(),), like.dtype, options)
    return new.issue(factories.counted, new.dtype, bounds)


class _New:
    """The checked options of a new tensor.

    Attributes:
        size, dtype: the size and dtype of the tensor.
    """

    def __init__(self, name: str, size: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]) -> None:
        meshes = [options.pop(key, None) for key in ("mesh", "device_mesh")]
        specs = [options.pop(key, None) for key in ("sharding_spec", "placements")]
        for names, given in (("mesh or device_mesh", meshes), ("sharding_spec or placements", specs)):
            if None not in given:
                raise TypeError(f"{name}(): give {names}, not both")
        found = options.pop("dtype", None)
        self.size, self.dtype = size, dtype if found is None else found
        self._requires_grad = bool(options.pop("requires_grad", False))
        if options.pop("layout", torch.strided) is not torch.strided:
            raise TypeError(f"{name}(layout=...): tensors on meshes are dense (torch.strided)")
        if options:
            raise TypeError(
                f"{name}() has no option {', '.join(map(repr, options))}: it has mesh, sharding_spec, dtype and "
                "requires_grad"
            )
        self.target = _target(name, next((mesh for mesh in meshes if mesh is not None), None))
        spec: Any = next((spec for spec in specs if spec is not None), None)
        with _disable_current_modes():
            like = torch.empty(size, dtype=self.dtype, device="meta")
        self._placements: tuple[Placement, ...] = placements_of(spec, self.target.labels, like, self.target.name)
        if any(p.is_partial() for p in self._placements):
            raise ValueError(
                f"{name}(): a new tensor cannot be a sum of terms (Partial): make it in another layout, and "
                "redistribute() it"
            )

    def issue(self, function: Any, *rest: Any) -> Tensor:
        """Make the ranks create the tensor: ``function(key of the mesh, placements, *rest)``."""
        size, dtype = self.size, self.dtype

        def like(*_: Any) -> torch.Tensor:
            return torch.empty(size, dtype=dtype)

        made: Tensor = self.target.call(
            function, like, self.target.key, self._placements, *rest, key=(function, size, dtype)
        )
        return made.requires_grad_() if self._requires_grad else made  # pyright: ignore[reportReturnType]  # itself


def _filled(name: str, size: tuple[int, ...], value: Any, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
    new = _New(name, size, dtype, options)
    return new.issue(factories.filled, new.size, new.dtype, value)


def _drawn(name: str, size: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    new = _New(name, size, torch.get_default_dtype(), options)
    if not (new.dtype.is_floating_point or new.dtype.is_complex):
        raise TypeError(f"{name}(dtype={new.dtype}): only floating-point and complex numbers are drawn so")
    Handover.of(new.target.engine).before_draw(new.target)
    return new.issue(factories.drawn, new.size, new.dtype, name == "randn")


def _target(name: str, mesh: Any) -> ShardedMesh:
    if mesh is None:
        target: Any = active_sharded()
        if target is None:
            raise ValueError(f"{name}(): no mesh is given: write mesh=..., or `with mesh.activate():`")
        return target
    found = mesh_from(mesh)
    found._check_open()
    return found._target


def _size(size: Sequence[Any]) -> tuple[int, ...]:
    given = size[0] if len(size) == 1 and isinstance(size[0], (list, tuple)) else size
    found = tuple(map(operator.index, given))
    if any(n < 0 for n in found):
        raise ValueError(f"size {list(found)}: sizes are not negative")
    return found
