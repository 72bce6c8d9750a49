"""Independent work over the processes of a mesh, as methods of `ProcMesh`; the pool is loaded on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from monarch_kernel.runtime.actor.extensions import pool_functions
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh


class PoolMethods:
    """`map`, `submit`, `scatter` and `gather` of a proc mesh (or slice)."""

    def map(
        self: Any,
        function: Callable[..., Any],
        *iterables: Iterable[Any],
        chunk: int = 1,
        ahead: int | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Call ``function(item)`` for every item, each on any idle process.

        The result is a ``monarch_kernel.pool.Mapping``. Iterating it yields the values in the order of the items;
        ``as_completed()`` yields ``(number, value)`` pairs as they arrive; ``get()`` (or ``await``) returns a list of
        all values. The function is sent once per process. Items of a process that dies move to other processes.

        Args:
            function: called with an item, or with one of each iterable, in a process of the mesh.
            iterables: read ahead only by ``ahead`` items, so they may be endless.
            chunk: how many items are sent at once; raise it for functions that take less than a millisecond.
            ahead: how many items may be read beyond the last value taken (default: 16 chunks per process, and
                at least 256).
            return_errors: return the exception that the function raises for an item in place of its value. Otherwise
                it is raised in that place, with a note that names the item, and items that have not started are
                cancelled.

        Raises:
            TypeError: the function cannot be pickled, or an argument is not iterable.
            ValueError: ``chunk`` or ``ahead`` is less than 1.
        """
        return pool_functions().start_map(
            self, function, iterables, chunk=chunk, ahead=ahead, return_errors=return_errors
        )

    def submit(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` on any idle process; returns a future of its value.

        The future is a ``concurrent.futures.Future`` (``wait`` and ``as_completed`` accept it) that can also be awaited
        and has ``get()``, ``rank`` and ``interrupt()``.
        """
        if not callable(function):
            raise TypeError(f"submit(function, ...): {function!r} cannot be called")
        return pool_functions().pool_of(self).submit(function, args, kwargs)

    def scatter(self: Any, name: str, values: Any) -> ValueMesh[int]:
        """Split ``values`` into one piece per process, and set each piece as the variable ``name`` of its process.

        The variables are set in ``__main__``, where ``%%mesh`` cells run. The pieces are slices of a list, a tuple, a
        string, an array or a tensor (along its first dimension), in rank order and as equal in size as possible. Each
        process receives only its own piece.

        Returns:
            The number of elements on each process.
        """
        return pool_functions().scatter(self, name, values)

    def gather(self: Any, name: str) -> Any:
        """The values of the variable ``name`` of all processes, joined in rank order; the inverse of ``scatter``.

        Lists, tuples, strings, bytes, NumPy arrays and tensors can be joined.
        """
        return pool_functions().gather(self, name)
