"""States of the ranks' random numbers; `Redraws` gives checkpointed regions the same numbers when they run again."""

from __future__ import annotations

import hashlib
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.rank import randomness

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.controller.handle import Tensor
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


#: How many draws of checkpointed regions can be gone back to (5 kB each on every rank).
REMEMBERED = 4096


class _Pass(Enum):
    """In which pass of a checkpointed region an operation is issued."""

    FORWARD = "forward"
    AGAIN = "again"
    AGAIN_WITH_NEW_NUMBERS = "again, with new numbers"


class Redraws:
    """The states of the ranks' generators at the draws of checkpointed regions (`torch.utils.checkpoint`).

    Checkpointing sets the generator of this process back before it computes a region again, and the ranks draw from
    theirs. So this process's generator is advanced by each draw of such a region, and its states stand for those of the
    ranks: the state that a draw finds here says from where the ranks have to draw. Draws elsewhere leave it alone.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[TensorMesh, bytes], Tensor] = {}
        #: Where ranks go on after what is computed again, for each mesh that has been set back.
        self._after: dict[TensorMesh, Tensor] = {}
        self._expected = b""

    @classmethod
    def of(cls, engine: TensorEngine) -> Redraws:
        """The one of an engine."""
        return engine.extras.setdefault("redraws", cls())

    def before_draw(self, mesh: TensorMesh) -> None:
        """See that the next operation of the mesh, a random one, draws what it has to.

        Raises:
            RuntimeError: the region drew its numbers so many draws ago that they are forgotten.
        """
        where = _pass()
        if where is None or where is _Pass.FORWARD:
            self._go_on()
        if where is None or where is _Pass.AGAIN_WITH_NEW_NUMBERS:
            return
        if mesh.engine.recording is not None:
            mesh.engine.recording.stop("it draws random numbers in a region that torch.utils.checkpoint computes again")
            return
        generator = torch.default_generator
        with _disable_current_modes():
            here = digest_of(generator.get_state())
        if where is _Pass.FORWARD:
            self._kept.pop((mesh, here), None)
            self._kept[mesh, here] = state_of(mesh)
            if len(self._kept) > REMEMBERED:
                del self._kept[next(iter(self._kept))]
        elif here != self._expected or mesh not in self._after:
            if (mesh, here) not in self._kept:
                raise RuntimeError(
                    f"a checkpointed region draws random numbers again that mesh {mesh.name} has forgotten: it "
                    f"remembers the newest {REMEMBERED:,} draws of such regions. Checkpoint fewer of them before a "
                    "backward pass"
                )
            if mesh not in self._after:
                self._after[mesh] = state_of(mesh)
            go_on_from(self._kept[mesh, here])
        with _disable_current_modes():
            torch.rand(1, generator=generator)
            self._expected = digest_of(generator.get_state())

    def seeded(self) -> None:
        """The program has said where the ranks go on."""
        self._after.clear()

    def _go_on(self) -> None:
        while self._after:
            go_on_from(self._after.popitem()[1])


def _pass() -> _Pass | None:
    """In which pass of a checkpointed region this is called; None outside of one."""
    found: _Pass | None = None
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == torch.utils.checkpoint.__file__:
            if code.co_name == "recompute_fn":
                return _Pass.AGAIN if frame.f_locals["preserve_rng_state"] else _Pass.AGAIN_WITH_NEW_NUMBERS
            if code.co_name == "backward":  # of CheckpointFunction (use_reentrant=True)
                return _Pass.AGAIN if frame.f_locals["ctx"].preserve_rng_state else _Pass.AGAIN_WITH_NEW_NUMBERS
            found = _Pass.FORWARD
        frame = frame.f_back
    return found


def digest_of(state: torch.Tensor) -> bytes:
    """A few bytes that stand for a state of a generator of this process."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()


def state_of(mesh: TensorMesh) -> Tensor:
    """Where the random numbers of each rank are: a handle of uint8 numbers."""
    with _disable_current_modes():
        size = torch.default_generator.get_state().numel() + randomness.OF_GPU
    return mesh.call(randomness.state, lambda: torch.empty(size, dtype=torch.uint8), key="rng_state")


def go_on_from(state: Tensor) -> None:
    """Have each rank of its mesh go on from a state."""
    state._spec.mesh.call(randomness.set_state, lambda _: None, state, key="set_rng_state")
