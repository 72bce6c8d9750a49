"""Where facts come from, one module for each place that knows some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from monarch_kernel.watch.facts import Fact


class Give(Protocol):
    """Takes facts, which become known together; any thread may call it."""

    def __call__(self, *facts: Fact) -> None: ...


#: A source, which is opened when the first watch opens: it gets what takes its facts, and returns a function that ends
#: it. It may give facts on any thread, and gives none once it has ended.
Source: TypeAlias = Callable[[Give], Callable[[], None]]
