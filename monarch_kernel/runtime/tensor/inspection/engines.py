"""List the tensor engines of this controller, and the lines that issued their records. Does not import torch."""

from __future__ import annotations

import weakref
from typing import Any

_engines: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def add_engine(key: str, engine: Any) -> None:
    """Register an engine for tools, under its key on the ranks."""
    _engines[key] = engine


def all_engines() -> list[Any]:
    """Return the engines of this process, oldest first."""
    return list(_engines.values())


def finish_operations(procs: Any) -> None:
    """Wait until the ranks have run all issued operations, if they share tensors with actors or cells.

    This is called before a cell runs, so that the cell sees the program's writes to such tensors.

    Args:
        procs: the proc mesh (or slice).
    """
    for engine in list(_engines.values()):
        if engine.shares and engine.key == procs._mesh_uid:
            engine.finish()


def issued_at(engine: str, record: int) -> tuple[str, int, str] | None:
    """Return the file, line and function of the controller that issued a record; None if unknown or no longer known."""
    found = _engines.get(engine)
    return None if found is None else found.place_of(record)
