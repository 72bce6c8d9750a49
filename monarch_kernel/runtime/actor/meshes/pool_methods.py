"""Independent work over the processes of a mesh, as methods of `ProcMesh`; the code is loaded when it is first used."""

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
        """Call ``function(item)`` for every item, each on whichever process is free.

        The result is a ``monarch_kernel.pool.Mapping``. Iterating it gives the values in the order of the items;
        ``as_completed()`` gives ``(number, value)`` pairs as they come; ``get()`` (or ``await``) gives the list of all.
        The function is sent once per process. Items of a process that dies go to others.

        Args:
            function: called with an item, or with one of each iterable, in a process of the mesh.
            iterables: read only so far ahead as ``ahead`` says, so they may be endless.
            chunk: how many items are sent at once; for functions that take less than a millisecond.
            ahead: how many items may be read beyond the last value that was taken (default: 16 chunks per process,
                256 at least).
            return_errors: what the function raises for an item takes the place of its value. Else it is raised where
                the value would have been, with a note that names the item, and what has not begun is cancelled.

        Raises:
            TypeError: the function cannot be pickled, or something given is not iterable.
            ValueError: ``chunk`` or ``ahead`` is less than 1.
        """
        return pool_functions().start_map(
            self, function, iterables, chunk=chunk, ahead=ahead, return_errors=return_errors
        )

    def submit(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` on whichever process is free; a future of its value.

        The future is one of ``concurrent.futures`` (its ``wait`` and ``as_completed`` take it) that can be awaited, and
        that has ``get()``, ``rank`` and ``interrupt()``.
        """
        if not callable(function):
            raise TypeError(f"submit(function, ...): {function!r} cannot be called")
        return pool_functions().pool_of(self).submit(function, args, kwargs)

    def scatter(self: Any, name: str, values: Any) -> ValueMesh[int]:
        """Cut ``values`` into one piece per process, and set each as the variable ``name`` there.

        The variables are those of ``__main__``, which cells of ``%%mesh`` see. The pieces are slices of a list, a
        tuple, a string, an array or a tensor (along its first dimension) in rank order, and as equal as can be. Each
        process gets its own piece only.

        Returns:
            How many elements each process has.
        """
        return pool_functions().scatter(self, name, values)

    def gather(self: Any, name: str) -> Any:
        """The values of the variable ``name`` of all processes, joined in rank order: what ``scatter`` has cut.

        Lists, tuples, strings, bytes, NumPy arrays and tensors can be joined.
        """
        return pool_functions().gather(self, name)
