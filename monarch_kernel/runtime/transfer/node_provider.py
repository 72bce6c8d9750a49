"""Provide the data plane with the node of this process, which belongs to the actor system above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.runtime.node.node import Node

_source: Callable[[], Node] | None = None


def provide(source: Callable[[], Node]) -> None:
    """Set the source of the node: ``source()`` returns it, and creates it if there is none.

    The actor system calls this.
    """
    global _source
    _source = source


def current_node() -> Node:
    """Return this process's node."""
    if _source is None:
        raise RuntimeError("the data plane needs the actor system: import monarch_kernel.rdma")
    return _source()
