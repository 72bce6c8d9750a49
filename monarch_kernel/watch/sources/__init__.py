"""Sources of facts, one module per origin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from monarch_kernel.watch.facts import Fact


class Give(Protocol):
    """Accepts facts that become known together. Thread-safe."""

    def __call__(self, *facts: Fact) -> None: ...


#: A source is opened with the first watch. It gets a function that accepts facts, and returns a function that ends it.
#: It may report facts on any thread, but none after its end.
Source: TypeAlias = Callable[[Give], Callable[[], None]]
