"""Group recorded operations of one mesh and stream, which ranks run as one record: `ReplaySegment`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
from torch.utils._pytree import tree_flatten

from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.signature import Signature
from monarch_kernel.runtime.tensor.controller.spec import Spec
from monarch_kernel.runtime.tensor.replay.numbers import GivenFloat
from monarch_kernel.runtime.tensor.replay.recorder import TakenOperation
from monarch_kernel.runtime.tensor.wire import Definition, FloatSlot, Recorded, TensorSlot

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


@dataclass(frozen=True, slots=True)
class ReplaySegment:
    """Operations of one mesh and stream, in the order of the program.

    Attributes:
        ins: the places of its input values; `outs` has the places of its results.
        floats: the variables of the host program, in the order in which they are sent.
        steps: the line that issued each of its operations.
    """

    mesh: TensorMesh
    signature: Signature
    ins: tuple[int, ...]
    floats: tuple[str, ...]
    outs: tuple[int, ...]
    steps: tuple[frames.Frames, ...]

    def emit(self, values: dict[int, Tensor], numbers: dict[str, float]) -> None:
        """Send the segment, and add its results to `values`."""
        mesh = self.mesh
        engine = mesh.engine
        with engine.lock:
            eager, engine.eager = engine.eager, False  # an error must name the line of a step, which is known below
            try:
                results = mesh.emit(
                    self.signature, [values[place] for place in self.ins], [numbers[name] for name in self.floats]
                )
            finally:
                engine.eager = eager
            last = engine.record - 1
            engine.places[last] = frames.ReplayedFrames(engine.places[last], self.steps)
        if eager:
            engine.check(mesh)
        values.update(zip(self.outs, results))


def segments_of(
    taken: Sequence[TakenOperation], given: Iterable[int], wanted: set[int], label: str, backend: str | None
) -> list[ReplaySegment]:
    """Split recorded operations into segments.

    Args:
        given: the numbers of the external values.
        wanted: the numbers of the values that must exist afterwards.
        label: its name in errors.
    """
    runs: list[list[TakenOperation]] = []
    for step in taken:
        if not runs or runs[-1][-1].mesh is not step.mesh:
            runs.append([])
        runs[-1].append(step)
    needed = [set(wanted) for _ in runs]  # after each segment
    for i in range(len(runs) - 2, -1, -1):
        needed[i] |= needed[i + 1] | {number for step in runs[i + 1] for number in step.ins}
    there = set(given)
    found: list[ReplaySegment] = []
    for run, after in zip(runs, needed):
        segment = _segment(run, there, after, label, backend)
        there |= set(segment.outs)
        found.append(segment)
    return found


def _segment(
    run: list[TakenOperation], there: set[int], after: set[int], label: str, backend: str | None
) -> ReplaySegment:
    mesh = run[0].mesh
    made: dict[int, None] = {}
    ins: dict[int, int] = {}
    for step in run:
        for number in step.ins:
            if number not in made:
                assert number in there, number
                ins.setdefault(number, len(ins))
        made.update(dict.fromkeys(step.outs))
    places = dict(ins)
    floats: list[float | None] = []
    given: list[str] = []
    at: dict[Any, int] = {}
    steps: list[tuple[int, ...]] = []
    written: set[int] = set()
    bases: dict[int, int] = {}
    specs: dict[int, Spec] = {}
    for step in run:
        record = [step.signature.number, *(places[number] for number in step.ins)]
        for x in step.floats:
            # 0.0 and -0.0 are different, and all NaNs are equal
            key = x.variable if type(x) is GivenFloat else (x, str(x))
            if key not in at:
                at[key] = len(floats)
                floats.append(None if type(x) is GivenFloat else x)
                if type(x) is GivenFloat:
                    given.append(x.variable)
            record.append(at[key])
        for number in step.outs:
            places[number] = len(places)
            record.append(places[number])
        specs.update(zip(step.outs, _specs(step.signature)))
        written.update(step.ins[k] for k in step.signature.mutates)
        for number, k in zip(step.outs, _views(step.signature)):
            if k >= 0:
                bases[number] = bases.get(step.ins[k], step.ins[k])
        steps.append(tuple(record))
    outs = [number for number in made if number in after]
    mutates = tuple(k for number, k in ins.items() if number in written)
    recorded = Recorded(tuple(steps), len(ins), tuple(floats), tuple(places[number] for number in outs), backend)
    slots = (*(TensorSlot(k) for k in range(len(ins))), *(FloatSlot(k) for k in range(len(given))))
    signature = Signature()
    signature.label, signature.template, signature.answer = label, (slots, {}), None
    signature.spec, signature.shared, signature.follows, signature.draws = None, None, False, False
    signature.outs = [specs[number] for number in outs]
    signature.tree = _tree_of(len(outs))
    signature.inputs, signature.floats, signature.mutates = len(ins), len(given), mutates
    signature.views = tuple(ins.get(bases.get(number, 0), -1) for number in outs)  # no value has the number 0
    signature.number = mesh.engine.define(
        Definition(
            0,
            recorded,
            cloudpickle.dumps((slots, {})),
            len(ins),
            len(given),
            len(outs),
            (True,) * len(outs),
            mutates,
            mesh.sharded,
            None,
            label,
        )
    )
    mesh.recorded(signature, [step.signature.number for step in run])
    return ReplaySegment(mesh, signature, tuple(ins), tuple(given), tuple(outs), tuple(step.place for step in run))


def _views(signature: Signature) -> list[int]:
    """Return, for each new result, the position of the input whose memory it shares, or -1."""
    if signature.spec is not None:
        return list(signature.views)
    return [k for k, out in zip(signature.views, signature.outs or ()) if isinstance(out, Spec)]


def _specs(signature: Signature) -> list[Spec]:
    if signature.spec is not None:
        return [signature.spec]
    return [out for out in signature.outs or () if type(out) is Spec]


def _tree_of(count: int) -> Any:
    return tree_flatten([0] * count)[1]
