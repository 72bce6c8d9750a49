"""Record a function of tensors on a mesh once, and replay it with one record: `compile`.

The first call with new kinds of arguments runs normally and is recorded. Later calls send one record to each rank, for
any number of operations. A recording is valid for the shapes, dtypes and constants of the arguments, the constants that
the function reaches through its globals and closure (including attributes of modules and optimizers), and whether
gradients are on. If one of these differs, the call is recorded again. Tensors may be replaced by others of the same
kind. A replay also makes the function's assignments (gradients, states of optimizers, attributes). If a replay could
not repeat a function, the function runs normally, and a warning gives the reason.
"""

from __future__ import annotations

import builtins
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monarch_kernel.runtime.tensor.api.activation import active_target, engine_of
from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
from monarch_kernel.runtime.tensor.controller.handle import Tensor, make_handle
from monarch_kernel.runtime.tensor.controller.signature import Signature
from monarch_kernel.runtime.tensor.controller.spec import Spec
from monarch_kernel.runtime.tensor.replay import reachable as reach
from monarch_kernel.runtime.tensor.replay.numbers import FollowedFloat, FollowedNode, GivenFloat
from monarch_kernel.runtime.tensor.replay.reachable import ReachableState, is_constant
from monarch_kernel.runtime.tensor.replay.recorder import ReplayRecorder, TakenOperation
from monarch_kernel.runtime.tensor.wire import Definition, FloatSlot, Recorded, TensorSlot

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec

    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh

# Repeat one run of a function with a few records and some assignments: `Recording`.

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
    at: dict[object, int] = {}
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


def _tree_of(count: int) -> object:
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
        tree: TreeSpec,
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


def _host_function(recorder: ReplayRecorder) -> Callable[..., dict[str, object] | None] | None:
    """Return the host program as a function of the values and the followed numbers; None if it is empty."""
    host = recorder.host
    if not host.lines and not host.rates:
        return None
    wanted = host.variables()
    formals = ", ".join(["H", *host.rates])
    given = ", ".join(f"{variable!r}: {variable}" for variable in wanted)
    source = f"def host({formals}):\n" + "".join(f"    {line}\n" for line in host.lines) + f"    return {{{given}}}\n"
    names = dict(host.names)
    exec(builtins.compile(source, "<numbers of a replay>", "exec"), names)
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
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's way
        gradient: Gradient = ctx.gradient
        values = dict(ctx.saved)
        values.update(zip(gradient.incoming, gradients))
        for segment in gradient.segments:
            segment.emit(values, ctx.numbers)
        return None, None, None, *(None if number is None else values[number] for number in gradient.wanted)


#: The maximum number of recordings of one function for one kind of arguments. The least used one is dropped.
MOST = 8
#: After this many consecutive recordings that no call could use, the function always runs normally: for one kind of
#: arguments, and in total.
TRIES = 6
TRIES_ALTOGETHER = 64


class _Kind:
    """The recordings for one kind of arguments."""

    __slots__ = ("given_up", "in_vain", "recordings")

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.in_vain = 0
        self.given_up = False

    def keep(self, recording: Recording) -> None:
        """Add a recording. It replaces the least used one if necessary."""
        if len(self.recordings) >= MOST:
            self.recordings.remove(min(self.recordings, key=lambda r: r.replays))
        self.recordings.insert(0, recording)


def _replays(tensors: list[Tensor]) -> bool:
    """Return whether the ranks of the current operations, or of these tensors, replay recordings."""
    procs = active_target()[0]
    if tensors:
        return tensors[0]._spec.mesh.engine.replays
    return procs is None or engine_of(procs).replays


class Compiled:
    """A function that is replayed, created by `compile`.

    Attributes:
        recorded: the number of recorded calls.
        replayed: the number of replayed calls.
        reason: the reason why the last recorded call was not a replay.
    """

    def __init__(self, function: Callable[..., Any], verify: bool, backend: str | None) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._verify = verify
        self._backend = backend
        self._kinds: dict[Any, _Kind] = {}
        self._in_vain = 0
        self.recorded = 0
        self.replayed = 0
        self.reason = ""
        self.given_up = False

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind a method. Each instance has separate recordings."""
        if instance is None:
            return self
        bound = Compiled(self._function.__get__(instance, owner), self._verify, self._backend)
        name = self._function.__name__
        if hasattr(instance, "__dict__"):
            object.__setattr__(instance, name, bound)
        return bound

    def __repr__(self) -> str:
        return f"<compiled {getattr(self._function, '__qualname__', self._function)}>"

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.given_up or TensorEngine.recording is not None:  # inside another recording, it is a part of that one
            return self._function(*args, **kwargs)
        if kwargs or any(type(x) is not Tensor and not is_constant(x) for x in args):
            flat, tree = tree_flatten((args, kwargs))
        else:  # the same, in a tenth of the time
            flat, tree = list(args), len(args)
        key: list[object] = [tree, active_target(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
        tensors: list[Tensor] = []
        for x in flat:
            if type(x) is Tensor:
                key += (x._spec, x.requires_grad)
                tensors.append(x)
            elif is_constant(x):
                key += (type(x), x)
            else:
                key.append(_Identity(x))
        found = tuple(key)
        kind = self._kinds.get(found)
        if kind is None:
            kind = self._kinds[found] = _Kind()
            kind.given_up = not _replays(tensors)
        if kind.given_up:
            return self._function(*args, **kwargs)
        reason = "the first call of this kind"
        for recording in kind.recordings:
            if self._verify and (differs := recording.state.holds(recording.followed)) is not None:
                reason = differs
                continue
            result = recording.replay(tensors)
            if result is not REFUSED:
                self.replayed += 1
                self._in_vain = kind.in_vain = 0
                return result
            reason = "a number that the function looks at has changed"
        self.reason = reason
        return self._record(kind, args, kwargs, flat, tensors)

    def explain(self) -> str:
        """Describe how often it was recorded and replayed, and why it was last recorded."""
        recordings = [r for kind in self._kinds.values() for r in kind.recordings]
        operations = sorted({r.operations() for r in recordings})
        said = (
            f"{self!r}: {self.recorded} calls recorded, {self.replayed} replayed; {len(recordings)} recordings"
            f"{' of ' + ', '.join(map(str, operations)) + ' operations' if operations else ''}. "
            f"Last recorded because: {self.reason or 'not called yet'}."
        )
        return said + (" It is no longer recorded, and runs as it is." if self.given_up else "")

    # -- recording ----------------------------------------------------------------------------------

    def _record(
        self,
        kind: _Kind,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        flat: list[object],
        tensors: list[Tensor],
    ) -> object:
        for prepare in TensorEngine.before_recording:
            prepare()
        roots: list[tuple[object, str]] = [(self._function, getattr(self._function, "__name__", "it"))]
        roots += ((x, "an argument") for x in flat if type(x) is not Tensor and not is_constant(x))
        state = ReachableState(roots)
        places = state.tensors()
        recorder = ReplayRecorder()
        rates: list[tuple[int, int]] = []
        for w, i in state.numbers:
            node = FollowedNode(recorder.host, state.watches[w].values[i], recorder.host.rate())
            state.watches[w].assign(i, FollowedFloat(node))
            rates.append((w, i))
        gradients = [x.grad for x in tensors]
        TensorEngine.recording = recorder
        try:
            result = self._function(*args, **kwargs)
            forward = len(recorder.taken)
            captured = dict(recorder.captured)
            plain, tree = tree_flatten(result)
            gradient = self._backward(recorder, plain, captured, tensors) if recorder.obstacle is None else None
        finally:
            TensorEngine.recording = None
            numbers = _plain_again(state)
        self.recorded += 1
        if any(x.grad is not before for x, before in zip(tensors, gradients)):
            recorder.obstacle = "it computes the gradient of an argument into its .grad"
        effects = _effects(state, recorder, numbers)
        results: list[tuple[Any, ...]] = []
        for x in plain:
            if type(x) is Tensor:
                if x._owner.id not in recorder.made and x._owner.id not in captured:
                    captured[x._owner.id] = x
                results.append(("value", x._owner.id, HandleKind.of(x)))
            elif isinstance(x, FollowedFloat):
                results.append(("number", x.node.variable))
            elif is_constant(x):
                results.append(("plain", x))
            else:
                recorder.stop(f"it returns {reach.describe(x)}")
        if recorder.obstacle is None:
            sources = self._sources(captured, tensors, places)
            wanted = {leaf[1] for leaf in results if leaf[0] == "value"}
            wanted |= {effect.value for effect in effects if effect.kind == "tensor"}
            operations = self._operations(recorder, forward, captured, wanted, gradient)
            kind.keep(Recording(state, rates, sources, recorder, *operations, effects, results, tree))
        else:
            self.reason = recorder.obstacle
        self._in_vain += 1
        kind.in_vain += 1
        if kind.in_vain >= TRIES or self._in_vain >= TRIES_ALTOGETHER:
            self._give_up(kind)
        return _unfollowed(result) if numbers or recorder.host.lines else result

    def _give_up(self, kind: _Kind) -> None:
        count, self.given_up = kind.in_vain, self._in_vain >= TRIES_ALTOGETHER
        if self.given_up:
            count = self._in_vain
            self._kinds.clear()
        kind.given_up = True
        kind.recordings.clear()
        calls = "it" if self.given_up else "with such arguments it"
        warnings.warn(
            f"{self!r} was recorded {count} times in a row and never replayed ({self.reason}): "
            f"from now on {calls} runs without a replay",
            stacklevel=4,
        )

    def _sources(
        self, captured: dict[int, Tensor], tensors: list[Tensor], places: dict[int, tuple[int, int]]
    ) -> dict[int, tuple[str, Any]]:
        """Return where a replay finds each captured value."""
        positions = {x._owner.id: k for k, x in reversed(list(enumerate(tensors)))}
        sources: dict[int, tuple[str, object]] = {}
        for number, handle in captured.items():
            if number in positions:
                sources[number] = ("argument", positions[number])
            elif number in places and self._verify:
                sources[number] = ("place", places[number])
            else:
                sources[number] = ("fixed", handle.detach() if handle.requires_grad and not handle.is_leaf else handle)
        return sources

    def _operations(
        self, recorder: ReplayRecorder, forward: int, captured: dict[int, Tensor], wanted: set[int], joint: Any
    ) -> tuple[list[ReplaySegment], Gradient | None]:
        """Return the operations of the ranks, and the operations for incoming gradients of the results."""
        label = getattr(self._function, "__name__", "a recorded function")
        gradient = None
        if joint is not None:
            outputs, incoming, inputs, grads = joint
            used = {number for step in recorder.taken[forward:] for number in step.ins}
            made = {number for step in recorder.taken[:forward] for number in step.outs}
            saved = used & (made | set(captured))
            backward = segments_of(
                recorder.taken[forward:],
                saved | set(incoming),
                {number for number in grads if number is not None},
                f"the backward of {label}",
                self._backend,
            )
            gradient = Gradient(backward, outputs, incoming, inputs, grads, saved)
            wanted = wanted | saved
        return segments_of(recorder.taken[:forward], captured, wanted, label, self._backend), gradient

    def _backward(
        self, recorder: ReplayRecorder, results: list[object], captured: dict[int, Tensor], tensors: list[Tensor]
    ) -> tuple[list[int], list[int], list[int], list[int | None]] | None:
        """Record the backward pass of a function whose results require gradients. Its own effects are undone."""
        if not torch.is_grad_enabled():
            return None
        outputs = {x._owner.id: x for x in results if type(x) is Tensor and x.requires_grad and x.grad_fn is not None}
        arguments = {x._owner.id: x for x in tensors if x.requires_grad}
        inputs = arguments | {n: x for n, x in captured.items() if n not in arguments and x.requires_grad}
        if not outputs or not inputs:
            return None
        TensorEngine.recording = None
        incoming = [torch.ones_like(x) for x in outputs.values()]
        TensorEngine.recording = recorder
        forward = len(recorder.taken)
        try:
            grads = torch.autograd.grad(
                list(outputs.values()), list(inputs.values()), incoming, retain_graph=True, allow_unused=True
            )
        except RuntimeError:  # the function ran its own backward, so its results no longer have a graph
            del recorder.taken[forward:]
            return None
        given = [None if type(g) is not Tensor else g._owner.id for g in grads]  # None: not involved in the results
        return list(outputs), [number_of(g) for g in incoming], list(inputs), given


class _Identity:
    """Compares an argument that is neither tensor nor constant: it must be the same object."""

    __slots__ = ("_thing",)

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._thing is other._thing

    def __hash__(self) -> int:
        return id(self._thing)


def number_of(handle: Any) -> int:
    """Return the number of a handle's value, for handles that torch's types call tensors."""
    return handle._owner.id


def _plain_again(state: ReachableState) -> dict[tuple[int, int], FollowedFloat]:
    """Replace followed floats by plain ones. Return the followed floats that the function has left, by place."""
    left: dict[tuple[int, int], FollowedFloat] = {}
    for w, watch in enumerate(state.watches):
        if not watch.same_keys():
            continue
        for i, value in enumerate(watch.read()):
            if isinstance(value, FollowedFloat):
                watch.assign(i, value.node.value)
                left[w, i] = value
    return left


def _unfollowed(result: object) -> object:
    return tree_map(lambda x: x.node.value if isinstance(x, FollowedFloat) else x, result)


def _effects(
    state: ReachableState, recorder: ReplayRecorder, numbers: dict[tuple[int, int], FollowedFloat]
) -> list[Effect]:
    """Return the changes of the recorded run at places that the function reaches."""
    found: list[Effect] = []
    if (changed := state.changed()) is not None:
        recorder.stop(f"it changes what it uses: {changed}")
        return found
    for w, watch in enumerate(state.watches):
        for i, (old, new) in enumerate(zip(watch.values, watch.read())):
            if (w, i) in numbers:
                node = numbers[w, i].node
                if node.variable not in recorder.host.rates:
                    found.append(Effect(w, i, "number", node.variable))
            elif new is old or (is_constant(old) and type(old) is type(new) and old == new):
                continue
            elif type(new) is Tensor and (new._owner.id in recorder.made or new._owner.id in recorder.captured):
                found.append(Effect(w, i, "tensor", new._owner.id, HandleKind.of(new)))
                if type(old) is Tensor and old._spec is new._spec:
                    watch.values[i] = new
            elif is_constant(new) and not _is_fixed(watch):
                found.append(Effect(w, i, "constant", new))
            else:
                recorder.stop(f"it sets {watch.name(i)} to {reach.describe(new)}")
    return found


def _is_fixed(watch: Any) -> bool:
    return not hasattr(watch.container, "__setitem__") and isinstance(watch, reach.NamesSnapshot)


def compile(  # noqa: A001  # Monarch's name
    fn: Callable[..., object] | None = None, verify: bool = True, *, backend: str | None = None
) -> Any:
    """Create a function of tensors of a mesh that is recorded at its first call, and replayed afterwards.

    Use it on a whole step: forward, backward and optimizer. It can be a decorator, with or without arguments.

    Args:
        fn: the function, which may use tensors, modules and optimizers of its globals and closure.
        verify: check at every call that everything the function reaches besides its arguments is as it was when
            recorded. If false, the function must reach the same tensors and constants at every call, and calls are
            cheaper.
        backend: the backend of ``torch.compile`` for a recording on each rank ("inductor", "aot_eager", ...). It may
            round differently, and draw other random numbers. None: run the recorded operations.

    Returns:
        A callable with the same arguments, with `explain()`, and the counts `recorded` and `replayed`.

    Raises:
        TypeError: `fn` is not callable.
    """
    if fn is None:
        return functools.partial(compile, verify=verify, backend=backend)
    if not callable(fn):
        raise TypeError(f"compile() takes a function of tensors, not {fn!r}")
    return Compiled(fn, verify, backend)
