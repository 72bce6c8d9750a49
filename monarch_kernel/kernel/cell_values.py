"""Values of cells that the notebook receives from ranks. They are unpickled on first use."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from monarch_kernel.actor import Extent, ValueMesh
from monarch_kernel.kernel.rank.executor import CellReply
from monarch_kernel.kernel.rank.sent_values import NONE


class Unsent:
    """A placeholder for a value that stays on its rank, because it is too large or cannot be pickled."""

    def __init__(self, shown: str, why: str) -> None:
        self.shown = shown
        self.why = why

    def __repr__(self) -> str:
        return f"{self.shown}  (not sent: {self.why})"


class _Shown:
    """A value that is not unpickled yet, represented by the rank's description of it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def value_of(reply: CellReply) -> object:
    """Return the value that a rank has sent, or a placeholder for it."""
    if reply.value is None:
        return Unsent(reply.shown, reply.unsent) if reply.unsent else None
    try:
        return pickle.loads(reply.value)
    except Exception as error:  # its class may not be importable here
        return Unsent("a value", f"it cannot be rebuilt here ({type(error).__name__}: {error})")


class _NotLoaded(Exception):
    """Unpickling requires a module that this process has not imported."""


class _Loaded(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module not in sys.modules:
            raise _NotLoaded(module)
        return super().find_class(module, name)


def _shown(reply: CellReply) -> object:
    """Return the value, or the rank's text for it if unpickling would import a module, which may take seconds."""
    if reply.value is None:
        return value_of(reply)
    try:
        return _Loaded(io.BytesIO(reply.value)).load()
    except _NotLoaded:
        return _Shown(reply.shown)
    except Exception:
        return value_of(reply)


class CellValues(ValueMesh[Any]):
    """The values of a cell's last expression, unpickled on first use.

    Displaying them imports no module: a tensor is displayed by the rank's description of it.
    """

    __slots__ = ("_rebuilt", "_replies")

    def __init__(self, shape: Extent, replies: Sequence[CellReply]) -> None:
        self._extent = shape
        self._replies = tuple(replies)
        self._rebuilt: tuple[object, ...] | None = None

    @property
    def _values(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]  # in place of a slot
        if self._rebuilt is None:
            self._rebuilt = tuple(map(value_of, self._replies))
            self._replies = ()  # their pickles would double the memory
        return self._rebuilt

    def to_show(self) -> ValueMesh[object]:
        """Return the values for display. Unused values that need an import are replaced by the ranks' texts."""
        return ValueMesh(self._extent, self._values if self._rebuilt is not None else map(_shown, self._replies))

    def __repr__(self) -> str:
        return repr(self.to_show())


def cell_values(shape: Extent, replies: Sequence[CellReply]) -> CellValues | None:
    """Return the values of a cell; None if it has no last expression, or if every value is None."""
    if not any(reply.has_value for reply in replies):
        return None
    if all(not reply.unsent and reply.value in (None, NONE) for reply in replies):
        return None
    return CellValues(shape, replies)


class RankValues(Mapping[int, Any]):
    """The values of the ranks on which a cell succeeded, unpickled on first use."""

    def __init__(self, replies: Mapping[int, CellReply]) -> None:
        self._replies = dict(sorted(replies.items()))
        self._rebuilt: dict[int, object] = {}

    def __getitem__(self, rank: int) -> object:
        if rank not in self._rebuilt:
            self._rebuilt[rank] = value_of(self._replies[rank])
        return self._rebuilt[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._replies)

    def __len__(self) -> int:
        return len(self._replies)

    def __repr__(self) -> str:
        return repr({rank: _shown(reply) for rank, reply in self._replies.items()})
