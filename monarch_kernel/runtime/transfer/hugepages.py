"""Large registered memory is moved to huge pages, so that cross-memory attach keeps up with a memcpy.

The kernel looks up every page of the other process that it copies from or to: with pages of 4 KiB that costs twice as
much as the copy itself (measured: 7 GB/s instead of 18), with pages of 2 MiB nothing. NumPy asks for huge pages for its
arrays, PyTorch does not. Contents and addresses stay as they are, and other threads may use the memory meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from monarch_kernel import environment
from monarch_kernel.runtime.transfer.memory import Layout

_HUGE = 2 << 20
#: So much at a time: between two, it is looked whether it is still wanted.
_STEP = 8 * _HUGE
_MADV_COLLAPSE = 25

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def worth_it(layout: Layout) -> bool:
    """Whether memory is large, and used without large gaps."""
    low, high = layout.span()
    return 0 < _least() <= layout.nbytes and high - low <= 2 * layout.nbytes


@cache
def _least() -> int:
    """Memory smaller than this is left alone; 0: all memory."""
    return environment.RDMA_HUGEPAGES.get()


def collapse(layout: Layout, wanted: Callable[[], bool]) -> None:
    """Do it: takes about as long as a slow copy. Does nothing where the kernel cannot (before Linux 6.1)."""
    low, high = layout.span()
    at, end = -(-low // _HUGE) * _HUGE, high // _HUGE * _HUGE
    while at < end and wanted():
        some = min(_STEP, end - at)
        # What fails, fails for want of free memory, or for memory that is of another kind: it stays as it is.
        if _madvise(at, some, _MADV_COLLAPSE) and ctypes.get_errno() == 22:  # EINVAL
            return
        at += some
