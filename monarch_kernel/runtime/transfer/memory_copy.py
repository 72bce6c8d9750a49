"""Copy within this process, between any two layouts."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from monarch_kernel.runtime.transfer.memory import Layout

#: The approximate size of the contiguous memory through which scattered memory is copied (bytes).
SCRATCH = 4 << 20
_SIMPLE = {1, 2, 4, 8, 16}

_local = threading.local()


def copy(to: Layout, to_at: int, of: Layout, of_at: int, size: int) -> None:
    """Copy ``size`` bytes from byte ``of_at`` of one layout to byte ``to_at`` of another. Releases the GIL."""
    target, source = to.part(to_at, to_at + size), of.part(of_at, of_at + size)
    if target is not None and source is not None:
        if target.contiguous and source.contiguous:
            ctypes.memmove(target.address, source.address, size)
            return
        if _copy_arrays(target, source):
            return
    _copy_runs(to, to_at, of, of_at, size)


def _copy_arrays(target: Layout, source: Layout) -> bool:
    """Copy with NumPy, if it is installed. Return whether it is."""
    try:
        import numpy as np
    except ImportError:
        return False
    if target.contiguous:
        np.copyto(_array(np, like(source, target.address)), _array(np, source))
    elif source.contiguous:
        np.copyto(_array(np, target), _array(np, like(target, source.address)))
    elif target.run == source.run and [n for n, _ in target.dims] == [n for n, _ in source.dims]:
        np.copyto(_array(np, target), _array(np, source))
    else:
        whole = np.ascontiguousarray(_array(np, source))
        np.copyto(_array(np, target), _array(np, like(target, whole.ctypes.data)))
    return True


def like(layout: Layout, address: int) -> Layout:
    """Return the layout of contiguous memory at ``address`` that is divided like ``layout``."""
    strides: list[tuple[int, int]] = []
    stride = layout.run
    for count, _ in reversed(layout.dims):
        strides.append((count, stride))
        stride *= count
    return Layout(address, tuple(reversed(strides)), layout.run)


def _array(np: Any, layout: Layout) -> Any:
    low, high = layout.span()
    # NumPy copies elements of these sizes fastest; longer runs are elements of any size.
    dtype = f"V{layout.run}" if layout.run not in _SIMPLE else "c16" if layout.run == 16 else f"u{layout.run}"
    memory = (ctypes.c_char * (high - low)).from_address(low)
    shape, strides = [n for n, _ in layout.dims], [s for _, s in layout.dims]
    return np.ndarray(shape, dtype, memory, layout.address - low, strides)


def _copy_runs(to: Layout, to_at: int, of: Layout, of_at: int, size: int) -> None:
    """Copy run by run, which is slow but works for all layouts."""
    targets, sources = to.runs(to_at, to_at + size), of.runs(of_at, of_at + size)
    there = here = (0, 0)
    while size:
        if not there[1]:
            there = next(targets)
        if not here[1]:
            here = next(sources)
        some = min(there[1], here[1])
        ctypes.memmove(there[0], here[0], some)
        there, here = (there[0] + some, there[1] - some), (here[0] + some, here[1] - some)
        size -= some


def scratch(size: int) -> Any:
    """Return contiguous memory (a ctypes array) of this thread. Its contents are valid until the next call."""
    if size > SCRATCH:
        return (ctypes.c_char * size)()
    have: Any = getattr(_local, "scratch", None)
    if have is None:
        have = _local.scratch = (ctypes.c_char * SCRATCH)()
    return have


def steps(layout: Layout, lo: int, hi: int) -> list[tuple[int, int]]:
    """Split bytes ``lo`` to ``hi`` of a scattered layout where copies are fast, into pieces of about ``SCRATCH``."""
    inner = layout.nbytes // layout.dims[0][0] if layout.dims else 1
    step = max(SCRATCH // inner, 1) * inner if inner <= 16 * SCRATCH else SCRATCH
    cuts: list[tuple[int, int]] = []
    while lo < hi:
        end = min(hi, (lo // step + 1) * step)
        cuts.append((lo, end))
        lo = end
    return cuts
