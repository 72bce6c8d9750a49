"""A file without a name, in the store's folder, in which a host keeps the blocks of a mount while it lasts."""

from __future__ import annotations

import ctypes
import os
import tempfile

from workspace_sync.model.errors import MountError, StoreError
from workspace_sync.store import Store

#: ``FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE``
_PUNCH_HOLE = 3


class Spool:
    """Space for bytes that is gone with the process, however it ends. Several threads may use it.

    Raises:
        MountError: the store cannot be used.
    """

    def __init__(self) -> None:
        try:
            with Store() as store, store.private_folder("mounts") as folder:
                self._file = tempfile.TemporaryFile(dir=folder.path)  # noqa: SIM115  # as long as this object
        except (StoreError, OSError) as e:
            raise MountError(f"there is no place for what a mount reads: {e}") from None
        self._fd = self._file.fileno()
        self._libc = ctypes.CDLL(None)

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes. Raises OSError, such as for a full disk."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)

    def read(self, size: int, offset: int) -> bytes:
        """Read bytes; OSError if the disk fails."""
        data = os.pread(self._fd, size, offset)
        if len(data) != size:
            raise OSError(f"{size} bytes were written, and {len(data)} are there")
        return data

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Read bytes into memory; OSError if the disk fails."""
        if os.preadv(self._fd, [memory], offset) != len(memory):
            raise OSError(f"{len(memory)} bytes were written, and fewer are there")

    def free(self, offset: int, size: int) -> None:
        """Give the space of some bytes back, where the file system can."""
        self._libc.fallocate(self._fd, _PUNCH_HOLE, ctypes.c_longlong(offset), ctypes.c_longlong(size))

    def close(self) -> None:
        """Give all space back."""
        self._file.close()
