"""The future of fetched values: `FetchedValues`."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_kernel.runtime.mesh.rankset import format_points
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh
from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.errors import RanksDifferWarning
from monarch_kernel.runtime.tensor.wire import digest

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


class FetchedValues:
    """A future of the values of one rank. ``get()`` (or ``result()``) blocks, ``await`` does not."""

    def __init__(
        self,
        engine: TensorEngine,
        mesh: TensorMesh,
        call: Any,
        flat: list[object],
        tree: Any,
        positions: list[int],
        rank: int,
        why: str,
    ) -> None:
        self._engine = engine
        self._mesh = mesh
        self._call = call
        self._flat = flat
        self._tree = tree
        self._positions = positions
        self._rank = rank
        self._why = why
        self._counted = not why

    @classmethod
    def of_call(cls, mesh: TensorMesh, call: object, rank: int, why: str) -> FetchedValues:
        """Create the future of the result of a function that was called on the ranks."""
        return cls(mesh.engine, mesh, call, [None], tree_flatten(0)[1], [0], rank, why)

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the values.

        Args:
            timeout: seconds; None waits for values, a failure or a death.

        Raises:
            RemoteException: an operation that they depend on has failed.
            DeviceMeshError: a rank of the mesh has died.
            TimeoutError: the values have not arrived in time; ``get`` can be called again.
        """
        __tracebackhide__ = True
        if not self._counted:
            self._engine.plan.synchronised(self._why)
            self._counted = True
        return self._found(list(self._engine.answer(self._mesh, self._call, timeout).values()))

    def _found(self, answers: list[Any]) -> Any:
        flat = list(self._flat)
        for position, value in zip(self._positions, answers[self._rank]):
            flat[position] = value
        return tree_unflatten(flat, self._tree)

    result = get

    def done(self) -> bool:
        """Return whether ``get`` would return (or raise) at once."""
        return self._call.done()

    def __await__(self) -> Generator[Any, None, Any]:
        future = self._call

        async def wait() -> Any:
            try:
                await future
            except Exception:
                pass
            return self.get()

        return wait().__await__()


class ComparedValues(FetchedValues):
    """Values of one rank that the program uses for all ranks. A warning names a rank whose values differ."""

    def _found(self, answers: list[Any]) -> object:
        mine = [digest(value) for value in answers[self._rank]]
        others = [rank for rank, theirs in enumerate(answers) if rank != self._rank and theirs != mine]
        file, line = frames.program_line()
        if others and (file, line) not in self._engine.lines_told:
            self._engine.lines_told.add((file, line))
            extent = self._mesh.procs.extent
            other = ", ".join(f"{label}={at}" for label, at in extent.point(others[0]).items())
            warnings.warn_explicit(
                f"{self._why} gives the value of {format_points([self._rank], extent)}: "
                f"{format_points(others, extent, limit=8)} of mesh {self._mesh.name} hold other values. "
                f"fetch_shard(t, {other}).result() takes another one, t.reduce(...) combines them (said once per line)",
                RanksDifferWarning,
                file,
                line or 1,
            )
        return super()._found(answers)


class FetchedMesh(FetchedValues):
    """A future of a function's results on every rank. ``get()`` returns a ``ValueMesh``."""

    def __init__(self, mesh: TensorMesh, call: Any, why: str) -> None:
        super().__init__(mesh.engine, mesh, call, [], None, [], 0, why)

    def _found(self, answers: list[Any]) -> object:
        return ValueMesh(self._mesh.procs.extent, [value for (value,) in answers])
