"""Buffers of this process itself: a copy."""

from __future__ import annotations

from monarch_kernel.runtime.transfer import device
from monarch_kernel.runtime.transfer.backends.interface import Engine, StatelessBackend
from monarch_kernel.runtime.transfer.handle import Handle, Op


class Local(StatelessBackend):
    """Copies within the process."""

    name = "local"
    inline = 1 << 20
    devices = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @staticmethod
    def available() -> bool:
        return True

    def bars(self, handle: Handle) -> str:
        return "" if handle.owner.id == self._engine.node.id else "its owner is another process"

    def move(self, op: Op, deadline: float | None) -> None:
        with self._engine.held(op.handle.key, op) as registration:
            if op.write:
                device.move(registration.memory, op.offset, op.memory, 0, op.size)
            else:
                device.move(op.memory, 0, registration.memory, op.offset, op.size)
