"""Transfers between a buffer and local GPU memory, by a backend that handles only CPU memory."""

from __future__ import annotations

import ctypes

from monarch_kernel.runtime.transfer import device
from monarch_kernel.runtime.transfer.backends.interface import Backend
from monarch_kernel.runtime.transfer.handle import Op
from monarch_kernel.runtime.transfer.memory import Layout, Memory
from monarch_kernel.runtime.transfer.memory_copy import SCRATCH


def staged(backend: Backend, op: Op, deadline: float | None) -> None:
    """Run a transfer with local GPU memory piece by piece, through CPU memory."""
    for lo in range(0, op.size, SCRATCH):
        size = min(SCRATCH, op.size - lo)
        between = device.staging(size)
        address = ctypes.addressof(between)
        if op.write:
            device.gather(op.memory, lo, size, address)
        part = Op(op.write, op.handle, op.offset + lo, Memory(Layout(address, (), size), between), size)
        backend.move(part, deadline)
        if not op.write:
            device.scatter(op.memory, lo, size, address)
