"""Copy to and from CPU or GPU memory. PyTorch copies GPU memory, because it has the device open anyway.

``memory_copy`` copies CPU memory. torch is imported only when GPU memory is involved.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from monarch_kernel.runtime.transfer.memory import SCRATCH, Layout, Memory, copy, scratch, steps

_local = threading.local()


def gather(memory: Memory, at: int, size: int, address: int) -> None:
    """Copy bytes of an object to contiguous CPU memory."""
    if memory.device:
        _by_torch(_host(address, size), _views(memory, at, size), memory)
    else:
        copy(Layout(address, (), size), 0, memory.layout, at, size)


def scatter(memory: Memory, at: int, size: int, address: int) -> None:
    """Copy contiguous CPU memory to bytes of an object."""
    if memory.device:
        _by_torch(_views(memory, at, size), _host(address, size), memory)
    else:
        copy(memory.layout, at, Layout(address, (), size), 0, size)


def load(memory: Memory, at: int) -> int:
    """Return the aligned 8-byte word at an offset, unsigned."""
    if memory.device:
        word = ctypes.c_uint64()
        gather(memory, at, 8, ctypes.addressof(word))
        return word.value
    return ctypes.c_uint64.from_address(_word_at(memory, at)).value


def store(memory: Memory, at: int, value: int) -> None:
    """Set the aligned 8-byte word at an offset."""
    word = ctypes.c_uint64(value)
    if memory.device:
        scatter(memory, at, 8, ctypes.addressof(word))
    else:
        ctypes.c_uint64.from_address(_word_at(memory, at)).value = value


def _word_at(memory: Memory, at: int) -> int:
    return next(memory.layout.runs(at, at + 8))[0]


def move(to: Memory, to_at: int, of: Memory, of_at: int, size: int) -> None:
    """Copy bytes of one object to another, on any devices."""
    if to.device and of.device:
        _by_torch(_views(to, to_at, size), _views(of, of_at, size), to, of)
    elif not to.device and not of.device:
        copy(to.layout, to_at, of.layout, of_at, size)
    else:
        cpu, start = (of, of_at) if to.device else (to, to_at)
        if not cpu.layout.dims:  # contiguous: the driver copies it, at full speed if it is page-locked
            address = cpu.layout.address + start
            scatter(to, to_at, size, address) if to.device else gather(of, of_at, size, address)
            return
        for lo, hi in steps(cpu.layout, start, start + size):
            n, done = hi - lo, lo - start
            address = ctypes.addressof(staging(n))
            gather(of, of_at + done, n, address)
            scatter(to, to_at + done, n, address)


def staging(size: int) -> Any:
    """Return contiguous CPU memory for copies to and from a GPU, page-locked if there is one.

    Reused, like ``scratch``.
    """
    if size > SCRATCH:
        return scratch(size)
    have = getattr(_local, "staging", None)
    if have is None:
        import torch

        _local.keep = torch.empty(SCRATCH, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        have = _local.staging = (ctypes.c_char * SCRATCH).from_address(_local.keep.data_ptr())
    return have


def parts(layout: Layout, lo: int, hi: int) -> Iterator[Layout]:
    """Yield bytes ``lo`` to ``hi`` as a few layouts, in order."""
    part = layout.part(lo, hi)
    if part is not None:
        yield part
        return
    (count, stride), rest = layout.dims[0], layout.dims[1:]
    inner = layout.nbytes // count
    while lo < hi:
        row, into = divmod(lo, inner)
        whole = 0 if into else (hi - lo) // inner
        end = lo + whole * inner if whole else min(hi, (row + 1) * inner)
        if whole:
            yield Layout(layout.address + row * stride, ((whole, stride), *rest) if whole > 1 else rest, layout.run)
        else:
            yield from parts(Layout(layout.address + row * stride, rest, layout.run), into, into + end - lo)
        lo = end


def _by_torch(targets: list[Any], sources: list[Any], *used: Memory) -> None:
    """Copy tensors of bytes one after the other, and wait until the copies are done."""
    import torch

    for memory in used:
        if memory.ready is not None:  # first wait for the work that was queued when the object was passed
            torch.cuda.current_stream(memory.device).wait_event(memory.ready)
    flat = [source.reshape(-1) for source in sources]
    whole = flat[0] if len(flat) == 1 else torch.cat(flat)
    at = 0
    for target in targets:
        size = target.numel()
        target.copy_(whole[at : at + size].view(target.shape))
        at += size
    for memory in used:
        if memory.device.startswith("cuda"):
            torch.cuda.current_stream(memory.device).synchronize()


def _views(memory: Memory, at: int, size: int) -> list[object]:
    """Return part of a tensor as byte tensors that share its memory."""
    import torch

    storage = memory.keep.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(storage)
    views: list[object] = []
    for part in parts(memory.layout, at, at + size):
        shape, strides = [n for n, _ in part.dims], [s for _, s in part.dims]
        offset = part.address - storage.data_ptr()
        views.append(torch.as_strided(whole, [*shape, part.run], [*strides, 1], offset))
    return views


def _host(address: int, size: int) -> list[Any]:
    import torch

    return [torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)]
