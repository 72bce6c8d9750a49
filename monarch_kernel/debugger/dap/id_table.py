"""Assign the ids by which a front end refers to objects of ranks: threads, frames, and values that have children.

All kinds share one counter that begins at `BASE`, so no id collides with one of the kernel's own debugger, which begins
at 1 and counts slowly. No id is reused: a front end may request an object that no longer exists, and must not receive
another one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from monarch_kernel.debugger.events import Key

BASE = 1_000_000


@dataclass(frozen=True, slots=True)
class RankThread:
    """A thread of a rank. `seat` 0 is the first that ever stopped; it represents a rank without stopped threads."""

    mesh: str
    rank: int
    seat: int


@dataclass(frozen=True, slots=True)
class FrameOf:
    """A frame of a stop; index 0 is the innermost."""

    key: Key
    index: int


@dataclass(frozen=True, slots=True)
class ValueOf:
    """A value of a stop that has children.

    Attributes:
        key: the stop.
        ref: the rank's own number for it (`Variable.ref`).
        indexed: how many of its children have an index; they come first.
        scope: whether it is a scope, whose children are variables.
    """

    key: Key
    ref: int
    indexed: int = 0
    scope: bool = False


Named = RankThread | FrameOf | ValueOf
"""The objects that an id may refer to."""


class IdTable:
    """All ids. Not thread-safe: `StopTable` holds its lock."""

    def __init__(self) -> None:
        self._count = itertools.count(BASE)
        self._threads: dict[RankThread, int] = {}
        self._seats: dict[tuple[str, int], dict[int, int]] = {}
        self._frame_ids: dict[FrameOf, int] = {}
        self._value_ids: dict[ValueOf, int] = {}
        self._named: dict[int, Named] = {}

    def thread(self, mesh: str, rank: int, ident: int | None = None) -> int:
        """Return the id of a thread. It stays the same from stop to stop.

        Args:
            mesh: the mesh of the thread.
            rank: the rank of the thread.
            ident: distinguishes it from other threads of the rank; None for the rank as a whole.
        """
        seat = 0
        if ident is not None:
            seats = self._seats.setdefault((mesh, rank), {})
            seat = seats.setdefault(ident, len(seats))
        thread = RankThread(mesh, rank, seat)
        return self._threads.get(thread) or self._threads.setdefault(thread, self._new(thread))

    def frame(self, key: Key, index: int) -> int:
        """Return the id of a frame."""
        frame = FrameOf(key, index)
        return self._frame_ids.get(frame) or self._frame_ids.setdefault(frame, self._new(frame))

    def value(self, key: Key, ref: int, indexed: int = 0, scope: bool = False) -> int:
        """Return the id of a value's children; 0 if it has none."""
        if not ref:
            return 0
        value = ValueOf(key, ref, indexed, scope)
        return self._value_ids.get(value) or self._value_ids.setdefault(value, self._new(value))

    def named(self, number: object) -> Named | None:
        """Return the object of an id; None if it is gone, or the id was never assigned."""
        return self._named.get(number) if isinstance(number, int) else None

    def renew_frames(self, key: Key) -> None:
        """Assign new ids to the frames of a stop when they are next requested; the old ids stay valid."""
        self._frame_ids = {frame: number for frame, number in self._frame_ids.items() if frame.key != key}

    def forget_stop(self, key: Key) -> None:
        """Forget the frames and values of a stop that is over."""
        self.renew_frames(key)
        self._value_ids = {value: number for value, number in self._value_ids.items() if value.key != key}
        self._named = {
            number: named for number, named in self._named.items() if isinstance(named, RankThread) or named.key != key
        }

    def forget_rank(self, mesh: str, rank: int) -> list[int]:
        """Forget the threads of a rank that has ended. Return their ids."""
        gone = [number for thread, number in self._threads.items() if (thread.mesh, thread.rank) == (mesh, rank)]
        self._threads = {thread: number for thread, number in self._threads.items() if number not in gone}
        self._seats.pop((mesh, rank), None)
        for number in gone:
            del self._named[number]
        return gone

    def _new(self, named: Named) -> int:
        number = next(self._count)
        self._named[number] = named
        return number
