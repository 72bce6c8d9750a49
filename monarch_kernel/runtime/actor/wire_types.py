"""The types that the actor runtime sends and receives: links, message bodies, and messages that differ by rank."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from monarch_kernel.protocol.messages import Call, Death, StopActor
from monarch_kernel.protocol.serialize import Apart
from monarch_kernel.runtime.node.future import Future


class MessageLink(Protocol):
    """The part of a link that the actor runtime uses: its peer, and a way to send.

    Every ``PeerLink`` of a node has it.
    """

    @property
    def peer(self) -> str:
        """The id of the proc at the other end."""
        ...

    def send(self, header: bytes, body: object = b"") -> None:
        """Send a message; the body is bytes-like, or a list of bytes-like pieces."""
        ...


class LocalLink:
    """Replaces a link when this process sends a request to itself; an answer resolves the future, if there is one."""

    peer = ""

    def __init__(self, future: Future[object] | None = None) -> None:
        self._future = future

    def send(self, header: bytes, body: object = b"") -> None:
        """Take the answer."""
        if self._future is not None:
            self._future._resolve(None)


class RankedMessage(Protocol):
    """A message that goes to all ranks of a target, with the rank of each in its header."""

    rank: int


#: A message for an actor that exists.
ActorMessage: TypeAlias = Call | StopActor
#: The result of ``pickled``: one piece, or several that include the out-of-band buffers.
Pickled: TypeAlias = bytes | list[Any]
#: The body of a message: pickled, in one piece or several, with its buffers included or separate.
Body: TypeAlias = bytes | bytearray | memoryview | list[Any] | Apart
#: The body of a reply. A death that is known in this process needs no encoding.
ReplyBody: TypeAlias = Body | Death
#: The sizes of the out-of-band buffers of a body.
Buffers: TypeAlias = tuple[int, ...]
