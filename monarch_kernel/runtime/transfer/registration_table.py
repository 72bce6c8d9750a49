"""The table of a process's registered memory, which other processes of the host read without asking the owner.

The owner has a ``memfd`` with one 8-byte word per registration: its key, or 0 after a drop. A peer opens the memfd
through ``/proc/<pid>/fd``. Around each transfer it holds a shared lock on the bytes of that word, and checks that the
key is still there. ``drop`` clears the word, then waits for an exclusive lock before it releases the memory. A transfer
therefore never accesses released memory. A peer that dies during a transfer does not block a drop, because the kernel
releases its locks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import struct
import threading
from dataclasses import dataclass

from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError
from monarch_kernel.runtime.transfer.memory import Layout, Memory

_WORD = struct.Struct("=Q")
_FLOCK = struct.Struct("hhqqi4x")
#: The maximum number of registrations of one process. The table is sparse: untouched words take no memory.
SLOTS = 1 << 20


def _lock(fd: int, kind: int, slot: int) -> bool:
    """Set (or, with F_UNLCK, release) a lock on a word. Return False if another lock conflicts."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slot * _WORD.size, _WORD.size, 0))
    except BlockingIOError:
        return False
    return True


@dataclass(slots=True)
class Registration:
    """Memory of this process that other processes may access."""

    memory: Memory
    slot: int
    users: int = 0  # running transfers of this process
    dropped: Future[None] | None = None

    def within(self, offset: int, size: int, *, write: bool = False) -> Layout:
        """Check another process's request to read (or write) these bytes. Return the memory's layout.

        Raises:
            RDMAError: the bytes are out of range, or may not be written.
        """
        layout = self.memory.layout
        if offset < 0 or size < 0 or offset + size > layout.nbytes:
            raise RDMAError(f"bytes {offset} to {offset + size} are not within its {layout.nbytes} bytes")
        if write and self.memory.why_readonly:
            raise RDMAError(self.memory.why_readonly)
        return layout


class RegistrationTable:
    """The owner's side of its table."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("monarch-buffers", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, SLOTS * _WORD.size)
        self._words = mmap.mmap(self.fd, SLOTS * _WORD.size)
        self._free: list[int] = []
        self._used = 0
        self._guard = threading.Lock()

    def enter(self, key: int) -> int:
        """Publish a key. Return its slot."""
        with self._guard:
            if self._free:
                slot = self._free.pop()
            elif self._used < SLOTS:
                slot = self._used
                self._used += 1
            else:
                raise RuntimeError(
                    f"this process has {SLOTS} buffers registered already: drop() those that are not needed"
                )
            _WORD.pack_into(self._words, slot * _WORD.size, key)
            return slot

    def revoke(self, slot: int) -> None:
        """Clear the key, so that no new transfer starts."""
        _WORD.pack_into(self._words, slot * _WORD.size, 0)

    def quiet(self, slot: int) -> bool:
        """Return whether all transfers from before ``revoke`` have ended. The slot is then free again."""
        with self._guard:
            if not _lock(self.fd, fcntl.F_WRLCK, slot):
                return False
            _lock(self.fd, fcntl.F_UNLCK, slot)
            self._free.append(slot)
            return True

    def close(self) -> None:
        """Close the table. Peers that have it open see all words cleared."""
        self._words[: self._used * _WORD.size] = bytes(self._used * _WORD.size)
        self._words.close()
        os.close(self.fd)


class PeerProcess:
    """Another process of this host and its table: its liveness and its registrations.

    Raises:
        Gone: the process has ended; another process may have its pid.
        OSError: the process cannot be accessed.
    """

    def __init__(self, pid: int, started: int, table_fd: int) -> None:
        self.pid = pid
        #: The reason why ``process_vm_readv`` fails; empty if it works, None before the first attempt.
        self.barred: str | None = None
        self._guard = threading.Lock()
        self._held: dict[int, int] = {}
        self._pidfd = -1
        self._table = -1
        try:
            self._pidfd = os.pidfd_open(pid)
            # The descriptor was opened first, so it refers to the process that has this start time now.
            if start_of(pid) != started:
                raise Gone
            self._table = os.open(f"/proc/{pid}/fd/{table_fd}", os.O_RDWR | os.O_CLOEXEC)
        except (ProcessLookupError, FileNotFoundError):
            raise Gone from None
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)

    def alive(self) -> bool:
        """Return whether the process is alive. Until it ends, no other process gets its pid."""
        with self._guard:
            return not self._poll.poll(0)

    def hold(self, slot: int, key: int) -> bool:
        """Keep the registration ``key`` from being released until ``release``. Return False if it was dropped."""
        with self._guard:
            held = self._held.get(slot, 0)
            # A lock belongs to the open file: all threads share one until the last of them is done.
            if not held and not _lock(self._table, fcntl.F_RDLCK, slot):
                return False
            if os.pread(self._table, _WORD.size, slot * _WORD.size) != _WORD.pack(key):
                if not held:
                    _lock(self._table, fcntl.F_UNLCK, slot)
                return False
            self._held[slot] = held + 1
            return True

    def release(self, slot: int) -> None:
        """Release a registration held by ``hold``."""
        with self._guard:
            self._held[slot] -= 1
            if not self._held[slot]:
                del self._held[slot]
                _lock(self._table, fcntl.F_UNLCK, slot)

    def __del__(self) -> None:
        for fd in (self._pidfd, self._table):
            if fd >= 0:
                os.close(fd)


def start_of(pid: int) -> int:
    """Return when a process started (clock ticks since boot). With its pid, this identifies it uniquely.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as f:
        return int(f.read().rsplit(b")", 1)[1].split()[19])


def machine() -> str:
    """Return an id of the kernel and PID namespace. Processes with the same id can access each other's memory."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f"{f.read().strip()[:18]}-{os.stat('/proc/self/ns/pid').st_ino:x}"
