"""Repeat one run of a function with a few records and some assignments: `Recording`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.handle import Tensor, make_handle
from monarch_kernel.runtime.tensor.controller.signature import Signature
from monarch_kernel.runtime.tensor.controller.spec import Spec
from monarch_kernel.runtime.tensor.replay.numbers import GivenFloat
from monarch_kernel.runtime.tensor.replay.reachable import ReachableState
from monarch_kernel.runtime.tensor.replay.recorder import ReplayRecorder, TakenOperation
from monarch_kernel.runtime.tensor.wire import Definition, FloatSlot, Recorded, TensorSlot

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


# Group recorded operations of one mesh and stream, which ranks run as one record: `ReplaySegment`.


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


#: Returned by `Recording.replay` if a number differs from the number for which the recording is valid.
REFUSED: Any = object()


@dataclass(frozen=True, slots=True)
class HandleKind:
    """The properties of a handle in the recorded run. The handle itself would keep its value on the ranks alive."""

    spec: Spec
    requires_grad: bool

    @classmethod
    def of(cls, handle: Tensor) -> HandleKind:
        """Return the kind of a handle."""
        return cls(handle._spec, handle.requires_grad)

    def handle(self, value: Tensor) -> Tensor:
        """Return the handle, or another handle of its value with this shape, detached if this kind is."""
        if value._spec is self.spec and (self.requires_grad or not value.requires_grad):
            return value
        return make_handle(self.spec, value._owner)


@dataclass(frozen=True, slots=True)
class Effect:
    """A change that the function leaves at a place that it reaches.

    Attributes:
        watch, index: the place.
        value: the number of a value (`kind` "tensor"), a variable ("number"), or a constant.
        like: the kind of the tensor there.
    """

    watch: int
    index: int
    kind: str
    value: Any
    like: HandleKind | None = None


class Gradient:
    """The backward pass of a recording, which is sent when gradients of its results arrive.

    Attributes:
        segments: the operations of the backward pass.
        incoming: numbers of the gradients of `results`.
        wanted: for each of `inputs`, the number of its gradient, or None if the results do not depend on it.
        saved: the numbers of the forward values that the operations use.
    """

    __slots__ = ("incoming", "inputs", "results", "saved", "segments", "wanted")

    def __init__(
        self,
        segments: list[ReplaySegment],
        results: list[int],
        incoming: list[int],
        inputs: list[int],
        wanted: list[int | None],
        saved: set[int],
    ) -> None:
        self.segments = segments
        self.results = results
        self.incoming = incoming
        self.inputs = inputs
        self.wanted = wanted
        self.saved = saved


class Recording:
    """Repeats a function while everything that it reaches is as it was in the recorded run.

    Attributes:
        state: the state that must be unchanged.
        followed: the places of numbers that may change.
        sources: the source of each captured value: ("argument", k), ("place", (watch, index)) or ("fixed", handle).
        host: computes the known numbers for the records; returns None if the recording is valid only for other numbers.
        results: leaves of the result: ("value", number, kind of handle), ("number", variable) or
            ("plain", constant).
        replays: the number of replays.
    """

    def __init__(
        self,
        state: ReachableState,
        followed: list[tuple[int, int]],
        sources: dict[int, tuple[str, Any]],
        recorder: ReplayRecorder,
        segments: list[ReplaySegment],
        gradient: Gradient | None,
        effects: list[Effect],
        results: list[tuple[Any, ...]],
        tree: Any,
    ) -> None:
        self.state = state
        self.followed = frozenset(followed)
        self.replays = 0
        self._rates = followed
        self._sources = list(sources.items())
        self._segments = segments
        self._effects = effects
        self._results = results
        self._tree = tree
        self._gradient = gradient
        self._bumped = [number for number in sources if any(_writes(segment, number) for segment in segments)]
        self._host = _host_function(recorder)
        self._updates = [(number, recorder.known[number]) for number in sorted(recorder.changed)]
        self._constants = {
            number: variable for number, variable in recorder.known.items() if number in recorder.made and variable
        }

    def operations(self) -> int:
        """Return the number of operations on the ranks."""
        return sum(len(segment.steps) for segment in self._segments)

    def replay(self, arguments: list[Tensor]) -> Any:
        """Replay with other arguments of the same kind. The state that the function reaches must be unchanged.

        Returns:
            The result of the function, or REFUSED if it depends on a number that has changed.
        """
        watches = self.state.watches
        values: dict[int, Tensor] = {}
        for number, (kind, source) in self._sources:
            if kind == "argument":
                values[number] = arguments[source]
            elif kind == "place":
                values[number] = watches[source[0]].values[source[1]]
            else:
                values[number] = source
        numbers: dict[str, Any] = {}
        if self._host is not None:
            found = self._host(values, *(watches[w].values[i] for w, i in self._rates))
            if found is None:
                return REFUSED
            numbers = found
        gradient = self._gradient
        if gradient is not None and torch.is_grad_enabled():
            results = _Replayed.apply(self, values, numbers, *(values[number] for number in gradient.inputs))
            for number, result in zip(gradient.results, results):
                values[number] = result
        else:
            self.send(values, numbers)
        self._leave(values, numbers)
        self.replays += 1
        found = [self._result(leaf, values, numbers) for leaf in self._results]
        return found[0] if self._tree.is_leaf() else tree_unflatten(found, self._tree)

    def send(self, values: dict[int, Tensor], numbers: dict[str, Any]) -> None:
        """Send the operations, and add their results to `values`."""
        for segment in self._segments:
            segment.emit(values, numbers)

    def _leave(self, values: dict[int, Tensor], numbers: dict[str, Any]) -> None:
        """Make the changes that the function leaves behind."""
        if self._bumped:  # a backward pass that has saved one of these must detect the change, as without a replay
            torch.autograd.graph.increment_version([values[number] for number in self._bumped])
        for number, variable in self._updates:
            constant = values[number]._constant
            if variable is None:
                values[number]._constant = None
            elif constant is not None:
                constant.copy_(numbers[variable])
        for number, variable in self._constants.items():
            if number in values:
                values[number]._constant = numbers[variable].clone()
        watches = self.state.watches
        for effect in self._effects:
            watch = watches[effect.watch]
            if effect.kind == "tensor":
                assert effect.like is not None
                value: Any = effect.like.handle(values[effect.value])
            else:
                value = numbers[effect.value] if effect.kind == "number" else effect.value
            watch.assign(effect.index, value)
            # items that were missing must also be missing at the next call
            if (type(value) is Tensor and type(watch.values[effect.index]) is Tensor) or effect.kind == "number":
                watch.values[effect.index] = value

    def _result(self, leaf: tuple[Any, ...], values: dict[int, Tensor], numbers: dict[str, Any]) -> Any:
        kind, value = leaf[0], leaf[1]
        if kind == "value":
            return leaf[2].handle(values[value])
        return numbers[value] if kind == "number" else value


def _writes(segment: ReplaySegment, number: int) -> bool:
    return number in segment.ins and segment.ins.index(number) in segment.signature.mutates


def _host_function(recorder: ReplayRecorder) -> Callable[..., dict[str, Any] | None] | None:
    """Return the host program as a function of the values and the followed numbers; None if it is empty."""
    host = recorder.host
    if not host.lines and not host.rates:
        return None
    wanted = host.variables()
    formals = ", ".join(["H", *host.rates])
    given = ", ".join(f"{variable!r}: {variable}" for variable in wanted)
    source = f"def host({formals}):\n" + "".join(f"    {line}\n" for line in host.lines) + f"    return {{{given}}}\n"
    names = dict(host.names)
    exec(compile(source, "<numbers of a replay>", "exec"), names)
    return names["host"]


class _Replayed(torch.autograd.Function):
    """A replay inside a program that runs a backward pass."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, values: dict[int, Tensor], numbers: Any, *inputs: object) -> Any:
        gradient = recording._gradient
        assert gradient is not None
        recording.send(values, numbers)
        ctx.gradient, ctx.numbers = gradient, numbers
        ctx.saved = {number: values[number] for number in gradient.saved}
        return tuple(values[number] for number in gradient.results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's way
        gradient: Gradient = ctx.gradient
        values = dict(ctx.saved)
        values.update(zip(gradient.incoming, gradients))
        for segment in gradient.segments:
            segment.emit(values, ctx.numbers)
        return None, None, None, *(None if number is None else values[number] for number in gradient.wanted)
