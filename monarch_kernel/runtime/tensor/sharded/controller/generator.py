"""Random numbers: a program on a mesh draws the numbers that it would draw on one device.

At the first random operation on the mesh after a seed, the ranks take over the state of torch's generator in this
process. From then on, the mesh draws from the stream of that seed. This process continues with a derived stream, so
that local draws and draws on the mesh never coincide.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.controller.redraws import digest_of
from monarch_kernel.runtime.tensor.sharded.rank import randomness as on_ranks
from monarch_kernel.runtime.tensor.sharded.rank import state

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine


#: The number of draws whose states are kept.
REMEMBERED = on_ranks.REMEMBERED


class Handover:
    """Decides which numbers a mesh draws next, from the state of this process's generator.

    `torch.initial_seed()` reveals a new seed: after a hand-over, this process's generator has a seed that no program
    chooses. Each draw on the mesh also advances this process's generator, so that its states identify the states of the
    mesh. A program that restores a state, as activation checkpointing does, draws the same numbers again.
    """

    def __init__(self) -> None:
        self._mark: int | None = None
        self._expected = b""
        #: The numbers under which ranks keep their states, by the state of this process.
        self._kept: dict[bytes, int] = {}

    @classmethod
    def of(cls, engine: TensorEngine) -> Handover:
        """Return the instance of an engine."""
        return engine.extras.setdefault("generator", cls())

    def before_draw(self, mesh: Any) -> None:
        """Make the next operation of the mesh draw the numbers of one device. The caller holds the engine's lock."""
        generator, engine = torch.default_generator, mesh.engine
        with _disable_current_modes():
            given = generator.get_state()
            digest = digest_of(given)
            if generator.initial_seed() != self._mark:
                self._mark = int.from_bytes(digest, "little") >> 1
                generator.manual_seed(self._mark)
                engine.turn_to(mesh)
                engine.flush()
                set_state = cloudpickle.dumps(functools.partial(state.set_generator, given, self._keep_latest(engine)))
                mesh.workers.ask.broadcast(b"", b"", engine.record, set_state, [])
                digest = digest_of(generator.get_state())
            elif digest != self._expected and digest in self._kept:
                function = functools.partial(state.rewind_generator, self._kept[digest], self._keep_latest(engine))
                engine.ask(mesh, function)
            self._keep(digest, engine.record)
            torch.rand(1, generator=generator)
            self._expected = digest_of(generator.get_state())

    def _keep_latest(self, engine: TensorEngine) -> int:
        """Return the number under which ranks are to keep their current state."""
        number = -engine.new_number()
        self._keep(self._expected, number)
        return number

    def _keep(self, digest: bytes, number: int) -> None:
        self._kept.pop(digest, None)
        self._kept[digest] = number
        if len(self._kept) > REMEMBERED:
            del self._kept[next(iter(self._kept))]
