"""How large a value is at least, found without copying it: what decides whether a cell sends and shows it. Pure."""

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
#: How many objects are looked at; what lies deeper is not counted.
_MOST = 20_000


def size_at_least(value: Any, limit: int) -> int:
    """A lower bound of the bytes that `value` holds; it stops looking beyond `limit`.

    Strings, bytes, whatever has `nbytes` (arrays, tensors), and these inside of containers and of attributes of objects
    (modules and their parameters) are counted.
    """
    return _total((size for _one, size in _parts(value, attributes=True)), limit)


def text_at_least(value: Any, limit: int) -> int:
    """A lower bound of the characters that `repr` makes of the strings in `value`; it stops looking beyond `limit`."""
    return _total((size for one, size in _parts(value, attributes=False) if isinstance(one, _FLAT)), limit)


def shortened(value: Any, limit: int) -> str:
    """`repr(value)` in about `limit` characters at most, made without the whole where that is long."""
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
    """Objects inside of `value`, itself first, with what each holds by itself (bytes)."""
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
    except Exception:  # a property of user code
        return None
    return size if isinstance(size, int) and not isinstance(size, bool) else None
