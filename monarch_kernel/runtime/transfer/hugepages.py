"""Moves large registered memory to huge pages, so that cross-memory attach is as fast as a memcpy.

The kernel looks up every page of the other process that it copies from or to: with pages of 4 KiB, that costs twice as
much as the copy itself (measured: 7 GB/s instead of 18); with pages of 2 MiB, nothing. NumPy requests huge pages for
its arrays, PyTorch does not. Contents and addresses do not change, and other threads may use the memory meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from monarch_kernel import environment
from monarch_kernel.runtime.transfer.memory import Layout

_HUGE = 2 << 20
#: How much is collapsed at a time; between steps, ``wanted`` is checked.
_STEP = 8 * _HUGE
_MADV_COLLAPSE = 25

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def worth_it(layout: Layout) -> bool:
    """Whether the memory is large and has no large gaps."""
    low, high = layout.span()
    return 0 < _least() <= layout.nbytes and high - low <= 2 * layout.nbytes


@cache
def _least() -> int:
    """Memory smaller than this is left alone; 0: all memory."""
    return environment.RDMA_HUGEPAGES.get()


def collapse(layout: Layout, wanted: Callable[[], bool]) -> None:
    """Move memory to huge pages; takes about as long as a slow copy. Has no effect before Linux 6.1."""
    low, high = layout.span()
    at, end = -(-low // _HUGE) * _HUGE, high // _HUGE * _HUGE
    while at < end and wanted():
        some = min(_STEP, end - at)
        # Other failures mean too little free memory, or another kind of memory; such memory stays as it is.
        if _madvise(at, some, _MADV_COLLAPSE) and ctypes.get_errno() == 22:  # EINVAL
            return
        at += some
