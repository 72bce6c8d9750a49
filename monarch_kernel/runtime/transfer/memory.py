"""Locate the bytes of an object: addresses, shapes and strides of arrays, tensors and buffers.

A ``Layout`` lists the bytes of an object in the order that a copy of it would have, over memory that need not be
contiguous: runs of ``run`` bytes at ``address + i*stride + j*stride + ...`` for the indices of ``dims``, row by row.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

#: The maximum number of pieces for one system call (IOV_MAX).
IOV_MAX = 1024
#: The maximum size of one system call (bytes). Deadlines and deaths are checked between calls.
CALL_MAX = 256 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """Runs of bytes in memory, in order."""

    address: int
    dims: tuple[tuple[int, int], ...]  # (count, stride in bytes), outermost first
    run: int

    @property
    def nbytes(self) -> int:
        """The number of bytes in all runs."""
        return math.prod(n for n, _ in self.dims) * self.run

    @property
    def contiguous(self) -> bool:
        """Whether there is only one run."""
        return not self.dims

    def span(self) -> tuple[int, int]:
        """The lowest address, and the first address after the highest."""
        low = self.address + sum((n - 1) * s for n, s in self.dims if s < 0)
        high = self.address + sum((n - 1) * s for n, s in self.dims if s > 0) + self.run
        return low, high

    def overlaps_itself(self) -> bool:
        """Return whether a byte may occur twice (broadcast or sliding-window views)."""
        reach = self.run
        for count, stride in sorted(self.dims, key=lambda d: abs(d[1])):
            if abs(stride) < reach:
                return True
            reach += (count - 1) * abs(stride)
        return False

    def at(self, index: int) -> int:
        """Return the address of a run."""
        address = self.address
        for count, stride in reversed(self.dims):
            index, i = divmod(index, count)
            address += i * stride
        return address

    def part(self, lo: int, hi: int) -> Layout | None:
        """Return bytes ``lo`` to ``hi`` as one layout; None if several are needed."""
        if not self.dims:
            return Layout(self.address + lo, (), hi - lo)
        if lo == 0 and hi == self.nbytes:
            return self
        if hi - lo <= self.run - lo % self.run:
            return Layout(self.at(lo // self.run) + lo % self.run, (), hi - lo)
        (count, stride), rest = self.dims[0], self.dims[1:]
        inner = self.nbytes // count
        if lo % inner or hi % inner:
            return None
        first, last = lo // inner, hi // inner
        dims = rest if last - first == 1 else ((last - first, stride), *rest)
        return Layout(self.address + first * stride, dims, self.run)

    def block(self, lo: int, hi: int) -> tuple[array[int], int]:
        """Return the first of the bytes ``lo`` to ``hi`` as an array of ``struct iovec``, and their number."""
        run = self.run
        hi = min(hi, lo + CALL_MAX)
        index, into = divmod(lo, run)
        if into or hi - lo < run or not self.dims:
            size = min(hi - lo, run - into)
            return array("Q", (self.at(index) + into, size)), size
        count, stride = self.dims[-1]
        left = min((hi - lo) // run, IOV_MAX)
        starts: array[int] = array("Q")
        while left:
            some = min(left, count - index % count)
            start = self.at(index)
            starts.extend(range(start, start + some * stride, stride) if stride else [start] * some)
            index += some
            left -= some
        vector = array("Q", (run,)) * (2 * len(starts))
        vector[::2] = starts
        return vector, len(starts) * run

    def runs(self, lo: int = 0, hi: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (address, length) of every run of bytes ``lo`` to ``hi``."""
        hi = self.nbytes if hi is None else hi
        while lo < hi:
            vector, size = self.block(lo, hi)
            yield from zip(vector[::2], vector[1::2])
            lo += size


def layout_of(address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Layout:
    """Return the layout of an array, with the fewest and longest runs possible."""
    if 0 in shape:
        return Layout(address, (), 0)
    dims = [(n, s) for n, s in zip(shape, strides) if n != 1]
    run = itemsize
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    merged: list[tuple[int, int]] = []
    for count, stride in reversed(dims):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (count * merged[-1][0], merged[-1][1])
        else:
            merged.append((count, stride))
    return Layout(address, tuple(reversed(merged)), run)


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of an object, and a reference that keeps the object alive while they are used."""

    layout: Layout
    keep: Any
    why_readonly: str = ""  # empty if it is writable
    signed: bool = False  # 8-byte signed integers, for the results of atomics
    device: str = ""  # such as "cuda:0": GPU memory, which only ``device`` may touch; empty for CPU memory
    ready: Any = None  # a CUDA event: the end of the work that was queued when the object was passed

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes


def memory_of(obj: object) -> Memory:
    """Return the memory of a tensor, array or buffer.

    Raises:
        TypeError: the object has no memory of its own.
        ValueError: its memory cannot be moved as bytes: it is on another device, holds Python objects, or is lazy.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        memory = _of_tensor(torch, obj)
    else:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(obj, numpy.ndarray):
            memory = _of_array(obj)
        else:
            memory = _of_buffer(obj)
    if not memory.why_readonly and memory.layout.overlaps_itself():
        return replace(memory, why_readonly="several of its elements share memory")
    return memory


def _of_tensor(torch: ModuleType, tensor: Any) -> Memory:
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"the tensor is on {tensor.device}: only memory of the CPU and of CUDA devices can be moved")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"a {tensor.layout} tensor has no plain memory: use a dense (strided) tensor")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("the tensor is a lazy conjugate or negative view: call resolve_conj() or resolve_neg() first")
    address, itemsize = tensor.data_ptr(), tensor.element_size()
    if not address and tensor.numel():
        raise ValueError(f"this {type(tensor).__name__} has no memory: pass a plain tensor")
    strides = tuple(s * itemsize for s in tensor.stride())
    layout = layout_of(address, tuple(tensor.shape), strides, itemsize)
    signed = tensor.dtype is torch.int64
    if kind == "cpu":
        storage = tensor.untyped_storage()
        # Memory that torch has not allocated may be a file mapped read-only, which torch does not know.
        readonly = not storage.resizable() and not _is_writable(storage.data_ptr(), storage.nbytes())
        return Memory(layout, tensor, "its memory is mapped for reading only" if readonly else "", signed)
    ready = torch.cuda.current_stream(tensor.device).record_event()
    return Memory(layout, tensor.detach(), "", signed, str(tensor.device), ready)


def _is_writable(address: int, size: int) -> bool:
    """Return whether these bytes of this process are mapped for writing.

    A write to other memory would end the process.
    """
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            bounds, protection, _ = line.split(None, 2)
            start, end = (int(each, 16) for each in bounds.split(b"-"))
            if start < address + size and address < end and protection[1:2] != b"w":
                return False
            if start >= address + size:
                break
    return True


def _of_array(x: Any) -> Memory:
    if x.dtype.hasobject:
        raise ValueError(f"an array of dtype {x.dtype} holds Python objects, which mean nothing in another process")
    address, readonly = x.__array_interface__["data"]
    layout = layout_of(address, x.shape, x.strides, x.dtype.itemsize)
    return Memory(
        layout, x, "the array is read-only" if readonly else "", x.dtype.kind == "i" and x.dtype.itemsize == 8
    )


class _Buffer(ctypes.Structure):
    """``Py_buffer``, which is part of the stable ABI since Python 3.11."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None
_FULL_RO = 0x11C  # PyBUF_INDIRECT | PyBUF_FORMAT


def address_of(view: memoryview) -> int:
    """Return the address of a view's first element. It stays valid until the view is released."""
    buffer = _Buffer()
    _get_buffer(view, buffer, _FULL_RO)
    try:
        return buffer.buf or 0
    finally:
        _release_buffer(buffer)


def _of_buffer(obj: Any) -> Memory:
    try:
        view = memoryview(obj)
    except TypeError:
        if hasattr(obj, "__cuda_array_interface__"):
            raise ValueError(
                f"this {type(obj).__name__} is in GPU memory, which is moved by PyTorch: pass torch.as_tensor() of it"
            ) from None
        raise TypeError(
            f"a tensor, an array or a buffer (bytearray, memoryview) is needed, not {type(obj).__name__}"
        ) from None
    if "O" in view.format:
        raise ValueError("the buffer holds Python objects, which mean nothing in another process")
    if view.suboffsets and any(s >= 0 for s in view.suboffsets):
        raise ValueError("the buffer is made of pointers to pieces: copy it into contiguous memory first")
    layout = layout_of(address_of(view), view.shape or (), view.strides or (), view.itemsize)
    readonly = f"the {type(obj).__name__} is read-only" if view.readonly else ""
    # The view, not the object: it keeps a bytearray from being resized.
    return Memory(layout, view, readonly, view.itemsize == 8 and view.format.strip("@=<>") in {"q", "l"})


# Copy within this process, between any two layouts.

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


def common_runs(
    mine: Layout, at: int, theirs: Layout, there: int, size: int, most: int
) -> Iterator[tuple[int, int, int]]:
    """Split a transfer into pieces of at most ``most`` bytes, each contiguous on both sides.

    Yields:
        The address of a piece here, its address there, and its size.
    """
    here, remote = mine.runs(at, at + size), theirs.runs(there, there + size)
    a = b = (0, 0)
    while size:
        if not a[1]:
            a = next(here)
        if not b[1]:
            b = next(remote)
        some = min(a[1], b[1], most)
        yield a[0], b[0], some
        a, b = (a[0] + some, a[1] - some), (b[0] + some, b[1] - some)
        size -= some


def _copy_runs(to: Layout, to_at: int, of: Layout, of_at: int, size: int) -> None:
    """Copy run by run, which is slow but works for all layouts."""
    for target, source, some in common_runs(to, to_at, of, of_at, size, size):
        ctypes.memmove(target, source, some)


def scratch(size: int) -> Any:
    """Return contiguous memory (a ctypes array) of this thread. Its contents are valid until the next call."""
    if size > SCRATCH:
        return (ctypes.c_char * size)()
    have = getattr(_local, "scratch", None)
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
