"""Arrays of every shape and stride, by name, so that an actor can make the same one elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _filled(shape: tuple[int, ...], dtype: str) -> Array:
    return np.arange(1, int(np.prod(shape)) + 1).astype(dtype).reshape(shape)


#: name -> (base array, view of it). All views but "wide" have 240 bytes.
SHAPES: dict[str, Callable[[], tuple[Array, Array]]] = {}


def shape(name: str, base: tuple[int, ...], dtype: str, view: Callable[[Array], Array]) -> None:
    """Add one."""

    def make() -> tuple[Array, Array]:
        whole = _filled(base, dtype)
        return whole, view(whole)

    SHAPES[name] = make


shape("bytes", (240,), "u1", lambda a: a)
shape("float32 matrix", (6, 10), "f4", lambda a: a)
shape("one element of 240 bytes", (1,), "V240", lambda a: a)
shape("transposed", (10, 6), "f4", lambda a: a.T)
shape("fortran", (10, 6), "f4", lambda a: np.asfortranarray(a))
shape("every other", (60,), "i8", lambda a: a[::2])
shape("backwards", (30,), "i8", lambda a: a[::-1])
shape("backwards every third", (90,), "i8", lambda a: a[::-3])
shape("columns", (12, 9), "f4", lambda a: a[:, 2:7])
shape("inner block", (5, 7, 9), "u2", lambda a: a[1:5, 2:7, 3:9])
shape("permuted", (4, 5, 12), "u1", lambda a: a.transpose(2, 0, 1))
shape("fields", (30, 3), "f8", lambda a: a[:, 1])
shape("odd addresses", (241,), "u1", lambda a: a[1:].view("u4"))
shape("times", (30,), "M8[s]", lambda a: a)


def contents(view: Array) -> bytes:
    """The bytes that a copy of it has."""
    return np.ascontiguousarray(view).tobytes()
