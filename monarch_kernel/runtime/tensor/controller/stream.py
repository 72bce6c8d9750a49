"""`Stream`: an order of operations. Each rank runs every stream on a thread of its own, so streams overlap."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from monarch_kernel.runtime.tensor.rank.worker import TensorWorker

if TYPE_CHECKING:
    from monarch_kernel.runtime.mesh.shape import Region
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine


_numbers = itertools.count()


class Stream:
    """An order of operations, on every mesh that uses it.

    Operations of one stream run in the order in which they were issued; those of two streams do so at the same time,
    and a tensor of one is used in the other by `borrow`.

    Args:
        name: what errors and tools call it.

    Attributes:
        number: what ranks know it by; two streams may have one name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_numbers)
        self._workers: weakref.WeakKeyDictionary[TensorEngine, Any] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"

    def workers_of(self, engine: TensorEngine, region: Region | None = None) -> Any:
        """Its workers in the world of an engine, or those of a region of it; they are spawned when first needed."""
        workers = self._workers.get(engine)
        if workers is None:
            with engine.lock:
                engine.flush()
                workers = engine.spawn_workers(self, TensorWorker)
                self._workers[engine] = workers
        return workers if region is None else workers._new_with_region(region)


#: Where operations go if nothing else is said.
MAIN = Stream("main")
