"""The target of operations on sharded tensors: `ShardedMesh`. Its ranks hold DTensors; handles have global shapes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.errors import MixedTensorsError
from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, make_handle
from monarch_kernel.runtime.tensor.controller.signature import COMPOSED, Signature, operation_name
from monarch_kernel.runtime.tensor.controller.spec import spec_of
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh, without_record
from monarch_kernel.runtime.tensor.controller.world_group import everywhere
from monarch_kernel.runtime.tensor.rank.held import placement_text
from monarch_kernel.runtime.tensor.rank.program import written
from monarch_kernel.runtime.tensor.sharded.controller import values
from monarch_kernel.runtime.tensor.sharded.controller.sharded_world import ShardedWorld, Unformed
from monarch_kernel.runtime.tensor.sharded.controller.values import Handover, Placements
from monarch_kernel.runtime.tensor.sharded.rank import factories, state
from monarch_kernel.runtime.tensor.wire import FailedValue

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.controller.stream import Stream


aten: Any = torch.ops.aten

#: Operations that torch's decompositions replace by others. DTensor multiplies gradients of `mse_loss` and similar
#: functions by the number of shards, and computes wrong values for uneven shards. It computes the parts correctly.
_BY_TORCH = (
    aten.mse_loss,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
)


def _max(x: Any) -> Any:
    return x.amax()


def _min(x: Any) -> Any:
    return x.amin()


def _vector_norm(
    x: Any,
    ord: float = 2,  # noqa: A002  # as in the schema
    dim: object = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    """Compute the vector norm as defined by numpy. In DTensor, ranks with empty shards fail."""
    y = x.abs() if dtype is None else x.to(dtype).abs()
    dims = list(range(y.dim())) if dim is None else dim
    if ord == float("inf"):
        return y.amax(dims, keepdim)
    if ord == float("-inf"):
        return y.amin(dims, keepdim)
    if ord == 0:
        return (y != 0).to(y.dtype).sum(dims, keepdim)
    if ord == 1:
        return y.sum(dims, keepdim)
    if ord == 2:
        return (y * y).sum(dims, keepdim).sqrt()
    return (y**ord).sum(dims, keepdim) ** (1.0 / ord)


def _equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _composed() -> dict[object, Callable[..., object]]:
    """Return the replacements of operations that DTensor computes incorrectly, by operation."""
    found: dict[Any, Callable[..., Any]] = dict(get_decompositions(_BY_TORCH))
    found[aten.equal.default] = _equal
    found[aten.max.default] = _max
    found[aten.min.default] = _min
    found[aten.linalg_vector_norm.default] = _vector_norm
    return found


#: The maximum size of a local tensor that moves to a mesh with the operation that needs it (elements). A larger one is
#: a mistake, or should be distributed explicitly.
SMALL = 4096
#: The time for the ranks to report the layout for `repr` (seconds).
REPR = 1.0
#: The number of frames searched for the program's line, for operations that consist of others.
DEEP = 40


class KeepsMesh(list[int]):
    """A list of values to delete that also holds their `Mesh`.

    Each value holds the list and thus keeps the mesh alive.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh


#: The positions of the matrices in matrix multiplications, which must have the same dtype.
_OF_ONE_DTYPE = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.mv.default: (0, 1),
    torch.ops.aten.dot.default: (0, 1),
    torch.ops.aten.addmm.default: (0, 1, 2),
    torch.ops.aten.baddbmm.default: (0, 1, 2),
}


class ShardedMesh(TensorMesh):
    """A region of ranks whose values are DTensors.

    Attributes:
        key: its key on the ranks.
        strict: whether operations without a rule for a layout are refused.
        on_copied: called with a leaf and its deep copy.
    """

    on_copied: ClassVar[list[Callable[[Tensor, Tensor], None]]] = []

    def __init__(self, engine: TensorEngine, procs: ProcMesh, stream: Stream, sharded: bool = True) -> None:
        self._kept: Callable[[], KeepsMesh | None] = lambda: None
        super().__init__(engine, procs, stream, sharded)
        self.key = (tuple(self.ranks), self.sizes, self.labels)
        self.composed = _composed()
        self.strict = False
        self._random: set[int] = set()
        self._place: frames.Frames | None = None

    # -- who keeps it -------------------------------------------------------------------------------

    def belong_to(self, keeper: KeepsMesh, owned: bool) -> None:
        """Make values created from now on keep a `Mesh` alive.

        The engine also does, if the mesh does not own its ranks.
        """
        self._kept = weakref.ref(keeper) if owned else lambda: keeper

    @property
    def owner(self) -> Any:
        """The `Mesh` of the program; None when it and its last tensor are deleted."""
        keeper = self._kept()
        return None if keeper is None else keeper.mesh

    @property
    def dead(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  # it may go
        """Values whose last handle was deleted."""
        keeper = self._kept()
        return [] if keeper is None else keeper

    @dead.setter
    def dead(self, _: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]  # it may go
        """Ignore assignments by the base class."""

    def raise_error(self) -> None:
        """Raise `error`, if a rank has died. Form the process group again, if it was abandoned."""
        if isinstance(self.error, Unformed):
            ShardedWorld.of(self.engine).form()
        else:
            super().raise_error()

    def settled(self, failed: FailedValue) -> FailedValue:
        """Return the failure to report for this one, once it is resolved."""
        world = ShardedWorld.of(self.engine)
        world.settle()
        return world.cause_of(failed)

    # -- operations ---------------------------------------------------------------------------------

    def emit(self, signature: Signature, ins: list[Tensor], floats: list[float]) -> Any:
        """Append a record. A random operation continues from the state of this process's generator."""
        with self.engine.lock:
            if signature.number in self._random:
                Handover.of(self.engine).before_draw(self)
            record = self.engine.record
            result = super().emit(signature, ins, floats)
            if self._place is not None:
                self.engine.places[record] = self._place
        if self.strict and self.engine.recording is None:
            self.engine.check(self)
        return result

    def _define(
        self, key: object, func: OpOverload, args: Any, kwargs: object, ins: list[Tensor], fixed_floats: bool = False
    ) -> Signature:
        if func not in self.composed:
            parts = _parts_of(func)
            if parts is not None:
                self.composed[func] = parts
        if not ins and func not in self.composed and _makes_tensors(func):
            make = self._at_one_place(functools.partial(self._new, func))
            return self._keep(key, without_record(COMPOSED, make))
        composed = self.composed.get(func)
        if composed is not None:
            self.composed[func] = self._at_one_place(composed)
        alike = _OF_ONE_DTYPE.get(func)
        if alike is not None and len({args[i].dtype for i in alike}) > 1:  # fake tensors do not check this
            dtypes = ", ".join(str(args[i].dtype).removeprefix("torch.") for i in alike)
            raise RuntimeError(
                f"{func}: expected tensors of the same dtype, but got {dtypes}: convert one, t.to(dtype)"
            )
        signature = super()._define(key, func, args, kwargs, ins, fixed_floats)
        if signature.number > 0 and signature.draws:
            self._random.add(signature.number)
        return signature

    def _new(self, func: OpOverload, *args: object, **kwargs: object) -> object:
        """Implement a torch operation without input tensors, whose result is replicated on every rank."""
        if getattr(kwargs.get("device"), "type", None) == "meta":
            with _disable_current_modes():
                return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise TypeError(
                f"{func}: a generator of this process cannot draw on ranks; seed theirs (torch.manual_seed)"
            )
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random:
            Handover.of(self.engine).before_draw(self)
        here = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
        make = functools.partial(factories.made_whole, self.key, operation_name(func), args, here, random)
        return self.call(make, lambda: func(*args, **here), key=("new", func, repr((args, kwargs))))

    def recorded(self, signature: Signature, steps: list[int]) -> None:
        """Note whether a replay draws random numbers, which it does if one of its steps does."""
        if not self._random.isdisjoint(steps):
            self._random.add(signature.number)

    def _at_one_place(self, composed: Any) -> Any:
        """Attribute all parts of a composed operation to the line that issued it, at any depth."""
        if hasattr(composed, "at_one_place"):
            return composed

        def issue(*args: Any, **kwargs: Any) -> object:
            if self._place is not None:
                return composed(*args, **kwargs)
            self._place = frames.take(1, DEEP)
            try:
                return composed(*args, **kwargs)
            finally:
                self._place = None

        issue.at_one_place = True  # type: ignore[attr-defined]
        return issue

    def _lifted(self, func: OpOverload, args: Any, kwargs: Any) -> tuple[object, object]:
        theirs = written(func, args, kwargs or {})

        def lift(x: object) -> object:
            if not isinstance(x, torch.Tensor) or type(x) is Tensor:
                return x
            if any(x is w for w in theirs):
                raise MixedTensorsError(
                    f"{func.overloadpacket.__name__} would write a tensor of mesh {self.name} into a local one "
                    f"{list(x.shape)}. Write\n  local.copy_(t.full_tensor())    to take its value here first"
                )
            if x.requires_grad and torch.is_grad_enabled():
                raise MixedTensorsError(
                    f"{func.overloadpacket.__name__}: a local tensor {list(x.shape)} that requires grad, among tensors "
                    f"of mesh {self.name}: its gradient would be lost. Write\n"
                    "  distribute(local, mesh)    to bring it there; gradients pass that"
                )
            if x.numel() > SMALL and func is not torch.ops.aten.copy_.default:
                raise MixedTensorsError(
                    f"{func.overloadpacket.__name__}: a local tensor {list(x.shape)} among tensors of mesh "
                    f"{self.name}, too large to be sent along. Write\n"
                    f"  distribute(local, mesh, sharding_spec=[{self.labels[0]!r}, ...])    to bring it there, or\n"
                    "  t.full_tensor()    for the value of the other one here"
                )
            return self.put(x)

        return tree_map(lift, (list(args), kwargs or {}))

    def sharded_values(self, what: str) -> object:
        """Return the operations of this mesh's handles."""
        return values

    # -- data ---------------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor, placements: Placements | None = None) -> Tensor:
        """Distribute a copy of a local tensor (default: replicated on every rank). Return its handle."""
        with _disable_current_modes():
            local = tensor.detach()
            if local.device.type != "cpu":
                local = local.cpu()
            with self.engine.lock:
                number = self.engine.put(self, local, (self.key, placements))
            handle = make_handle(spec_of(self, torch.empty_like(local, device="meta")), ValueOwner(number, self.dead))
            if local.dim() == 0:
                handle._constant = local.clone()
            return handle

    def value_of(self, handle: Tensor, why: str) -> torch.Tensor:
        """Wait for the whole value and return it."""
        value = super().value_of(handle, why)
        ShardedWorld.of(self.engine).tell()
        return value

    def placements_of(self, handle: Tensor) -> Placements:
        """Return the layout of a value, in one round trip."""
        self.engine.plan.synchronised("placements")
        return self.engine.ask(self, state.layouts, handle)[0][0]

    def collect_costs(self) -> None:
        """Collect the counts of the ranks into the engine's plan, in one round trip to the first rank."""
        for record, (moved, fallbacks, size) in self.engine.ask(self, state.take_counts)[0].items():
            line = self.engine.plan.line(frames.innermost(self.engine.places.get(record)))
            for name, count in moved.items():
                line.redistributions[name] = line.redistributions.get(name, 0) + count
            for name, count in fallbacks.items():
                line.fallbacks[name] = line.fallbacks.get(name, 0) + count
            line.moved += size[0]

    def describe(self, handle: Tensor) -> str:
        """Return the `repr` of a handle: shape, dtype, placements."""
        layout = self._layout_soon(handle)
        shape = ", ".join(f"{label}={size}" for label, size in zip(self.labels, self.sizes))
        grad = ", requires_grad=True" if handle.requires_grad else ""
        return (
            f"Tensor({list(handle.shape)}, {str(handle.dtype).removeprefix('torch.')}, {layout}, "
            f"mesh={self.name}({shape}){grad})"
        )

    def _layout_soon(self, handle: Tensor) -> str:
        """Return the layout of a tensor as text, or the reason why the ranks have not reported it in time."""
        known = getattr(handle._owner, "layout", None)
        if self.error is None and self.engine.lock.acquire(timeout=REPR):
            try:
                call = self.engine.ask_later(self, state.layouts, handle)
            except Exception as e:  # a repr must not fail
                return f"<{type(e).__name__}>"
            finally:
                self.engine.lock.release()
            try:
                with _disable_current_modes():
                    placements = next(iter(call.get(REPR).values()))[0]
            except TimeoutError:
                pass
            except Exception as e:
                return f"<{type(e).__name__}>"
            else:
                known = handle._owner.layout = tuple(map(placement_text, placements))
        if known is not None:
            return f"[{', '.join(known)}]"
        return "<layout not known: " + ("ranks are busy>" if self.error is None else f"{type(self.error).__name__}>")

    def copied(self, tensor: Tensor, copy: Tensor) -> None:
        """Give the copy of a parameter the layout of the parameter, and sum its gradients in the same way."""
        for follow in self.on_copied:
            follow(tensor, copy)

    def prepare_loan(self) -> None:
        """Make sure that actors can get separate device meshes, and therefore DTensors."""
        ShardedWorld.of(self.engine).share(self)

    # -- ranks --------------------------------------------------------------------------------------

    def be_strict(self, strict: bool) -> None:
        """Set whether ranks refuse operations without a rule for a layout, and whether failures raise at once."""
        self.strict = strict
        everywhere(self.engine, state.be_strict, self.key, strict)


def _parts_of(func: OpOverload) -> Any:
    """Return torch's decomposition of an operation on every device, if it has no kernel."""
    if isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    ):
        return func.decompose
    return None


def _makes_tensors(func: OpOverload) -> bool:
    """Return whether an operation returns only tensors."""
    return bool(func._schema.returns) and all(str(each.type) == "Tensor" for each in func._schema.returns)
