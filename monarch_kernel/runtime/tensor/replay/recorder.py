"""Record the operations of a running function for replays: `ReplayRecorder`. The recorded run is a normal run."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.signature import FOLLOWED, Signature
from monarch_kernel.runtime.tensor.replay.numbers import FollowedFloat, GivenFloat, HostProgram
from monarch_kernel.runtime.tensor.wire import FloatSlot, TensorSlot

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


@dataclass(slots=True)
class TakenOperation:
    """One operation of the recorded run.

    Attributes:
        ins, outs: numbers of values.
        floats: the floats, some of which may be `GivenFloat`.
        place: the line that issued it.
    """

    mesh: TensorMesh
    signature: Signature
    ins: list[int]
    floats: list[float]
    outs: list[int]
    place: frames.Frames


class ReplayRecorder:
    """Records a function on the current thread, until `close`.

    Attributes:
        taken: the operations of the function.
        captured: the values that it used but did not create, by number, in the order of use.
        made: the numbers of the values that it created.
        host: its computations with known numbers.
        obstacle: the reason why it cannot be replayed, if any.
    """

    def __init__(self) -> None:
        self.taken: list[TakenOperation] = []
        self.captured: dict[int, Tensor] = {}
        self.made: set[int] = set()
        self.host = HostProgram()
        self.obstacle: str | None = None
        #: Variables of the host program with the known values, by number; None: no longer known.
        self.known: dict[int, str | None] = {}
        #: Captured values whose known value the program changes.
        self.changed: set[int] = set()
        self._thread = threading.get_ident()

    def _elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def stop(self, why: str) -> None:
        """Note that a replay would not repeat the function."""
        if self.obstacle is None and not self._elsewhere():
            file, line, _ = frames.here()
            self.obstacle = f"{why} ({file}:{line})"

    def add(
        self,
        mesh: TensorMesh,
        signature: Signature,
        ins: list[Tensor],
        floats: list[float],
        record: list[int],
        place: Any,
    ) -> None:
        """Record an operation that is being sent. `record` is sent to the ranks."""
        if self._elsewhere():
            return
        numbers = [a._owner.id for a in ins]
        for a, number in zip(ins, numbers):
            if number not in self.made:
                self.captured.setdefault(number, a)
        outs = record[1 + signature.inputs + signature.floats :]
        self.made.update(outs)
        self.taken.append(TakenOperation(mesh, signature, numbers, list(floats), outs, place))
        if not signature.follows:
            for position in signature.mutates:
                self._forget(numbers[position])

    def put(self, mesh: TensorMesh, handle: Tensor) -> Tensor:
        """Record a local tensor that was sent to the ranks. Each replay begins with a copy of it."""
        if self._elsewhere():
            return handle
        return mesh.dispatch(torch.ops.aten.clone.default, (handle,), {})

    # -- numbers that are known here ------------------------------------------------------------------

    def number(self, handle: Tensor) -> Any:
        """Return the known value of a handle for the program."""
        assert handle._constant is not None
        value = handle._constant.item()
        if self._elsewhere():
            return value
        variable = self._variable(handle)
        if type(value) is float:
            return FollowedFloat(self.host.number(value, f"{variable}.item()"))
        self.host.require(f"{variable}.item() == {value!r}")
        return value

    def follow(
        self, operation: object, signature: Signature, ins: list[Tensor], floats: list[float], result: Any
    ) -> None:
        """Record an operation on known numbers that is about to be computed here."""
        if self._elsewhere():
            return
        numbers = [a._owner.id for a in ins]
        if signature.label not in FOLLOWED or any(a._constant is None for a in ins):
            for position in signature.mutates:
                self._forget(numbers[position])
            return
        sources = iter([self._variable(a) for a in ins])
        reals = iter([x.variable if type(x) is GivenFloat else self.host.name(x) for x in floats])

        def fill(slot: object) -> object:
            if type(slot) is TensorSlot:
                return _Source(next(sources))
            if type(slot) is FloatSlot:
                return _Source(next(reals))
            return _Source(self.host.name(slot))

        args, kwargs = tree_map(fill, signature.template)
        if signature.mutates:  # guards come later: until they hold, nothing may change
            args = [f"{args[0]}.clone()", *args[1:]]
        given = ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])
        variable = self.host.variable()
        self.host.lines.append(f"{variable} = {self.host.name(operation)}({given})")
        target = numbers[signature.mutates[0]] if signature.mutates else result._owner.id
        self.known[target] = variable
        if signature.mutates and target not in self.made:
            self.changed.add(target)

    def _variable(self, handle: Tensor) -> str:
        number = handle._owner.id
        variable = self.known.get(number)
        if variable is None:
            if number in self.made:  # the operation that creates it depends on nothing
                variable = self.host.name(handle._constant.clone())  # pyright: ignore[reportOptionalMemberAccess]  # known
            else:
                self.captured.setdefault(number, handle)
                variable = self.host.variable()
                self.host.lines.append(f"{variable} = H[{number}]._constant")
                self.host.lines.append(f"if {variable} is None: return None")
            self.known[number] = variable
        return variable

    def _forget(self, number: int) -> None:
        if self.known.get(number) is not None or number not in self.made:
            self.known[number] = None
            if number not in self.made:
                self.changed.add(number)


class _Source(str):
    """The source of an argument. Pytrees treat it as a leaf."""

    __slots__ = ()
