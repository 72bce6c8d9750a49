"""Connections that have not proved a key yet: their limit, and which one is closed for the next.

Every connection is accepted, because a rejected one could be a controller. When the limit is reached, the oldest is
closed, whatever it has said: a peer with a key says as little at first as an attacker. One that has proved its key is
never closed, and is here for a last moment only. One address may have at most half of all connections, so that it
cannot displace the others, however fast it connects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from monarch_kernel.runtime.node import descriptors

#: The most pending connections; also at most a quarter of this process's limit of descriptors.
MOST = 1024
_LEAST = 32


def room() -> int:
    """How many pending connections this process may have."""
    return max(_LEAST, min(MOST, descriptors.limit() // 4))


class PendingConnection(Protocol):
    """One pending connection."""

    origin: str  # the unit by which connections are counted

    @property
    def proved(self) -> bool:
        """Whether it has proved a key, and has only its greeting to send."""
        ...


G = TypeVar("G", bound=PendingConnection)


class PendingConnections(Generic[G]):
    """The pending connections, the oldest first.

    Args:
        most: their limit.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.most_of_one = max(1, most // 2)
        self._there: dict[G, None] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._there)

    def __iter__(self) -> Iterator[G]:
        return iter(tuple(self._there))

    def add(self, guest: G) -> G | None:
        """Add a connection. Returns the one to close for it, if any: itself, if all others have proved a key."""
        goes = None
        if self._counts.get(guest.origin, 0) >= self.most_of_one:
            goes = self._oldest(guest.origin) or guest
        elif len(self._there) >= self.most:
            goes = self._oldest("") or guest
        self._there[guest] = None
        self._counts[guest.origin] = self._counts.get(guest.origin, 0) + 1
        return goes

    def remove(self, guest: G) -> None:
        """Remove a connection that has ended or has proved its key."""
        if guest in self._there:
            del self._there[guest]
            self._counts[guest.origin] -= 1
            if not self._counts[guest.origin]:
                del self._counts[guest.origin]

    def oldest(self) -> G | None:
        """The connection to close when room is needed for another reason, if any."""
        return self._oldest("")

    def _oldest(self, origin: str) -> G | None:
        """The oldest connection (of an origin) that has not proved a key."""
        return next((guest for guest in self._there if origin in ("", guest.origin) and not guest.proved), None)
