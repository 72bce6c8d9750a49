"""What travels: where a registered buffer is. A few hundred bytes, good in every process."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from monarch_kernel.protocol.messages import ProcRef
from monarch_kernel.runtime.transfer.memory import Layout, Memory


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """A registered buffer, for whoever is to reach it."""

    owner: ProcRef
    machine: str  # see ``registration_table.machine``
    pid: int
    started: int  # when the process started: tells it from another one that has the pid later
    table: int  # the owner's descriptor of its table
    slot: int
    key: int
    address: int
    dims: tuple[tuple[int, int], ...]
    run: int
    why_readonly: str
    signed: bool
    device: str = ""  # as ``Memory.device``

    @property
    def layout(self) -> Layout:
        """Where the bytes are in the owner's memory."""
        return Layout(self.address, self.dims, self.run)

    @property
    def size(self) -> int:
        """Bytes of the buffer."""
        return self.layout.nbytes

    @property
    def who(self) -> str:
        """The owner, for people."""
        return f"proc {self.owner.id} (pid {self.pid} on {self.owner.host})"


@dataclass(slots=True)
class Op:
    """One transfer: ``size`` bytes between a buffer, from ``offset`` on, and the first bytes of local memory."""

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
