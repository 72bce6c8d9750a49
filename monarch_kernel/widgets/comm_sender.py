"""Sends messages over a comm from any thread, while a cell runs too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def comm_sender(comm: Any) -> Callable[[dict[str, Any]], None]:
    """A function that sends data over a comm. In an ipykernel its messages have no parent: they belong to no cell."""
    kernel = _kernel_of(comm)
    if kernel is None:
        return lambda data: comm.send(data=data)

    def send(data: dict[str, Any]) -> None:
        content = {"comm_id": comm.comm_id, "data": data}
        kernel.session.send(kernel.iopub_socket, "comm_msg", content, parent=None, ident=comm.topic)

    return send


def _kernel_of(comm: Any) -> Any:
    """The ipykernel behind a comm; None behind one of another kind."""
    if not type(comm).__module__.startswith("ipykernel."):
        return None
    if comm.kernel is not None:
        return comm.kernel
    from ipykernel.kernelbase import Kernel

    return Kernel.instance() if Kernel.initialized() else None
