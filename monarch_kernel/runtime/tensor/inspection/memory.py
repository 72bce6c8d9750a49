"""Show the memory of tensors on ranks, by the controller's line that made them, with their holders here: `memory`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from monarch_kernel.display.quantities import few, shown_location, source_line, text_size
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.borrowing import number_of
from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner
from monarch_kernel.runtime.tensor.inspection.running import all_engines
from monarch_kernel.runtime.tensor.rank.held import HeldValue, held_here

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine

#: The maximum length of a displayed source line (characters), and the maximum number of displayed holders.
_WIDTH, _NAMES = 50, 3


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """The values that one line of the program made and that still exist.

    Attributes:
        mesh: the name of their mesh.
        file, line, function: the line; "" and 0 if it is unknown.
        tensors: the number of values.
        nbytes: their bytes on each rank of the world.
        holders: names of variables that hold them here; "autograd, or an object without a name" for other holders; "no
            handle" for values that are about to be deleted, or that a recording keeps.
    """

    mesh: str
    file: str
    line: int
    function: str
    tensors: int
    nbytes: tuple[int, ...]
    holders: tuple[str, ...]


class TensorMemory(AsTable):
    """The memory of tensors on the ranks, by line, the largest first. Created by `memory`.

    Attributes:
        lines: one item for each line of the program. Shared memory counts for the line that created it.
    """

    __slots__ = ("lines",)

    def __init__(self, lines: Iterable[MemoryLine]) -> None:
        self.lines = tuple(sorted(lines, key=lambda each: -max(each.nbytes, default=0)))

    def table(self) -> TableView:
        """Return a table with one row for each line."""
        rows = [
            (
                each.mesh,
                shown_location(each.file, each.line) if each.file else "unknown",
                source_line(each.file, each.line, _WIDTH),
                str(each.tensors),
                text_size(max(each.nbytes, default=0)),
                _listed(each.holders),
            )
            for each in self.lines
        ]
        if not rows:
            return TableView((), (), "There are no tensors on ranks.")
        most = [sum(sizes) for sizes in zip(*(each.nbytes for each in self.lines))] if self._one_mesh() else []
        caption = f"{sum(each.tensors for each in self.lines):,} tensors on ranks"
        if most:
            even = "on each rank" if len(set(most)) == 1 else f"on rank {most.index(max(most))}, the most of all"
            caption += f", {text_size(max(most))} {even}"
        return TableView(("mesh", "made at", "", "tensors", "on a rank", "held by"), rows, caption, frozenset({3, 4}))

    def __repr__(self) -> str:
        return super().__repr__().rstrip("\n")

    def _one_mesh(self) -> bool:
        return len({(each.mesh, len(each.nbytes)) for each in self.lines}) == 1


def memory(of: object = None, *, names: Mapping[str, object] | None = None) -> TensorMemory:
    """Measure the memory of tensors on the ranks, by the program line that made them, and find their holders here.

    Each engine is queried once, in order with its operations, so the result includes values of pending operations.

    Args:
        of: a handle, or an object with handles (a module, an optimizer, a list), to which the result is limited. None:
            all.
        names: the objects, by name, that are searched for holders; by default the variables of ``__main__``.

    Raises:
        DeviceMeshError: a rank has just died; meshes that are known to have lost a rank are skipped.
        TypeError: `of` contains no handle.
    """
    names = vars(sys.modules["__main__"]) if names is None else names
    wanted: set[tuple[int, int]] | None = None
    if of is not None:
        found = [handle for handle, _ in _handles(of, "")]
        if not found:
            raise TypeError(f"memory(): there is no tensor of a mesh in this {type(of).__name__}")
        wanted = {(id(handle._spec.mesh.engine), number_of(handle._owner)) for handle in found}
    holders: dict[tuple[int, int], list[str]] = {}
    for name, value in list(names.items()):
        if not name.startswith("_"):
            for handle, path in _handles(value, name):
                holders.setdefault((id(handle._spec.mesh.engine), number_of(handle._owner)), []).append(path)
    owners = [each for each in gc.get_objects() if issubclass(type(each), ValueOwner)]
    lines: list[MemoryLine] = []
    for engine in all_engines():
        lines += _of_engine(engine, wanted, holders, owners)
    return TensorMemory(lines)


class _Sum:
    """The sums of one line."""

    def __init__(self, ranks: int) -> None:
        self.numbers: set[int] = set()
        self.nbytes = [0] * ranks
        self.holders: dict[str, None] = {}


def _of_engine(
    engine: TensorEngine,
    wanted: set[tuple[int, int]] | None,
    holders: dict[tuple[int, int], list[str]],
    owners: list[ValueOwner],
) -> list[MemoryLine]:
    meshes = [each for each in engine.meshes.values() if each.error is None]
    if not meshes or engine._closed or engine.world._stopped:
        return []
    mesh = max(meshes, key=lambda each: len(each.ranks))
    alive = _places(engine, owners)
    sums: dict[tuple[str, int, str], _Sum] = {}
    answers: list[list[HeldValue]] = engine.ask(mesh, held_here)
    for rank, values in enumerate(answers):
        counted: set[int] = set()
        for held in values:
            key = (id(engine), held.number)
            if wanted is not None and key not in wanted:
                continue
            place = alive.get(held.number, _NOWHERE)
            line = sums.get(place)
            if line is None:
                line = sums[place] = _Sum(len(answers))
            line.numbers.add(held.number)
            if held.storage not in counted:
                counted.add(held.storage)
                line.nbytes[rank] += held.nbytes
            unnamed = ["autograd, or an object without a name"] if held.number in alive else ["no handle"]
            line.holders.update(dict.fromkeys(holders.get(key) or unnamed))
    return [
        MemoryLine(engine.name, *place, len(line.numbers), tuple(line.nbytes), tuple(line.holders))
        for place, line in sums.items()
    ]


_NOWHERE = ("", 0, "")


def _places(engine: TensorEngine, owners: list[ValueOwner]) -> dict[int, tuple[str, int, str]]:
    """Return the locations that made the values with handles."""
    mine: set[int] = {id(mesh.dead) for mesh in engine.meshes.values()}
    return {
        number_of(each): frames.innermost(each.place) if each.place else _NOWHERE
        for each in owners
        if id(each._dead) in mine
    }


def _handles(value: object, name: str, depth: int = 3) -> list[tuple[Tensor, str]]:
    """Return the handles in a value, with the paths to them.

    Modules contribute parameters and buffers, optimizers their state.
    """
    if type(value) is Tensor:
        found = [(value, name)]
        gradient = value.grad if value.is_leaf else None
        return [*found, (gradient, f"{name}.grad")] if type(gradient) is Tensor else found
    if isinstance(value, torch.nn.Module):
        parts = [*value.named_parameters(), *value.named_buffers()]
        return [each for path, part in parts for each in _handles(part, f"{name}.{path}")]
    if isinstance(value, torch.optim.Optimizer):
        return [
            each
            for state in list(value.state.values())
            for key, part in list(state.items())
            for each in _handles(part, f"{name}.state[...][{key!r}]")
        ]
    if depth and isinstance(value, dict):
        return [x for key, part in list(value.items()) for x in _handles(part, f"{name}[{key!r}]", depth - 1)]
    if depth and isinstance(value, (list, tuple)):
        return [x for at, part in enumerate(list(value)) for x in _handles(part, f"{name}[{at}]", depth - 1)]
    return []


def _listed(names: tuple[str, ...]) -> str:
    return few(names, _NAMES)
