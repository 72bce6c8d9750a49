"""Where the data plane finds this process's node: the actor system, which lies above it, tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.runtime.node.node import Node

_source: Callable[[], Node] | None = None


def provide(source: Callable[[], Node]) -> None:
    """Called by the actor system when it is imported: ``source()`` gives the node, made now if there is none."""
    global _source
    _source = source


def current_node() -> Node:
    """This process's node."""
    if _source is None:
        raise RuntimeError("the data plane needs the actor system: import monarch_kernel.rdma")
    return _source()
