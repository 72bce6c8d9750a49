"""The tensor engines of this controller, and the lines that issued their records. Imports no torch."""

from __future__ import annotations

import weakref
from typing import Any

_engines: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def add_engine(key: str, engine: Any) -> None:
    """Make an engine known to tools, under the key that its ranks have for it."""
    _engines[key] = engine


def all_engines() -> list[Any]:
    """The engines of this process, oldest first."""
    return list(_engines.values())


def finish_operations(procs: Any) -> None:
    """Wait until the ranks have run the operations issued so far, if tensors of theirs are shared with actors or cells.

    Called before a cell runs, so that it sees what the program has done to such tensors.

    Args:
        procs: the proc mesh (or slice).
    """
    for engine in list(_engines.values()):
        if engine.shares and engine.key == procs._mesh_uid:
            engine.finish()


def issued_at(engine: str, record: int) -> tuple[str, int, str] | None:
    """File, line and function of the controller that issued a record; None if that is not known, or no longer."""
    found = _engines.get(engine)
    return None if found is None else found.place_of(record)
