"""Who owns buffers in these tests, and who reaches for them. No pytest here: every rank that hosts one imports it."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from typing import Any

import numpy as np

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.rdma import RDMABuffer
from tests.transfer.arrays import SHAPES, contents


class Keeper:
    """Holds registered arrays, by name."""

    def __init__(self) -> None:
        self.bases: dict[str, Any] = {}
        self.views: dict[str, Any] = {}
        self.weak: dict[str, Any] = {}

    def shaped(self, name: str) -> RDMABuffer:
        """One of ``SHAPES``."""
        self.bases[name], self.views[name] = SHAPES[name]()
        return RDMABuffer(self.views[name])

    def words(self, n: int, dtype: str = "i8") -> RDMABuffer:
        """``0, 1, 2, ...`` under the name "words"."""
        self.bases["words"] = self.views["words"] = np.arange(n, dtype=dtype)
        return RDMABuffer(self.views["words"])

    def readonly(self) -> RDMABuffer:
        """Bytes that cannot be written."""
        return RDMABuffer(memoryview(bytes(range(16))))

    def broadcasted(self) -> RDMABuffer:
        """Elements that share memory."""
        return RDMABuffer(np.broadcast_to(np.arange(4, dtype="u1"), (4, 4)))

    def base(self, name: str) -> Any:
        """The base array."""
        return self.bases[name]

    def contents(self, name: str) -> bytes:
        """The view's bytes."""
        return contents(self.views[name])

    def both(self, name: str) -> tuple[Any, bytes]:
        """The base array, and the view's bytes."""
        return self.base(name), self.contents(name)

    def forget(self, name: str) -> None:
        """Drop our own references."""
        self.weak[name] = weakref.ref(self.bases.pop(name))
        del self.views[name]

    def lives(self, name: str) -> bool:
        """Whether a forgotten array still exists."""
        gc.collect()
        return self.weak[name]() is not None

    def unmapped(self) -> RDMABuffer:
        """Memory that is taken away although it is registered."""
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        address = libc.mmap(None, 1 << 16, 3, 0x22, -1, 0)
        buffer = RDMABuffer(np.frombuffer((ctypes.c_char * (1 << 16)).from_address(address), "u1"))
        libc.munmap(address, 1 << 16)
        return buffer


class KeeperActor(Actor):
    """A ``Keeper`` in another process."""

    def __init__(self) -> None:
        self.keeper = Keeper()

    @endpoint
    def do(self, method: str, *args: Any) -> Any:
        return getattr(self.keeper, method)(*args)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def spin_until_last_is(self, value: int) -> list[int]:
        """Busy in pure Python, until somebody writes the last word."""
        words = self.keeper.views["words"]
        while words[-1] != value:
            pass
        return words.tolist()


class Peer(Actor):
    """Reaches for buffers of others."""

    @endpoint
    def read(self, buffer: RDMABuffer, n: int, dtype: str) -> Any:
        into = np.zeros(n, dtype)
        buffer.read_into(into).get()
        return into

    @endpoint
    def write(self, buffer: RDMABuffer, data: Any, offset: int = 0) -> None:
        buffer.write_from(data, offset=offset).get()

    @endpoint
    def add(self, buffer: RDMABuffer, times: int) -> None:
        for _ in range(times):
            buffer.fetch_add(1).get()

    @endpoint
    def increment(self, buffer: RDMABuffer, times: int) -> None:
        """By compare and swap, as a lock-free program would."""
        for _ in range(times):
            seen = 0
            while (was := buffer.compare_and_swap(seen, seen + 1, offset=8).get()) != seen:
                seen = was

    @endpoint
    def drop(self, buffer: RDMABuffer) -> None:
        buffer.drop().get()

    @endpoint
    def backend(self, buffer: RDMABuffer) -> str:
        return buffer.backend


class AsyncPeer(Actor):
    """The same with coroutines."""

    @endpoint
    async def copy(self, source: RDMABuffer, target: RDMABuffer, n: int) -> None:
        between = bytearray(n)
        await source.read_into(between)
        await target.write_from(between)


def forbid_cross_memory() -> None:
    """Have the kernel refuse ``process_vm_readv`` and ``process_vm_writev`` from now on, as sandboxes do."""
    libc = ctypes.CDLL(None, use_errno=True)
    calls = {"x86_64": (310, 311), "aarch64": (270, 271)}[os.uname().machine]
    load, equal, give = 0x20, 0x15, 0x06

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return code.to_bytes(2, "little") + bytes([yes, no]) + value.to_bytes(4, "little")

    program = b"".join(
        [
            step(load, 0),  # the system call's number
            step(equal, calls[0], yes=2),
            step(equal, calls[1], yes=1),
            step(give, 0x7FFF0000),  # allow
            step(give, 0x00050001),  # fail with EPERM
        ]
    )
    code = ctypes.create_string_buffer(program, len(program))

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    described = Filter(len(program) // 8, ctypes.addressof(code))
    assert libc.prctl(22, 2, ctypes.addressof(described), 0, 0) == 0, os.strerror(ctypes.get_errno())
