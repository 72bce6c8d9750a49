"""Random numbers: a program on a mesh draws what it would draw on one device.

The ranks go on where torch's generator of this process stands at the first random operation on the mesh after a seed.
From
then on, the stream of that seed is the mesh's; this process goes on with one that is derived from it, so that local
draws and draws on the mesh are never the same numbers.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.sharded.rank import state

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine


class Handover:
    """Whether the ranks of an engine have the stream of the seed that this process has.

    A new seed is seen by `torch.initial_seed()`: after a hand-over, this process's generator has a seed that nobody
    chose.
    """

    def __init__(self) -> None:
        self._mark: int | None = None

    @classmethod
    def of(cls, engine: TensorEngine) -> Handover:
        """The one of an engine."""
        return engine.extras.setdefault("generator", cls())

    def before_draw(self, mesh: Any) -> None:
        """Give the ranks the stream of this process, if it was seeded since the last time."""
        generator = torch.default_generator
        seed = generator.initial_seed()
        if seed == self._mark:
            return
        with _disable_current_modes():
            given = generator.get_state()
        digest = hashlib.blake2b(given.numpy().tobytes(), digest_size=8).digest()
        self._mark = int.from_bytes(digest, "little") >> 1
        generator.manual_seed(self._mark)
        engine = mesh.engine
        with engine.lock, _disable_current_modes():
            engine.turn_to(mesh)
            engine.flush()
            set_state = cloudpickle.dumps(functools.partial(state.set_generator, given))
            mesh.workers.ask.broadcast(b"", b"", engine.record, set_state, [])
