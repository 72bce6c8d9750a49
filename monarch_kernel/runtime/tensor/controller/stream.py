"""An order of operations: `Stream`. Each rank runs every stream on a separate thread, so streams overlap."""

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
    """An order of operations, common to every mesh that uses it.

    Operations of one stream run in the order in which they were issued. Operations of different streams run
    concurrently. To use a tensor of one stream in another, call `borrow`.

    Args:
        name: its name in errors and tools.

    Attributes:
        number: its identifier on the ranks; names need not be unique.
    """

    #: Implements `activate`: another module manages the active mesh.
    _activation: ClassVar[Callable[[Stream], AbstractContextManager[Stream]]]

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_numbers)
        self._workers: weakref.WeakKeyDictionary[TensorEngine, Any] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"

    def activate(self) -> AbstractContextManager[Stream]:
        """Run operations on the active mesh in this stream: ``with stream.activate():``."""
        return type(self)._activation(self)

    def borrow(self, tensor: Tensor, mutable: bool = False) -> tuple[Tensor, Borrow]:
        """Borrow a tensor of another stream for use in this stream until ``borrow.drop()``.

        Operations on it here wait for the operations that computed it in its own stream. After the drop, later
        operations in its own stream wait for the operations here. Until then, its own stream cannot write it, or, if it
        is lent `mutable`, cannot use it at all.

        Raises:
            BorrowError: an existing loan excludes this one.
        """
        return tensor._spec.mesh.lend(tensor, self, mutable)

    def workers_of(self, engine: TensorEngine, region: Region | None = None) -> Any:
        """Return its workers in an engine's world, or in a region of it. They are spawned on first use."""
        workers = self._workers.get(engine)
        if workers is None:
            with engine.lock:
                engine.flush()
                workers = engine.spawn_workers(self, TensorExecutor)
                self._workers[engine] = workers
        return workers if region is None else workers._new_with_region(region)


#: The default stream.
MAIN = Stream("main")
