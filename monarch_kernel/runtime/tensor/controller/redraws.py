"""Manage the random states of the ranks. `Redraws` replays the same numbers when a checkpointed region runs again."""

from __future__ import annotations

import hashlib
import sys
from enum import Enum
from typing import TYPE_CHECKING

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


#: The number of draws of checkpointed regions whose states are kept (5 kB each on every rank).
REMEMBERED = 4096


class _Pass(Enum):
    """The current pass of a checkpointed region."""

    FORWARD = "forward"
    AGAIN = "again"
    AGAIN_WITH_NEW_NUMBERS = "again, with new numbers"


class Redraws:
    """The states of the ranks' generators at the draws of checkpointed regions (`torch.utils.checkpoint`).

    Checkpointing restores the generator of this process before it recomputes a region, but the ranks draw from their
    own generators. Each draw of such a region therefore also advances this process's generator, and its states identify
    the states of the ranks: the state here at a draw determines the state from which the ranks draw. Draws elsewhere do
    not change it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[TensorMesh, bytes], Tensor] = {}
        #: The state from which ranks continue after a recomputation, for each mesh whose state was restored.
        self._after: dict[TensorMesh, Tensor] = {}
        self._expected = b""

    @classmethod
    def of(cls, engine: TensorEngine) -> Redraws:
        """Return the instance of an engine."""
        return engine.extras.setdefault("redraws", cls())

    def before_draw(self, mesh: TensorMesh) -> None:
        """Prepare the next random operation of the mesh, so that it draws the right numbers.

        Raises:
            RuntimeError: the region's draw is older than the kept states.
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
        """Note that the program has set the random states of the ranks."""
        self._after.clear()

    def _go_on(self) -> None:
        while self._after:
            go_on_from(self._after.popitem()[1])


def _pass() -> _Pass | None:
    """Return the current pass of a checkpointed region; None outside of one."""
    found: _Pass | None = None
    frame = sys._getframe(1)
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
    """Return a short digest of a generator state of this process."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()


def state_of(mesh: TensorMesh) -> Tensor:
    """Return the random state of each rank: a handle of a uint8 tensor."""
    with _disable_current_modes():
        size = torch.default_generator.get_state().numel() + randomness.OF_GPU
    return mesh.call(randomness.state, lambda: torch.empty(size, dtype=torch.uint8), key="rng_state")


def go_on_from(state: Tensor) -> None:
    """Set the random state of each rank of the state's mesh."""
    state._spec.mesh.call(randomness.set_state, lambda _: None, state, key="set_rng_state")
