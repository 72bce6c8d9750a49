"""What lines of the program cost on the ranks of sharded meshes, added to the engine's plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.sharded.rank import state

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.sharded.controller.target import ShardedMesh


def collect(target: ShardedMesh) -> None:
    """Ask the first rank what has happened since the last time: one round trip."""
    engine = target.engine
    for record, (moved, fallbacks, size) in engine.ask(target, state.take_counts)[0].items():
        line = engine.plan.line(frames.innermost(engine.places.get(record)))
        for name, count in moved.items():
            line.redistributions[name] = line.redistributions.get(name, 0) + count
        for name, count in fallbacks.items():
            line.fallbacks[name] = line.fallbacks.get(name, 0) + count
        line.moved += size[0]
