"""The buffer is this process's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_kernel.runtime.transfer.copying import copy
from monarch_kernel.runtime.transfer.handle import Handle, Op

if TYPE_CHECKING:
    from monarch_kernel.runtime.transfer.engine import Engine


class Local:
    """A plain copy."""

    name = "local"
    inline = 1 << 20

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @staticmethod
    def available() -> bool:
        return True

    def bars(self, handle: Handle) -> str:
        return "" if handle.owner.id == self._engine.node.id else "its owner is another process"

    def move(self, op: Op, deadline: float | None) -> None:
        mine, theirs = op.memory.layout, op.handle.layout
        with self._engine.held(op.handle.key, op):
            if op.write:
                copy(theirs, op.offset, mine, 0, op.size)
            else:
                copy(mine, 0, theirs, op.offset, op.size)
