"""Random operations: each returns the numbers of one device, in any layout.

Every rank draws for the whole tensor from a generator with the same state on all ranks, and keeps its part. The
generator belongs to the engine: draws of other code from torch's default generator have no effect here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.sharded.rank.layout import part_of, run_whole, write

if TYPE_CHECKING:
    from torch._ops import OpOverload


aten: object = torch.ops.aten

#: Operations that fill a tensor and ignore its content.
_FILL = frozenset(
    {
        aten.uniform_.default,
        aten.normal_.default,
        aten.bernoulli_.float,
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
        aten.exponential_.default,
        aten.log_normal_.default,
        aten.cauchy_.default,
        aten.geometric_.default,
    }
)
#: Operations that create a tensor of the shape of another.
_LIKE = frozenset(
    {
        aten.rand_like.default,
        aten.randn_like.default,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
    }
)


#: The number of draws whose states are kept (5 kB each).
REMEMBERED = 1024


class MeshGenerator:
    """The random state of a mesh on this rank."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seed = torch.default_generator.initial_seed() & 0xFFFFFFFF
        self._kept: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}

    def set(self, state: torch.Tensor | int) -> None:
        """Set a state of a CPU generator (bytes in a tensor), or a seed."""
        self._states.clear()
        if isinstance(state, int):
            self._seed = state
            return
        cpu = torch.Generator()
        cpu.set_state(state)
        self._seed = cpu.initial_seed()
        self._states["cpu"] = state

    def get(self) -> dict[str, torch.Tensor]:
        """Return the states by device type, for a snapshot."""
        return dict(self._states)

    def restore(self, states: dict[str, torch.Tensor]) -> None:
        """Restore the states that `get` returned."""
        self._states = dict(states)

    def keep(self, number: int) -> None:
        """Keep the state for a draw of the record of this number, or under a negative number for later use."""
        if number not in self._kept:
            self._kept[number] = self._seed, dict(self._states)
            if len(self._kept) > REMEMBERED:
                del self._kept[next(iter(self._kept))]

    def rewind(self, number: int) -> None:
        """Restore a kept state.

        Raises:
            RuntimeError: the state was replaced by newer ones.
        """
        if number not in self._kept:
            raise RuntimeError(
                "torch's generator was set back to a state before which the mesh drew random numbers, and the mesh "
                f"remembers its newest {REMEMBERED:,} draws only: seed it again (torch.manual_seed)"
            )
        self._seed, states = self._kept[number]
        self._states = dict(states)

    @contextmanager
    def active(self, device: torch.device) -> Generator[None]:
        """Make draws from torch's default generator of a device use this generator in the block."""
        default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
        self.keep(here().at)
        before = default.get_state()
        state = self._states.get(device.type)
        if state is None:
            default.manual_seed(self._seed)
        else:
            default.set_state(state)
        try:
            yield
        finally:
            self._states[device.type] = default.get_state()
            default.set_state(before)


def random_rule(op: OpOverload, generator: MeshGenerator) -> Callable[..., object]:
    """Return the function to call instead of a random operation."""

    def fill(x: DTensor, *args: object, **kwargs: object) -> DTensor:
        local = x._local_tensor
        whole = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=local.device)
        with generator.active(local.device):
            op(whole, *args, **kwargs)
        write(x, whole)
        return x

    def like(x: DTensor, *args: object, **kwargs: object) -> DTensor:
        local = x._local_tensor
        with generator.active(local.device):
            whole = op(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=local.device), *args, **kwargs)
        layout = [p if not p.is_partial() else _REPLICATE for p in x.placements]
        return part_of(whole, x.device_mesh, layout)

    def any_other(*args: object, **kwargs: object) -> object:
        device = next(x for x in _flat((args, kwargs)) if isinstance(x, DTensor))._local_tensor.device
        with generator.active(device):
            return run_whole(op, args, kwargs)

    if op in _FILL:
        return fill
    return like if op in _LIKE else any_other


_REPLICATE = Replicate()


def _flat(tree: object) -> list[Any]:
    return tree_leaves(tree)
