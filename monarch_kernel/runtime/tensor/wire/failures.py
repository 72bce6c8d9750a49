"""A failed operation: in place of its results on the rank, and as the answer to a question that depends on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class FailedValue:
    """In place of a value that an operation did not give.

    Attributes:
        record: the number of the record that failed first; -1 if the value was lost with a process.
        rank: where.
        text: the traceback there.
        lost: whether it was on a process that has died.
        steps: of a recorded sequence, the step that failed; of a sequence within one, the steps to it.
        of_peer: whether the rank only waited in a collective for another one that failed.
        nonfinite: whether it was a watch that found a NaN or Inf; the values are there.
    """

    record: int
    rank: int
    text: str
    lost: bool = False
    steps: tuple[int, ...] = ()
    of_peer: bool = False
    nonfinite: bool = False

    def packed(self) -> bytes:
        """As ranks exchange it."""
        text = self.text.encode(errors="backslashreplace").decode()  # it may hold lone surrogates
        return msgspec.msgpack.encode(replace(self, text=text))

    @staticmethod
    def unpacked(data: bytes) -> FailedValue:
        """What `packed` gave.

        Raises:
            msgspec.DecodeError: it is something else.
        """
        return msgspec.msgpack.decode(data, type=FailedValue)


class OperationFailed(Exception):
    """Raised by endpoints that are asked for a failed value, so that the call ends without waiting for other ranks."""

    def __init__(self, failed: FailedValue) -> None:
        super().__init__(failed.text)
        self.failed = failed
        self.of_peer = failed.of_peer

    def __reduce__(self) -> tuple[Any, ...]:
        return OperationFailed, (self.failed,)
