"""Register GPU memory with RDMA cards: through CUDA's dma-buf, or by address if nvidia-peermem is loaded."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from monarch_kernel.runtime.transfer.errors import Unfit
from monarch_kernel.runtime.transfer.memory import Memory
from monarch_kernel.runtime.transfer.verbs.card import Card

_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
_PAGE = os.sysconf("SC_PAGE_SIZE")


def register(card: Card, memory: Memory, *, remote: bool, writable: bool) -> tuple[Any, int]:
    """Register memory of any device with a card.

    Args:
        remote, writable: as in ``Card.register``.

    Returns:
        The region, and the offset from an address to the one that the card uses.

    Raises:
        Unfit: the memory cannot be registered; the message has the reason.
    """
    low, high = memory.layout.span()
    if not memory.device:
        return card.register(low, high - low, remote=remote, writable=writable), 0
    if memory.ready is not None:
        memory.ready.synchronize()  # also makes the device's context current in this thread
    start = low // _PAGE * _PAGE
    fd = _exported(start, -(-high // _PAGE) * _PAGE - start)
    if fd is None:
        return card.register(low, high - low, remote=remote, writable=writable, populate=False), 0
    try:
        # The card addresses the memory by its offset in the dma-buf.
        return card.register_dmabuf(fd, low - start, high - low, remote=remote, writable=writable), -start
    finally:
        os.close(fd)  # the region keeps the memory


@cache
def _cuda() -> Any:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.cuMemGetHandleForAddressRange.argtypes = (
            ctypes.POINTER(ctypes.c_int),
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_ulonglong,
        )
        cuda.cuPointerSetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    except (OSError, AttributeError) as e:
        raise Unfit(f"the CUDA driver cannot share GPU memory with other devices ({e})") from None
    return cuda


def _exported(start: int, size: int) -> int | None:
    """Return a dma-buf of device memory; None if the driver cannot export one."""
    cuda, fd, yes = _cuda(), ctypes.c_int(-1), ctypes.c_uint(1)
    # Makes copies by the GPU complete when they are reported as complete, also for cards that read the memory
    # afterwards.
    cuda.cuPointerSetAttribute(ctypes.byref(yes), _SYNC_MEMOPS, start)
    error = cuda.cuMemGetHandleForAddressRange(ctypes.byref(fd), start, size, _DMA_BUF_FD, 0)
    return None if error else fd.value
