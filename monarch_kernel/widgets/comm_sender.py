"""Send messages over a comm from any thread, even while a cell runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def comm_sender(comm: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sends data over a comm. In an ipykernel, its messages have no parent cell."""
    kernel = _kernel_of(comm)
    if kernel is None:
        return lambda data: comm.send(data=data)

    def send(data: dict[str, Any]) -> None:
        content = {"comm_id": comm.comm_id, "data": data}
        kernel.session.send(kernel.iopub_socket, "comm_msg", content, parent=None, ident=comm.topic)

    return send


def _kernel_of(comm: Any) -> Any:
    """Return the ipykernel of a comm; None if it belongs to another kind of kernel."""
    if not type(comm).__module__.startswith("ipykernel."):
        return None
    if comm.kernel is not None:
        return comm.kernel
    from ipykernel.kernelbase import Kernel

    return Kernel.instance() if Kernel.initialized() else None
