"""The registry of backends, best first. Add a new backend here and to ``environment.BACKENDS``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from monarch_kernel.runtime.transfer import device
from monarch_kernel.runtime.transfer.backends import Backend, BackendContext, Cma, CudaIpc, Segment, StatelessBackend
from monarch_kernel.runtime.transfer.handle import Handle, Op
from monarch_kernel.runtime.transfer.tcp import Tcp


class Local(StatelessBackend):
    """Copies within the process."""

    name = "local"
    inline = 1 << 20
    devices = True

    def __init__(self, engine: BackendContext) -> None:
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


def backend_types() -> list[type[Backend]]:
    """Return every backend of this installation, best first."""
    found: list[type[Backend]] = [Local, CudaIpc, Cma, Segment]
    if find_spec("pyverbs") is not None:
        from monarch_kernel.runtime.transfer.verbs.backend import Verbs

        found.append(Verbs)
    return [*found, Tcp]


def make_backends(engine: BackendContext) -> list[Backend]:
    """Return the backends that this process can use for its engine, best first."""
    kinds: list[Any] = [kind for kind in backend_types() if kind.available()]  # Any: a Protocol has no constructor
    return [kind(engine) for kind in kinds]


def why_no_verbs() -> str:
    """Return why there is no verbs backend here."""
    from monarch_kernel.runtime.transfer.verbs.backend import why_not

    return why_not() or "not available here"
