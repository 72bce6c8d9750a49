"""Count the costs of sharded operations on this rank: layout changes, and operations that ran on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor


class Counts:
    """Counters of this process.

    Attributes:
        moves: how often DTensor changed the layout of an input.
        bytes: how many bytes this rank sent for this.
        by_record: the events, by the number of the record: ``(redistributions by "from -> to", fallbacks by name,
            bytes)``.
        record: returns the number of the running record.
        tell: called when an operation ran on whole tensors, with its name, the number of its definition and the record.
    """

    def __init__(self) -> None:
        self.moves = 0
        self.bytes = 0
        self.record: Callable[[], int] = lambda: -1
        self.by_record: dict[int, tuple[dict[str, int], dict[str, int], list[int]]] = {}
        self.tell: Callable[[str, int, int], None] | None = None

    def moved(self, source: object, target: object, size: int) -> None:
        """Count a layout change by DTensor."""
        self.moves += 1
        self.bytes += size
        moved, _, total = self._at()
        key = f"{short(source)} -> {short(target)}"
        moved[key] = moved.get(key, 0) + 1
        total[0] += size

    def fell_back(self, name: str, definition: int) -> None:
        """Count an operation that is about to run on whole tensors."""
        self.moves += 1
        _, fallbacks, _ = self._at()
        fallbacks[name] = fallbacks.get(name, 0) + 1
        if self.tell is not None:
            self.tell(name, definition, self.record())

    def take(self) -> dict[int, tuple[dict[str, int], dict[str, int], list[int]]]:
        """Return and reset the events since the last call."""
        taken, self.by_record = self.by_record, {}
        return taken

    def _at(self) -> tuple[dict[str, int], dict[str, int], list[int]]:
        record = self.record()
        found = self.by_record.get(record)
        if found is None:
            found = self.by_record[record] = ({}, {}, [0])
            if len(self.by_record) > KEPT:
                del self.by_record[next(iter(self.by_record))]
        return found


#: The maximum number of records that are kept until a query.
KEPT = 10_000

counts = Counts()


def short(placements: Any) -> str:
    """Format placements for errors and plans: ``S(0)R``."""
    shown: list[str] = []
    for p in placements:
        shown.append(f"S({p.dim})" if p.is_shard() else "R" if p.is_replicate() else "P")
    return "".join(shown)


def count_redistributions() -> None:
    """Start counting the layouts that DTensor changes by itself in this process."""
    dispatcher: Any = DTensor._op_dispatcher
    original = type(dispatcher).redistribute_local_args
    if "redistribute_local_args" in vars(dispatcher):
        return

    def counted(op_info: Any, suggested: Any, use_value: bool) -> None:
        for given, wanted in zip(op_info.flat_args_schema, _leaves(suggested.args_schema)):
            if hasattr(given, "placements") and hasattr(wanted, "placements") and given.placements != wanted.placements:
                size = given.tensor_meta.dtype.itemsize
                for n in given.shape:
                    size *= n
                counts.moved(given.placements, wanted.placements, size)
        original(op_info, suggested, use_value)

    dispatcher.redistribute_local_args = counted


def _leaves(tree: object) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    return [tree]
