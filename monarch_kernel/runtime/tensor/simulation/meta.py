"""``set_meta``: words that a program adds to the operations of a block, which traces of simulations show."""

from __future__ import annotations

import contextvars
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_meta: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("monarch_simulation_meta", default=())


@contextmanager
def set_meta(new_value: Any) -> Generator[None]:
    """Add a word to the names of operations on simulated meshes in this block: ``with set_meta("forward"):``."""
    token = _meta.set((*_meta.get(), new_value))
    try:
        yield
    finally:
        _meta.reset(token)


def current_meta() -> tuple[Any, ...]:
    """The words of the blocks that are open, the outermost first."""
    return _meta.get()
