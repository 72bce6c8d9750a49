"""Handles of registered buffers, which are sent between processes, and operations on them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from monarch_kernel.protocol.messages import ProcRef
from monarch_kernel.runtime.transfer.memory import Layout, Memory


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """The location of a registered buffer: a few hundred bytes that are valid in every process."""

    owner: ProcRef
    machine: str  # see ``registration_table.machine``
    pid: int
    started: int  # when the process started, to distinguish it from a later process with the same pid
    table: int  # the owner's file descriptor of its registration table
    slot: int
    key: int
    address: int
    dims: tuple[tuple[int, int], ...]
    run: int
    why_readonly: str
    signed: bool
    device: str = ""  # as in ``Memory.device``

    @property
    def layout(self) -> Layout:
        """The layout of the bytes in the owner's memory."""
        return Layout(self.address, self.dims, self.run)

    @property
    def size(self) -> int:
        """The size of the buffer (bytes)."""
        return self.layout.nbytes

    @property
    def who(self) -> str:
        """The name of the owner for messages."""
        return f"proc {self.owner.id} (pid {self.pid} on {self.owner.host})"


@dataclass(slots=True)
class Op:
    """One transfer: ``size`` bytes between a buffer, from ``offset`` on, and the start of local memory."""

    write: bool  # into the buffer
    handle: Handle
    offset: int
    memory: Memory
    size: int

    def __str__(self) -> str:
        verb = "write to" if self.write else "read of"
        end = self.offset + self.size
        return f"{verb} bytes {self.offset} to {end} of a buffer of {self.handle.size} bytes of {self.handle.who}"


encode_handle = msgspec.msgpack.Encoder().encode
decode_handle = msgspec.msgpack.Decoder(Handle).decode
