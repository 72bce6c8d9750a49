"""A region of ranks and a stream that run operations on its tensors: `TensorMesh`. Its `dispatch` is the hot path.

For each operation, `dispatch` builds a key from the function, the specs of its inputs and its literals, finds the
signature with one lookup, and appends a record to the engine's pending records. On the first use of a key, FakeTensor
determines the results of the operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monarch_kernel.runtime.actor.errors import SupervisionError
from monarch_kernel.runtime.tensor.controller import adjoints, frames, reducing
from monarch_kernel.runtime.tensor.controller.borrowing import Borrow, check_write, current_loan, drop, share
from monarch_kernel.runtime.tensor.controller.errors import BorrowError, DeviceMeshError, MixedTensorsError
from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, _make_of, make_handle
from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef
from monarch_kernel.runtime.tensor.controller.redraws import Redraws
from monarch_kernel.runtime.tensor.controller.signature import (
    ANSWERED,
    COMPOSED,
    FOLLOWED,
    Signature,
    follow,
    mutated,
    operation_name,
    quiet,
)
from monarch_kernel.runtime.tensor.controller.spec import Spec, spec_of
from monarch_kernel.runtime.tensor.controller.world_group import groups_on_ranks
from monarch_kernel.runtime.tensor.rank.groups import WithGroups
from monarch_kernel.runtime.tensor.rank.objects import FlatResult, ResultLike, is_plain
from monarch_kernel.runtime.tensor.replay.numbers import GivenFloat
from monarch_kernel.runtime.tensor.wire import RANK_DEVICE, Definition, FailedValue, FloatSlot, TensorSlot

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.controller.stream import Stream

aten: Any = torch.ops.aten
#: Operations that return another handle of the same value: nothing is sent.
SHARED = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
#: Operations whose float arguments decide the size of the result, so these floats are part of the signature.
SIZED_BY_FLOATS = frozenset(
    {
        *(getattr(aten.arange, name) for name in aten.arange.overloads()),
        *(getattr(aten.range, name) for name in aten.range.overloads()),
    }
)
#: The number of frames kept for each operation, including torch's.
FRAMES = 10


class TensorMesh:
    """A region of a proc mesh and a stream, as operations on tensors use them.

    Attributes:
        procs: the proc mesh (or slice).
        labels, sizes: its dimensions.
        ranks: its ranks in the engine's world.
        workers: the stream's workers on these ranks.
        sharded: whether values are DTensors and specs describe whole tensors.
        specs, signatures: see `Spec`, `Signature`.
        dead: values whose last handle was deleted.
        error: the error of every operation and fetch after the death of a rank.
        composed: operations that are replaced by others on this mesh, because the ranks would compute them incorrectly.
    """

    def __init__(self, engine: TensorEngine, procs: ProcMesh, stream: Stream, sharded: bool) -> None:
        self.engine = engine
        self.procs = procs
        self.stream = stream
        self.name = procs.name
        self.labels: tuple[str, ...] = procs.extent.names
        self.sizes: tuple[int, ...] = procs.extent.shape
        self.ranks = procs._region.ranks()
        self.workers = stream.workers_of(engine, procs._region)
        self.error: DeviceMeshError | None = None
        self.sharded = sharded
        self.specs: dict[tuple[Any, ...], Spec] = {}
        self.signatures: dict[Any, Signature] = {}
        self._functions: list[object] = []  # kept because keys contain their identities
        self.dead: list[int] = []
        self.composed: dict[Any, Callable[..., Any]] = {}

    def __repr__(self) -> str:
        shape = ", ".join(f"{label}={size}" for label, size in zip(self.labels, self.sizes))
        return f"<TensorMesh {self.name} ({shape}), stream {self.stream.name}{', sharded' if self.sharded else ''}>"

    def check_alive(self) -> None:
        """Raise if a rank of this mesh has died and was not replaced."""
        if self.error is not None:
            with self.engine.lock:
                self.engine.look_out(self)

    def raise_error(self) -> None:
        """Raise `error`."""
        assert self.error is not None
        raise self.error

    def settled(self, failed: FailedValue) -> FailedValue:
        """Return the failure to report for this one."""
        return failed

    def lost(self, error: SupervisionError) -> DeviceMeshError:
        """Set and return the error of this mesh after the death of a rank."""
        if self.error is None:
            self.engine.note_lost_workers(self, error)
            if self.procs._stopped:
                text = f"mesh {self.name} was stopped, and its tensors are gone: make a new one"
            else:
                text = f"{error}\nheal_mesh(mesh) replaces dead ranks."
            self.error = DeviceMeshError(text)
        return self.error

    # -- an operation: the hot path -----------------------------------------------------------------

    def dispatch(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Issue a torch operation. Return handles of its results at once.

        Raises:
            MixedTensorsError: its tensors do not all belong to this mesh and stream.
            TypeError: it cannot run on ranks.
            Exception: the error of torch for these shapes, dtypes and arguments, as for a local operation.
        """
        key: list[object] = [id(func)]  # the hash of an operation is a function in Python
        ins: list[Tensor] = []
        floats: list[float] = []
        for a in args:
            t = type(a)
            if t is Tensor:
                key.append(a._spec)
                ins.append(a)
            elif t is float:
                key.append(float)
                floats.append(a)
            elif t is int or t is bool:
                key.append(t)
                key.append(a)
            elif t is list or t is tuple:
                if self._key_of_list(a, key, ins, floats):
                    return self.dispatch(func, *self._lifted(func, args, kwargs))
            elif isinstance(a, torch.Tensor):
                return self.dispatch(func, *self._lifted(func, args, kwargs))
            elif isinstance(a, torch.SymFloat):
                key.append(float)
                floats.append(GivenFloat.of(a))
            else:
                key.append(a)
        if kwargs:
            # The branches above are repeated here: a call for each argument would cost more than the duplication saves.
            for name, a in kwargs.items():
                key.append(name)
                t = type(a)
                if t is Tensor:
                    key.append(a._spec)
                    ins.append(a)
                elif t is float:
                    key.append(float)
                    floats.append(a)
                elif t is int or t is bool:
                    key.append(t)
                    key.append(a)
                elif t is list or t is tuple:
                    if self._key_of_list(a, key, ins, floats):
                        return self.dispatch(func, *self._lifted(func, args, kwargs))
                elif isinstance(a, torch.Tensor):
                    return self.dispatch(func, *self._lifted(func, args, kwargs))
                elif isinstance(a, torch.SymFloat):
                    key.append(float)
                    floats.append(GivenFloat.of(a))
                else:
                    key.append(a)
        found = tuple(key)
        signature = self.signatures.get(found)
        if signature is None:
            self._functions.append(func)
            signature = self._define(found, func, args, kwargs or {}, ins)
        if signature.number < 0:
            return signature.answer(*args, **(kwargs or {})) if signature.number == COMPOSED else signature.answer
        if signature.shared is not None:
            source = ins[signature.shared]
            spec: Any = signature.spec
            result = _make_of(spec)
            result._spec, result._owner, result._constant = spec, source._owner, source._constant
            return result
        if signature.draws and not self.sharded:
            Redraws.of(self.engine).before_draw(self)
        result = self.emit(signature, ins, floats)
        if signature.follows:
            if self.engine.recording is not None:
                self.engine.recording.follow(func, signature, ins, floats, result)
            if signature.mutates or ins[0]._constant is not None:
                follow(func, signature, ins, floats, result)
        return result

    def emit(self, signature: Signature, ins: list[Tensor], floats: list[float]) -> Any:
        """Append a record. Return handles of its results."""
        engine = self.engine
        if self.error is not None:
            self.check_alive()
        record = [signature.number]
        try:
            for a in ins:
                record.append(a._owner.id)
            for k in signature.mutates:
                if type(ins[k]._owner) is not ValueOwner:
                    check_write(ins[k]._owner)
        except BorrowError as e:
            raise BorrowError(f"{signature.label}: {e}") from None
        result: Any = None
        spec = signature.spec
        place = frames.take(2, FRAMES)
        with engine.lock:
            if engine.target is not self:
                engine.turn_to(self)
            if floats:
                first = len(engine.floats)
                engine.floats.extend(floats)
                record.extend(range(first, first + len(floats)))
            if spec is not None:
                number = engine.next_value
                engine.next_value = number + 1
                record.append(number)
                result = _make_of(spec)
                result._spec = spec
                result._owner = ValueOwner(number, self.dead, place)
                result._constant = None
                if signature.views:
                    share(ins[signature.views[0]]._owner, result._owner)
            elif signature.outs is not None:
                results = self._results(signature, ins, record, place)
                result = results[0] if signature.tree is None else tree_unflatten(results, signature.tree)
            engine.places[engine.record] = place
            engine.ints += record
            engine.record += 1
            engine.pending += 1
            if engine.pending == 1:
                engine.awaken()
            if engine.recording is not None:
                engine.recording.add(self, signature, ins, floats, record, place)
            if engine.pending >= engine.batch or engine.eager:
                engine.flush()
        if engine.eager:
            engine.check(self)
        return result

    def _results(self, signature: Signature, ins: list[Tensor], record: list[int], place: frames.Frames) -> list[Any]:
        engine = self.engine
        results: list[object] = []
        for k, out in enumerate(signature.outs or ()):
            if isinstance(out, Spec):
                number = engine.next_value
                engine.next_value = number + 1
                record.append(number)
                owner = ValueOwner(number, self.dead, place)
                if signature.views and signature.views[k] >= 0:
                    share(ins[signature.views[k]]._owner, owner)
                results.append(make_handle(out, owner))
            else:
                results.append(None if out is None else ins[out])
        return results

    def _key_of_list(self, items: Any, key: list[object], ins: list[Tensor], floats: list[float]) -> bool:
        """Add the items of a list to the key. Return whether one of them is a local tensor."""
        key.append(type(items))
        key.append(len(items))
        for x in items:
            t = type(x)
            if t is Tensor:
                key.append(x._spec)
                ins.append(x)
            elif t is float:
                key.append(float)
                floats.append(x)
            elif t is list or t is tuple:
                if self._key_of_list(x, key, ins, floats):
                    return True
            elif isinstance(x, torch.Tensor):
                return True
            elif isinstance(x, torch.SymFloat):
                key.append(float)
                floats.append(GivenFloat.of(x))
            else:
                key.append(t)
                key.append(x)
        return False

    # -- its first time -----------------------------------------------------------------------------

    def _define(
        self, key: object, func: OpOverload, args: object, kwargs: object, ins: list[Tensor], fixed_floats: bool = False
    ) -> Signature:
        self._check_meshes(func, ins)
        if func in SIZED_BY_FLOATS and not fixed_floats:
            return self._keep(key, without_record(COMPOSED, partial(self._sized_by_floats, func)))
        composed = self.composed.get(func)
        if composed is not None:
            return self._keep(key, without_record(COMPOSED, composed))
        if func is aten._local_scalar_dense.default:
            return self._keep(key, without_record(COMPOSED, Tensor.item))
        flat, tree = tree_flatten((args, kwargs))
        fakes: list[object] = []
        template: list[object] = []
        tensors, numbers = itertools.count(), itertools.count()
        with self.engine.fake, torch.no_grad(), quiet():
            for x in flat:
                if type(x) is Tensor:
                    fakes.append(x._spec.fake())
                    template.append(TensorSlot(next(tensors)))
                elif isinstance(x, (float, torch.SymFloat)) and not fixed_floats:
                    fakes.append(float(GivenFloat.of(x) if isinstance(x, torch.SymFloat) else x))
                    template.append(FloatSlot(next(numbers)))
                elif type(x) is torch.device:
                    fakes.append(torch.device("cpu") if x.type != "meta" else x)
                    template.append(RANK_DEVICE)
                elif isinstance(x, torch.Generator):
                    raise TypeError(
                        f"{func}: a generator of this process cannot draw on ranks; seed theirs "
                        "(torch.manual_seed while the mesh is active)"
                    )
                else:
                    fakes.append(x)
                    template.append(x)
            inputs = [f for f in fakes if isinstance(f, torch.Tensor)]
            fake_args, fake_kwargs = tree_unflatten(fakes, tree)
            try:
                out = func(*fake_args, **fake_kwargs)
            except (DynamicOutputShapeException, DataDependentOutputException):
                return self._keep(key, without_record(COMPOSED, lambda *a, **k: self._of_unknown_size(func, a, k)))
        for fake, a in zip(inputs, ins):
            if fake.size() != a._spec.size or fake.stride() != a._spec.stride:
                raise TypeError(
                    f"{func} changes the shape of a tensor in place ({list(a._spec.size)} to {list(fake.size())}), "
                    "which its handle cannot follow: use the operation that returns a new tensor (t = t.squeeze(0))"
                )
        label = operation_name(func)
        signature = self.make_signature(
            label, label, tree_unflatten(template, tree), out, inputs, mutated(func, args, kwargs, ins)
        )
        signature.follows = label in FOLLOWED or bool(signature.mutates)
        signature.draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if func in SHARED and signature.spec is not None:
            signature.shared = 0
        return self._keep(key, signature)

    def _sized_by_floats(self, func: OpOverload, *args: object, **kwargs: object) -> object:
        """Issue an operation whose floats are part of its signature."""
        args = tuple(float(x) if isinstance(x, torch.SymFloat) else x for x in args)
        key = ("sized by floats", func, *((type(x), x) for x in (*args, *kwargs.items())))
        signature = self.signatures.get(key)
        if signature is None:
            signature = self._define(key, func, args, kwargs, [], fixed_floats=True)
        return self.emit(signature, [], [])

    def _keep(self, key: object, signature: Signature) -> Signature:
        self.signatures[key] = signature
        return signature

    def make_signature(
        self,
        label: str,
        operation: object,
        template: object,
        out: object,
        inputs: list[torch.Tensor],
        mutates: tuple[int, ...] = (),
        *,
        meets: bool = False,
        fresh: bool = False,
        onto: TensorMesh | None = None,
    ) -> Signature:
        """Create the signature of an operation whose results are like `out`, and define it on the ranks.

        Args:
            operation: the name of the operation, or a function of the ranks.
            template: ``(args, kwargs)`` with slots.
            out: fake results; a result that is one of `inputs` becomes that input's handle.
            inputs: fake inputs.
            meets: whether ranks wait for each other in the operation.
            fresh: whether a result that equals an input is still a new value.
            onto: the mesh of the results, if it is another one.
        """
        there = self if onto is None else onto
        flat, tree = tree_flatten(out)
        position = {} if fresh else {id(f): i for i, f in enumerate(inputs)}
        results = [o for o in flat if isinstance(o, torch.Tensor)]
        if not results and out is not None and not mutates:  # the result depends only on shapes, so no rank is needed
            return without_record(ANSWERED, out)
        signature = without_record(0, None)
        signature.label, signature.template, signature.mutates = label, template, mutates
        signature.inputs = len(inputs)
        slots = tree_flatten(template)[0]
        signature.floats = sum(type(x) is FloatSlot for x in slots)
        new: tuple[bool, ...] | None = None
        if isinstance(out, torch.Tensor) and id(out) not in position:
            signature.spec = spec_of(there, out)
        elif results:
            signature.outs = [
                None if not isinstance(o, torch.Tensor) else position[id(o)] if id(o) in position else spec_of(there, o)
                for o in flat
            ]
            signature.tree = None if isinstance(out, torch.Tensor) else tree
            if signature.tree is not None:
                new = tuple(type(o) is Spec for o in signature.outs)
        if not fresh:
            views = [_viewed(o, inputs) for o in (flat if signature.spec is None else results)]
            signature.views = tuple(views) if max(views, default=-1) >= 0 else ()
        outputs = 1 if signature.spec is not None else sum(type(o) is Spec for o in signature.outs or ())
        signature.number = self.engine.define(
            Definition(
                0,
                operation if isinstance(operation, str) else cloudpickle.dumps(operation),
                cloudpickle.dumps(template),
                signature.inputs,
                signature.floats,
                outputs,
                new,
                mutates,
                self.sharded,
                tuple((tuple(f.shape), f.dtype) for f in inputs) if meets else None,
                label,
            )
        )
        return signature

    def _check_meshes(self, what: object, ins: list[Tensor]) -> None:
        for a in ins:
            other = a._spec.mesh
            if other is self:
                continue
            if other.stream is not self.stream:
                raise MixedTensorsError(
                    f"{what}: tensors of streams {self.stream.name} and {other.stream.name}: borrow the one into the "
                    "other's stream first (stream.borrow(t))"
                )
            advice = (
                "take the one here, and distribute it over the other's: distribute(t.full_tensor(), mesh, ...)"
                if self.sharded or other.sharded
                else "to_mesh copies a tensor to another mesh, slice_mesh returns it on a part of its mesh"
            )
            raise MixedTensorsError(
                f"{what}: tensors of different meshes, {self!r} and {other!r}: bring them together first ({advice})"
            )

    def call(
        self,
        function: Callable[..., object],
        propagate: Callable[..., object],
        *args: object,
        key: object = None,
        meets: bool = False,
        onto: TensorMesh | None = None,
        **kwargs: object,
    ) -> Any:
        """Issue a function of the ranks like an operation.

        Args:
            function: called on each rank with its values; pickled once per signature.
            propagate: called here with fake tensors, once per signature, to get the shapes of the results.
            key: the key of its signatures, if the function is created again for each call.
            meets: whether ranks wait for each other in the function.
            onto: the mesh of the results, if it is another one, such as a part of this mesh.
        """
        flat, tree = tree_flatten((args, kwargs))
        opaque = frozenset(k for k, x in enumerate(flat) if isinstance(x, OpaqueRef))
        for k in opaque:
            flat[k] = flat[k].key
        given = list(flat)
        meets_others = groups_on_ranks(self, flat)
        ins = [x for x in flat if type(x) is Tensor]
        floats = [x for x in flat if type(x) is float]
        found = (
            "call",
            key if key is not None else function,
            tree,
            tuple(map(_part_of_key, flat)),
            onto,
            opaque,
        )
        signature = self.signatures.get(found)
        if signature is None:
            what = getattr(function, "__name__", str(function))
            if onto is None:
                self._check_meshes(what, ins)
            with _disable_current_modes():
                fakes: list[object] = []
                inputs: list[torch.Tensor] = []
                template: list[object] = []
                tensors, numbers = itertools.count(), itertools.count()
                with self.engine.fake, quiet():
                    for k, x in enumerate(flat):
                        if isinstance(x, torch.Tensor) and type(x) is not Tensor:
                            raise MixedTensorsError(
                                f"{what}: a local tensor {list(x.shape)} among tensors of mesh {self.name}. Write\n"
                                "  with mesh.activate(): there = torch.tensor(local.numpy())    to bring it there"
                            )
                        if type(x) is Tensor:
                            inputs.append(x._spec.fake())
                        fakes.append(OpaqueRef() if k in opaque else inputs[-1] if type(x) is Tensor else given[k])
                        template.append(
                            TensorSlot(next(tensors))
                            if type(x) is Tensor
                            else FloatSlot(next(numbers))
                            if type(x) is float
                            else x
                        )
                    fake_args, fake_kwargs = tree_unflatten(fakes, tree)
                    before = [f._version for f in inputs]
                    out = propagate(*fake_args, **fake_kwargs)
                    like = None if is_plain(out) else ResultLike(out)
                    if meets_others:
                        function = WithGroups(function)
                    if like is not None:
                        out, function = like.fakes() or None, FlatResult(function, like)
                mutates = tuple(i for i, (f, version) in enumerate(zip(inputs, before)) if f._version != version)
                signature = self.make_signature(
                    what,
                    function,
                    tree_unflatten(template, tree),
                    out,
                    inputs,
                    mutates,
                    meets=meets,
                    fresh=True,
                    onto=onto,
                )
                signature.answer = like if signature.number >= 0 else signature.answer
            self._keep(found, signature)
        if signature.number < 0:
            return signature.answer
        made = self.emit(signature, ins, floats)
        like = signature.answer
        if self.engine.recording is not None and (opaque or meets_others or like is not None):
            self.engine.recording.stop("it works with objects or process groups of the ranks, or with nested results")
        return made if like is None else like.filled(self.objects(like, made))

    def objects(self, like: ResultLike, made: Any) -> list[Any]:
        """Replace handles of objects among a result's values by references."""
        return [OpaqueRef.of(x) if kind.opaque else x for (_, kind), x in zip(like.likes, made or ())]

    def propagated(self, propagate: Callable[..., object], arguments: object) -> ResultLike:
        """Return the form of the result for ``(args, kwargs)`` according to `propagate`."""
        with _disable_current_modes(), self.engine.fake, torch.no_grad(), quiet():
            args, kwargs = tree_map(_fake_of, arguments)
            return ResultLike(propagate(*args, **kwargs))

    # -- between ranks ------------------------------------------------------------------------------

    def reduce(
        self,
        tensor: Tensor,
        dims: Sequence[str] | str | None,
        reduction: str,
        scatter: bool,
        mesh: ProcMesh | None,
        out: Tensor | None,
    ) -> Tensor:
        """Implement `Tensor.reduce`."""
        if mesh is None:
            return adjoints.reduce(tensor, dims, reduction, scatter, None, out)
        engine = self.engine.of(mesh)
        if engine is self.engine:
            target = engine.mesh_of(mesh, self.stream)
            if set(target.ranks) <= set(self.ranks):
                return adjoints.reduce(tensor, dims, reduction, scatter, target, out)
        names = () if scatter else reducing.dimensions(self, dims)
        part = self.procs.slice(**dict.fromkeys(names, 0))
        made = self.reduce(tensor, dims, reduction, scatter, part, out)
        return adjoints.to_mesh(made, mesh, None)

    def slice_mesh(self, tensor: Tensor, coords: dict[str, int | slice]) -> Tensor:
        """Implement `Tensor.slice_mesh`."""
        return adjoints.slice_mesh(tensor, coords)

    def to_mesh(self, tensor: Tensor, mesh: ProcMesh, stream: Stream | None) -> Tensor:
        """Implement `Tensor.to_mesh`."""
        return adjoints.to_mesh(tensor, mesh, stream)

    def lend(self, tensor: Tensor, stream: Stream, mutable: bool) -> tuple[Tensor, Borrow]:
        """Implement `Stream.borrow`."""
        return adjoints.borrow(tensor, self.engine.mesh_of(self.procs, stream), mutable)

    def drop(self, owner: ValueOwner) -> None:
        """Implement `Tensor.drop`."""
        drop(owner)

    # -- local tensors ------------------------------------------------------------------------------

    def _lifted(self, func: OpOverload, args: tuple[object, ...], kwargs: object) -> tuple[object, object]:
        """Move local tensors among arguments to the mesh, where this cannot be a mistake."""

        def lift(x: Any) -> object:
            if not isinstance(x, torch.Tensor) or type(x) is Tensor:
                return x
            if func is aten.lift_fresh.default or x.dim() == 0 or (func is aten.copy_.default and x is args[1]):
                return self.put(x)
            raise MixedTensorsError(
                f"{func.overloadpacket.__name__}: a local tensor {list(x.shape)} among tensors of mesh {self.name}. "
                "Write\n"
                + (
                    "  distribute(local, mesh, sharding_spec=[...])    to bring it there, or\n"
                    "  t.full_tensor()    for the value of the other one here"
                    if self.sharded
                    else "  with mesh.activate(): there = torch.tensor(local.numpy())    to bring it there, or\n"
                    "  inspect(t)    for the value of the other one here"
                )
            )

        return tree_map(lift, (list(args), kwargs or {}))

    def put(self, tensor: torch.Tensor) -> Tensor:
        """Copy a local tensor to every rank (replicated, if the mesh is sharded). Return its handle."""
        with _disable_current_modes():
            local = tensor.detach()
            with self.engine.lock:
                number = self.engine.put(self, local)
            handle = make_handle(
                spec_of(self, torch.empty_like(local, device="meta")), ValueOwner(number, self.dead, frames.take(1, 16))
            )
            if local.dim() == 0:
                handle._constant = local.clone()
            recording = self.engine.recording
            return handle if recording is None else recording.put(self, handle)

    # -- values here --------------------------------------------------------------------------------

    def value_of(self, handle: Tensor, why: str) -> torch.Tensor:
        """Wait for the value of the first rank, or on a sharded mesh for the whole value. Return it."""
        return self.engine.fetch(self, handle, 0, why, compare=not self.sharded and len(self.ranks) > 1).get()

    def _of_unknown_size(self, func: OpOverload, args: object, kwargs: object) -> object:
        """Run an operation whose shapes depend on values. The ranks run it and report the shapes."""
        self.engine.plan.synchronised(operation_name(func).split("::")[-1])
        return self.engine.run_and_describe(self, func, args, kwargs)

    def collect_costs(self) -> None:
        """Collect the counts of the ranks into the engine's plan. Plain tensors have none."""

    def sharded_values(self, what: str) -> Any:
        """Return the operations of handles of a sharded mesh.

        Raises:
            TypeError: this mesh is not sharded.
        """
        raise TypeError(
            f"{what}: a tensor of mesh {self.name} is one of its own on every rank, and has no layout: "
            "fetch_shard(t, ...) takes the one of a rank; distribute() makes tensors whose parts are on the ranks"
        )

    def describe(self, handle: Tensor) -> str:
        """Return the `repr` of a handle."""
        shape = ", ".join(f"{label}={size}" for label, size in zip(self.labels, self.sizes))
        grad = ", requires_grad=True" if handle.requires_grad else ""
        return (
            f"Tensor({list(handle.shape)}, {str(handle.dtype).removeprefix('torch.')}, mesh={self.name}({shape}){grad})"
        )

    def reduce_handle(self, handle: Tensor) -> Any:
        """Return the pickled form of a handle. This is refused, except for arguments of endpoints."""
        return current_loan(handle).take(handle)

    def recorded(self, signature: Signature, steps: list[int]) -> None:
        """Process the signature of a replay, with the numbers of the signatures of its steps."""

    def copied(self, tensor: Tensor, copy: Tensor) -> None:
        """Process a deep copy of a leaf. Meshes whose gradients need no extra work ignore it."""

    def prepare_loan(self) -> None:
        """Prepare for lending values to actors. Meshes of plain tensors do nothing."""


def _fake_of(x: object) -> object:
    if type(x) is Tensor:
        return x._spec.fake()
    if isinstance(x, OpaqueRef):
        return OpaqueRef()
    return torch.empty_like(x) if isinstance(x, torch.Tensor) else x


def _viewed(out: object, inputs: list[torch.Tensor]) -> int:
    """Return the position of the input whose memory a result shares; -1 if there is none."""
    if not isinstance(out, torch.Tensor):
        return -1
    aliased = torch._C._is_alias_of  # pyright: ignore[reportAttributeAccessIssue]  # torch gives no type
    return next((k for k, x in enumerate(inputs) if aliased(out, x)), -1)


def _part_of_key(x: object) -> object:
    if type(x) is Tensor:
        return x._spec
    if type(x) is float:
        return float
    try:
        hash(x)
    except TypeError:
        return type(x), repr(x)
    return type(x), x


def without_record(number: int, answer: object) -> Signature:
    """Create a signature unknown to ranks: an answer, or (COMPOSED) a function that issues other operations."""
    signature = Signature()
    signature.number, signature.answer = number, answer
    signature.spec = signature.outs = signature.tree = signature.shared = None
    signature.label, signature.template = "", None
    signature.inputs = signature.floats = 0
    signature.mutates, signature.views, signature.follows, signature.draws = (), (), False, False
    return signature
