"""Process groups under sharded meshes: one for all ranks of a world, and torch's device meshes over it."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from monarch_kernel.runtime.actor.ports.receiver import Channel
from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.world_group import everywhere
from monarch_kernel.runtime.tensor.sharded.rank import state

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.sharded.controller.target import ShardedMesh


class FallbackWarning(UserWarning):
    """An operation had no rule for the layout of its inputs, and ran on whole tensors, on every rank."""


class ShardedWorld:
    """The process group of all ranks of an engine, and which of its sharded meshes are joined."""

    def __init__(self, engine: TensorEngine) -> None:
        self._engine = weakref.ref(engine)
        self._begun = False
        self._joined: list[weakref.ref[ShardedMesh]] = []
        self._port, self._notes = Channel[tuple[str, int]].open()

    @classmethod
    def of(cls, engine: TensorEngine) -> ShardedWorld:
        """The one of an engine."""
        with engine.lock:
            return engine.extras.setdefault("world", cls(engine))

    def join(self, target: ShardedMesh) -> None:
        """Have the ranks make the device mesh of a target; the first one forms the process group."""
        if not self._begun:
            self.form()
        self._make(target)
        self._joined.append(weakref.ref(target))

    def form(self) -> None:
        """See that the process group exists, and have the ranks make all device meshes anew.

        Raises:
            HealError: dead ranks cannot be replaced.
        """
        engine = self._engine()
        assert engine is not None  # the caller has it
        engine.groups.ensure()
        everywhere(engine, state.begin, self._port)
        self._begun = True
        for joined in self._joined:
            target = joined()
            if target is not None:
                self._make(target)

    def tell(self) -> None:
        """Warn of operations that ran on whole tensors, at the program's line; each is said once."""
        engine = self._engine()
        while engine is not None:
            try:
                name, record = self._notes.recv().get(timeout=0)
            except TimeoutError:
                return
            file, line, _ = frames.innermost(engine.places.get(record))
            warnings.warn_explicit(
                f"{name} has no rule for the layout of its inputs: it gathered whole tensors on every rank of mesh "
                f"{engine.name}, and kept the parts of its result. It is right, and slow for large tensors (said once)",
                FallbackWarning,
                file,
                line or 1,
            )

    @staticmethod
    def _make(target: ShardedMesh) -> None:
        everywhere(target.engine, state.make_mesh, target.key, target.ranks, target.sizes, target.labels, target.strict)
