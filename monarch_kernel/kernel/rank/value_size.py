"""Compute lower bounds for the size of a value without copying it, to decide whether a cell sends and shows it.

Pure.
"""

from __future__ import annotations

import reprlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, cast

_FLAT = (str, bytes, bytearray, memoryview)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_SCALARS = (int, float, complex, bool, type(None), type)
#: The maximum number of objects visited; the rest are not counted.
_MOST = 20_000


def size_at_least(value: Any, limit: int) -> int:
    """Return a lower bound for the number of bytes in `value`. Stop counting beyond `limit`.

    Counts strings, bytes and objects with `nbytes` (arrays, tensors), including those inside containers and attributes
    of objects (modules and their parameters).
    """
    return _total((size for _one, size in _parts(value, attributes=True)), limit)


def text_at_least(value: Any, limit: int) -> int:
    """Return a lower bound for the length of the strings in `repr(value)`. Stop counting beyond `limit`."""
    return _total((size for one, size in _parts(value, attributes=False) if isinstance(one, _FLAT)), limit)


def shortened(value: Any, limit: int) -> str:
    """Return `repr(value)` in at most about `limit` characters, without building a long one in full."""
    if isinstance(value, _FLAT):
        if len(value) <= limit:
            return repr(value)
        unit = "characters" if isinstance(value, str) else "bytes"
        head = bytes(value[:limit]) if isinstance(value, memoryview) else value[:limit]
        return f"{head!r}… ({len(value):,} {unit})"
    try:
        text = _brief(limit).repr(value) if isinstance(value, (*_CONTAINERS, dict)) else repr(value)
    except Exception as error:  # user code
        return f"<{type(value).__qualname__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _brief(limit: int) -> reprlib.Repr:
    brief = reprlib.Repr()
    brief.maxlist = brief.maxtuple = brief.maxdict = brief.maxset = brief.maxfrozenset = brief.maxdeque = 20
    brief.maxstring = brief.maxother = max(60, limit // 20)
    return brief


def _total(sizes: Iterable[int], limit: int) -> int:
    total = 0
    for size in sizes:
        total += size
        if total > limit:
            break
    return total


def _parts(value: Any, *, attributes: bool) -> Iterator[tuple[Any, int]]:
    """Yield the objects in `value`, beginning with `value` itself, and the bytes that each holds itself."""
    seen: set[int] = set()
    todo: deque[Any] = deque([value])
    while todo and len(seen) < _MOST:
        one = todo.popleft()
        if isinstance(one, _SCALARS) or id(one) in seen:
            continue
        seen.add(id(one))
        held = len(one) if isinstance(one, _FLAT) else _bytes_of(one)
        if held is not None:
            yield one, held
        elif isinstance(one, dict):
            yield one, sys.getsizeof(one)
            todo.extend(islice(one.keys(), _MOST))
            todo.extend(islice(one.values(), _MOST))
        elif isinstance(one, _CONTAINERS):
            yield one, sys.getsizeof(one)
            todo.extend(islice(cast("Iterable[Any]", one), _MOST))
        elif attributes:
            todo.append(getattr(one, "__dict__", None))


def _bytes_of(one: Any) -> int | None:
    try:
        size = getattr(one, "nbytes", None)
    except Exception:  # a property in user code
        return None
    return size if isinstance(size, int) and not isinstance(size, bool) else None
