"""The variables of a rank, for a person who looks at it while it runs: names, types, and values in short.

This function runs on a rank, on a thread other than its main thread.
"""

from __future__ import annotations

from typing import Any

from monarch_kernel.engines import engine
from monarch_kernel.kernel.rank import name_lookup
from monarch_kernel.kernel.rank.cell_activity import CellActivity
from monarch_kernel.kernel.rank.value_size import shortened

#: How many variables are listed, and how much of a value is shown (characters).
MOST, LONGEST = 200, 200


def variables_here() -> list[tuple[str, str, str]]:
    """Name, type and short value of the variables of cells, then of the attributes of actors: `trainer.loss`."""
    found: list[tuple[str, str, str]] = []
    shell = CellActivity.shell
    if shell is not None:
        names = shell.names
        found += [(name, *_described(names[name])) for name in name_lookup.variables(shell) if name in names]
    for uid, actor in engine().actors_here().items():
        if actor is None or getattr(type(actor), "__tool__", False):
            continue
        of = uid.rsplit("-", 1)[0]
        for name, value in list(getattr(actor, "__dict__", {}).items()):
            if not name.startswith("_"):
                found.append((f"{of}.{name}", *_described(value)))
    return found[:MOST]


def _described(value: Any) -> tuple[str, str]:
    kind = type(value).__name__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is not None and isinstance(shape, tuple) and shape:
        # Its elements may be on a GPU that computes: reading them would wait for it.
        return kind, f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    return kind, shortened(value, LONGEST)
