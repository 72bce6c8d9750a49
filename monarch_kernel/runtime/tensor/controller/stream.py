"""`Stream`: an order of operations. Each rank runs every stream on a thread of its own, so streams overlap."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from monarch_kernel.runtime.tensor.rank.tensor_executor import TensorExecutor

if TYPE_CHECKING:
    from monarch_kernel.runtime.mesh.shape import Region
    from monarch_kernel.runtime.tensor.controller.borrowing import Borrow
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.controller.handle import Tensor


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

    #: What `activate` does: which mesh is active is known elsewhere.
    _activation: ClassVar[Callable[[Stream], AbstractContextManager[Stream]]]

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_numbers)
        self._workers: weakref.WeakKeyDictionary[TensorEngine, Any] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"

    def activate(self) -> AbstractContextManager[Stream]:
        """``with stream.activate():`` operations on the mesh that is active run in this stream."""
        return type(self)._activation(self)

    def borrow(self, tensor: Tensor, mutable: bool = False) -> tuple[Tensor, Borrow]:
        """A tensor of another stream, for use in this one until ``borrow.drop()``.

        Operations on it wait for those that gave it in its own stream, and once it is dropped, later ones there wait
        for those here. Until then its own stream may not write it, or, if it is lent `mutable`, not use it at all.

        Raises:
            BorrowError: it is lent in a way that excludes this.
        """
        return tensor._spec.mesh.lend(tensor, self, mutable)

    def workers_of(self, engine: TensorEngine, region: Region | None = None) -> Any:
        """Its workers in the world of an engine, or those of a region of it; they are spawned when first needed."""
        workers = self._workers.get(engine)
        if workers is None:
            with engine.lock:
                engine.flush()
                workers = engine.spawn_workers(self, TensorExecutor)
                self._workers[engine] = workers
        return workers if region is None else workers._new_with_region(region)


#: Where operations go if nothing else is said.
MAIN = Stream("main")
