"""References to what a new source has made once more go to what was there before; names imported from it follow it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from workspace_sync.reload.journal import Journal

#: Values that are equal by chance: that a name has one of them does not tell where it was imported from.
_COMMON = (int, float, complex, str, bytes, bool, type(None), tuple, frozenset, ModuleType)


def redirect(pairs: Mapping[int, tuple[Any, Any]], journal: Journal, skip: Iterable[Any]) -> list[str]:
    """Replace references to new objects by references to old ones, where they are kept in containers that can change.

    Args:
        pairs: by the id of the new object: it, and the old one.
        skip: containers of the caller.

    Returns:
        What could not be replaced, in words.
    """
    # Four references are those of the module, the pair, this loop and the call. Few have more, and the heap is large.
    shared = [new for new, _old in pairs.values() if sys.getrefcount(new) > 4]
    if not shared:
        return []
    skipped = {id(each) for each in skip} | {id(pairs), id(shared)} | {id(pair) for pair in pairs.values()}
    left: list[str] = []
    for holder in gc.get_referrers(*shared):
        if id(holder) in skipped or isinstance(holder, FrameType):
            continue
        if isinstance(holder, dict):
            _in_dict(holder, pairs, journal)
        elif isinstance(holder, list):
            for at, value in enumerate(holder):
                if id(value) in pairs:
                    journal.note(lambda holder=holder, at=at, value=value: holder.__setitem__(at, value))
                    holder[at] = pairs[id(value)][1]
        elif isinstance(holder, set):
            for value in [value for value in holder if id(value) in pairs]:
                holder.discard(value)
                holder.add(pairs[id(value)][1])
        elif isinstance(holder, CellType):
            value = holder.cell_contents
            if id(value) in pairs:
                holder.cell_contents = pairs[id(value)][1]
        elif id(type(holder)) in pairs:
            old = pairs[id(type(holder))][1]
            try:
                holder.__class__ = old
            except TypeError:
                left.append(f"objects of class {old.__qualname__} that were made at import are of a class of their own")
    return list(dict.fromkeys(left))


def _in_dict(holder: dict[Any, Any], pairs: Mapping[int, tuple[Any, Any]], journal: Journal) -> None:
    owner = next((each for each in gc.get_referrers(holder) if isinstance(each, type)), None)
    for key, value in list(holder.items()):
        if id(value) in pairs:
            if owner is not None and vars(owner).get(key) is value:
                journal.set_in_class(owner, key, pairs[id(value)][1])  # past its dict, whose lookups are cached
            else:
                journal.set_item(holder, key, pairs[id(value)][1])
        if id(key) in pairs:
            journal.note_dict(holder)
            holder[pairs[id(key)][1]] = holder.pop(key)


def follow_names(
    module: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    importers: Mapping[str, tuple[dict[str, Any], Mapping[str, str]]],
    journal: Journal,
) -> list[str]:
    """Give modules that have imported names from a module the new values of these names.

    Args:
        module: the name of the module that has changed.
        before, after: its namespace.
        importers: by name: the namespace of another module, and what its source imports from this one: the name there
            by its own name for it.

    Returns:
        The names that have followed, as ``importer.name``.
    """
    changed = {name: (old, after[name]) for name, old in before.items() if name in after and after[name] is not old}
    objects = {id(old): new for old, new in changed.values() if not isinstance(old, _COMMON)}
    followed: list[str] = []
    for importer, (namespace, names) in importers.items():
        if importer == module:
            continue
        for own, value in list(namespace.items()):
            if id(value) in objects:
                new = objects[id(value)]
            elif names.get(own) in changed and value is changed[names[own]][0]:
                new = changed[names[own]][1]
            else:
                continue
            journal.set_item(namespace, own, new)
            followed.append(f"{importer}.{own}")
    return followed


def is_own(value: Any, module: str) -> bool:
    """Whether a value is a function or class that a module defines."""
    return isinstance(value, FunctionType | type) and value.__module__ == module
