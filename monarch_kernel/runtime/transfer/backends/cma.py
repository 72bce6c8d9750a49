"""Access buffers of other processes of this host by cross-memory attach: the kernel copies without the owner's help.

``process_vm_readv`` and ``process_vm_writev`` need permission to trace the other process: the same user, and no sandbox
or ``ptrace_scope`` that forbids it. If they are forbidden, the first attempt detects it, and the next backend is used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from array import array
from typing import Any

from monarch_kernel import environment
from monarch_kernel.runtime.transfer.backends.interface import BackendContext, StatelessBackend
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op
from monarch_kernel.runtime.transfer.memory import Layout, copy, scratch, steps
from monarch_kernel.runtime.transfer.registration_table import PeerProcess
from monarch_kernel.runtime.transfer.thread_pool import SharedCopy

#: Copies smaller than twice this are not shared. Larger ones are cut into pieces between this and PIECE_MAX: more
#: pieces than threads, because one thread may be slower, but few, because each ends with a wait for the GIL.
PIECE = 4 << 20
PIECE_MAX = 64 << 20
#: Runs shorter than this cost more to read one by one than to read together with the gaps between them (bytes).
SHORT = 256
SPAN_MAX = 256 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_writev = _libc.process_vm_writev
for _function in (_readv, _writev):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
_FORBIDDEN = {errno.EPERM, errno.ENOSYS, errno.EACCES}
_BYTE = (ctypes.c_char * 1)()


def _call(function: Any, pid: int, here: array[int], there: array[int]) -> int:
    """Return the number of bytes moved, or the negative error number."""
    here_at, here_n = here.buffer_info()
    there_at, there_n = there.buffer_info()
    moved = function(pid, here_at, here_n // 2, there_at, there_n // 2, 0)
    return moved if moved >= 0 else -ctypes.get_errno()


def _probe(pid: int, address: int) -> int:
    """Try to read one byte of a process. Return the error number, 0 for success."""
    byte = (ctypes.c_char * 1)()
    moved = _call(_readv, pid, array("Q", (ctypes.addressof(byte), 1)), array("Q", (address, 1)))
    return max(-moved, 0)


class Cma(StatelessBackend):
    """Cross-memory attach."""

    name = "cma"
    inline = 1 << 20

    def __init__(self, engine: BackendContext) -> None:
        self._engine = engine

    @staticmethod
    def available() -> bool:
        return _probe(os.getpid(), ctypes.addressof(_BYTE)) not in _FORBIDDEN

    def bars(self, handle: Handle) -> str:
        elsewhere = "it is in GPU memory" if handle.device else self._engine.elsewhere(handle)
        if elsewhere:
            return elsewhere
        try:
            peer = self._engine.peer(handle)
        except Gone:
            return ""  # move() raises it
        except OSError as e:
            return f"its owner's process cannot be accessed ({os.strerror(e.errno or 0)})"
        if peer.barred is None:
            error = _probe(peer.pid, handle.address)
            peer.barred = _forbidden(error) if error in _FORBIDDEN else ""
        return peer.barred

    def move(self, op: Op, deadline: float | None) -> None:
        handle = op.handle
        peer = self._engine.peer(handle)
        if not peer.hold(handle.slot, handle.key):
            if not peer.alive():
                raise Gone
            raise self._engine.dropped(op)
        try:
            _Copy(peer, op, deadline, self._engine.work.run).run()
        finally:
            peer.release(handle.slot)


def _forbidden(error: int) -> str:
    return f"process_vm_readv is forbidden here ({os.strerror(error)})"


class _Copy:
    """One transfer."""

    def __init__(self, peer: PeerProcess, op: Op, deadline: float | None, spawn: Any) -> None:
        self._peer = peer
        self._op = op
        self._deadline = deadline
        self._spawn = spawn
        self._function = _writev if op.write else _readv

    def run(self) -> None:
        if not self._peer.alive():
            raise Gone
        op, mine, theirs = self._op, self._op.memory.layout, self._op.handle.layout
        whole = theirs.part(op.offset, op.offset + op.size)
        if not op.write and whole is not None and self._worth_spanning(whole):
            self._read_span(mine, whole)
        elif mine.contiguous or theirs.contiguous or (whole is not None and whole.contiguous):
            self._shared(mine, whole if whole is not None and whole.contiguous else None)
        else:
            self._through_scratch(mine)
        if not self._peer.alive():
            raise Gone

    def _shared(self, mine: Layout, whole: Layout | None) -> None:
        """Copy directly if one of the two sides is contiguous, with several threads if the transfer is large."""
        size, at = self._op.size, self._op.offset
        theirs = whole or self._op.handle.layout
        at = 0 if whole else at
        # The kernel copies page by page, slower than a memcpy, and far slower into a process than out of it; two
        # threads make up for that.
        threads = min(environment.RDMA_THREADS.get(), size // PIECE) if size >= 2 * PIECE else 1
        if threads < 2:
            self._move(mine, 0, theirs, at, size)
            return
        piece = min(max(-(-size // (2 * threads)), PIECE), PIECE_MAX)
        piece = -(-piece // 4096) * 4096
        cuts = [(lo, min(lo + piece, size)) for lo in range(0, size, piece)]
        share = SharedCopy(cuts, lambda lo, hi: self._move(mine, lo, theirs, at + lo, hi - lo))
        for _ in range(min(threads, len(cuts)) - 1):
            self._spawn(share.help)
        share.finish()

    def _through_scratch(self, mine: Layout) -> None:
        """Copy through contiguous memory if both sides are scattered."""
        theirs, offset = self._op.handle.layout, self._op.offset
        for lo, hi in steps(mine, 0, self._op.size):
            memory = scratch(hi - lo)
            between = Layout(ctypes.addressof(memory), (), hi - lo)
            if self._op.write:
                copy(between, 0, mine, lo, hi - lo)
            self._move(between, 0, theirs, offset + lo, hi - lo)
            if not self._op.write:
                copy(mine, lo, between, 0, hi - lo)

    def _worth_spanning(self, layout: Layout) -> bool:
        low, high = layout.span()
        return not layout.contiguous and layout.run < SHORT and high - low <= min(4 * layout.nbytes, SPAN_MAX)

    def _read_span(self, mine: Layout, whole: Layout) -> None:
        """Read everything between the first and the last byte, and copy the runs from there."""
        low, high = whole.span()
        memory = scratch(high - low)
        address = ctypes.addressof(memory)
        self._move(Layout(address, (), high - low), 0, Layout(low, (), high - low), 0, high - low)
        copy(mine, 0, Layout(whole.address - low + address, whole.dims, whole.run), 0, self._op.size)

    def _move(self, mine: Layout, mine_at: int, theirs: Layout, theirs_at: int, size: int) -> None:
        """Make system calls until all bytes are moved. One of the two layouts is contiguous."""
        done = 0
        while done < size:
            if mine.contiguous:
                there, some = theirs.block(theirs_at + done, theirs_at + size)
                here = array("Q", (mine.address + mine_at + done, some))
            else:
                here, some = mine.block(mine_at + done, mine_at + size)
                there = array("Q", (theirs.address + theirs_at + done, some))
            moved = _call(self._function, self._peer.pid, here, there)
            if moved <= 0:
                raise self._failed(-moved, theirs_at + done)
            done += moved
            if done < size:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    raise RDMATimeoutError(f"{self._op} did not end in time", self._op.handle.owner.id)
                if not self._peer.alive():
                    raise Gone

    def _failed(self, error: int, at: int) -> Exception:
        if error == errno.ESRCH or not self._peer.alive():
            return Gone()
        if error in _FORBIDDEN:
            self._peer.barred = _forbidden(error)
            return Unfit(self._peer.barred)
        reason = os.strerror(error) if error else "nothing could be moved"
        if error in (0, errno.EFAULT):
            reason = "the memory is no longer mapped, at the owner or here"
        return RDMAError(f"{self._op} failed near byte {at}: {reason}", self._op.handle.owner.id)
