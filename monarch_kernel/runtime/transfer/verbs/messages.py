"""The messages by which requester and owner connect queue pairs and register a buffer."""

from __future__ import annotations

import msgspec

from monarch_kernel.runtime.transfer.verbs.ports import CardPort, Gid


class QueuePairEnd(msgspec.Struct, array_like=True, frozen=True):
    """One side of a queue pair."""

    number: int
    psn: int


class ConnectRequest(msgspec.Struct, array_like=True, frozen=True):
    """The requester's message: the queue pairs to connect, and those that were closed."""

    port: CardPort
    ends: tuple[QueuePairEnd, ...]
    gone: tuple[int, ...]


class ConnectAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The owner's answer: its ends, in the same order, and how its card addresses the buffer."""

    port: CardPort
    here: Gid  # address of the owner's port
    there: Gid  # address of the requester's port
    ends: tuple[QueuePairEnd, ...]
    rkey: int
    shift: int  # offset from an address of the owner to the address that its card uses


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ConnectRequest).decode
decode_answer = msgspec.msgpack.Decoder(ConnectAnswer).decode
