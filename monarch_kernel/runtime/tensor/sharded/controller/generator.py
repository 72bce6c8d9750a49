"""Random numbers: a program on a mesh draws what it would draw on one device.

The ranks go on where torch's generator of this process stands at the first random operation on the mesh after a seed.
From then on, the stream of that seed is the mesh's; this process goes on with one that is derived from it, so that
local draws and draws on the mesh are never the same numbers.
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


#: How many draws can be gone back to.
REMEMBERED = on_ranks.REMEMBERED


class Handover:
    """Which numbers a mesh draws next, by the state of this process's generator.

    A new seed is seen by `torch.initial_seed()`: after a hand-over, this process's generator has a seed that nobody
    chose. Each draw on the mesh advances this process's generator, too, so that its states stand for those of the mesh:
    a program that goes back to a state, as checkpointing of activations does, draws the same numbers again.
    """

    def __init__(self) -> None:
        self._mark: int | None = None
        self._expected = b""
        #: Under which number ranks have their state, by that of this process.
        self._kept: dict[bytes, int] = {}

    @classmethod
    def of(cls, engine: TensorEngine) -> Handover:
        """The one of an engine."""
        return engine.extras.setdefault("generator", cls())

    def before_draw(self, mesh: Any) -> None:
        """See that the next operation of the mesh draws what one device would. The caller holds the engine's lock."""
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
        """The number under which ranks are to keep the state that they have now."""
        number = -engine.new_number()
        self._keep(self._expected, number)
        return number

    def _keep(self, digest: bytes, number: int) -> None:
        self._kept.pop(digest, None)
        self._kept[digest] = number
        if len(self._kept) > REMEMBERED:
            del self._kept[next(iter(self._kept))]
