"""Observe the torch operations of a training step, forward and backward, each with the module that it belongs to.

`OperationMode` is a dispatch mode below those of the program. It lies on the stack of the program's thread from the
first forward of a step to its optimizer; autograd takes it along to its own threads. It sees operations below autograd,
so it changes neither the graph nor the order or the kernels of operations.

An operation of the forward belongs to the innermost module that runs. An operation of the backward belongs to the
autograd node that runs it. Nodes are numbered in the order in which the forward made them, so the node's number tells
the operation of the forward that made the node, with its module and line. Names of nodes would not be enough: many
nodes of a step have the same one.

Not reported: allocations, whose values are undefined; the inner operations of compiled graphs; copies and collectives
of DDP and FSDP; sums into `.grad`; recomputations by activation checkpointing; operations with autograd disabled
outside of modules, such as metrics.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_kernel.debugger.source_locations import is_user_code

# Namespaces of operations that move or allocate tensors for a wrapper, or compute nothing.
_HIDDEN_NAMESPACES = frozenset(
    ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "profiler", "prim", "inductor")
)
# Operations whose results are undefined, or are the same tensor.
_HIDDEN_NAMES = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
        *("resize_", "resize_as_", "set_", "detach", "detach_", "alias", "lift_fresh", "lift", "record_stream"),
    )
)
# Code whose operations are its own: of wrappers, of compiled graphs and their compilers, and of this package.
_HIDDEN_FILES = tuple(
    part.replace("/", os.sep)
    for part in (
        "/torch/distributed/fsdp/",
        "/torch/distributed/_composable/",
        "/torch/distributed/pipelining/",
        "/torch/nn/parallel/",
        "/torch/_functorch/_aot_autograd/",
        "/torch/_inductor/",
        "/torch/_dynamo/",
        "torchinductor_",
        "/monarch_kernel/numerics/",
    )
)
# Where torch calls modules, and where it runs the backward: what is around them does not matter.
_CALLERS = (torch.nn.modules.module.__file__, torch.autograd.graph.__file__)
_COMPILED_NODE = "CompiledFunction"
_ACCUMULATION = "torch::autograd::AccumulateGrad"


if TYPE_CHECKING:
    from monarch_kernel.numerics.observer import RunningModule, StepLocation


@dataclass(slots=True, eq=False)
class TorchOperation:
    """A torch operation.

    Attributes:
        place: the call of the module that it belongs to, with the operation's own line; `observer.OUTSIDE` if there is
            none.
        label: what tells it from others of that call: its name and its number among those of this name, such as
            "aten.addmm#0". In the backward, the operation of the forward comes first: "aten.addmm#0/aten.mm#1".
        is_backward: whether autograd runs it.
        inputs: the tensors among its arguments by name.
        outputs: its results: "" is the only one, others have a number. Empty before it has run.
        written: the inputs that it changes.
        epoch: a number that grows when tensors may have changed without a reported operation.
    """

    place: StepLocation
    label: str
    is_backward: bool
    inputs: list[tuple[str, torch.Tensor]]
    outputs: list[tuple[str, torch.Tensor]] = field(default_factory=list[tuple[str, torch.Tensor]])
    written: tuple[torch.Tensor, ...] = ()
    epoch: int = 0


class _Made(NamedTuple):
    """The operation of the forward that made a node of the graph."""

    place: StepLocation
    label: str


class OperationMode(TorchDispatchMode):
    """Reports operations while it lies on a thread's stack of modes.

    Args:
        running: returns the innermost module that runs on this thread; None if none does.
        outside: returns the place of operations that no module runs.
        line: formats the innermost line of user code from a frame outward.
        report: called with "operation_begins" and "operation", and the operation.
    """

    # Without this, torch refuses higher-order operations, such as flex attention, under a mode.
    supports_higher_order_operators = True

    def __init__(
        self,
        running: Callable[[], RunningModule | None],
        outside: Callable[[], StepLocation],
        line: Callable[[FrameType | None], str],
        report: Callable[[Literal["operation_begins", "operation"], TorchOperation], None],
    ) -> None:
        super().__init__()
        self._running = running
        self._outside = outside
        self._line = line
        self._report = report
        self._thread: int | None = None  # whose stack it lies on
        self._sees = False
        self._epoch = 0
        self.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise, torch would load its compiler to keep it away from this mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch that compiled functions stay compiled under this mode."""
        return True

    def clear(self) -> None:
        """Forget the operations of a step."""
        self._counts: dict[tuple[str, int, int, str, str], int] = {}
        self._made: dict[int, _Made | None] = {}  # by number of a node; None: its operations are not reported
        self._newest = _sequence_number()  # nodes below are attributed
        self._latest: _Made | None = None

    # -- on the stack of a thread --------------------------------------------------------------------

    def enter(self) -> None:
        """Report operations of this thread, and of the backward that it runs."""
        if not self._sees:
            self._epoch += 1
        self._sees = True
        if self._thread is None:
            self._thread = threading.get_ident()
            _place_at_bottom(self)

    def leave(self) -> bool:
        """Report no more. Return whether it is off the stack, from which only its own thread can take it."""
        self._sees = False
        if self._thread == threading.get_ident():
            _take_away(self)
            self._thread = None
        return self._thread is None

    # -- operations ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if not self._sees:
            return func(*args, **kwargs)
        operation = self._begun(func, args, kwargs)
        if operation is None:
            self._epoch += _may_write(func)
            return func(*args, **kwargs)
        self._report("operation_begins", operation)
        result = func(*args, **kwargs)
        operation.outputs = list(_tensors(result, ""))
        self._report("operation", operation)
        return result

    def _begun(self, func: Any, args: Any, kwargs: Any) -> TorchOperation | None:
        """Return an operation that begins; None if it is not reported."""
        if not isinstance(func, torch._ops.OpOverload):
            return None
        named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        inputs = [found for name, value in named.items() for found in _tensors(value, name)]
        frame = sys._getframe(2)
        running = self._running()
        is_backward = torch._C._current_graph_task_id() != -1 and running is None
        if is_backward:
            made = self._made_of_node(frame)
        else:
            made = self._made_here(func, inputs, running, frame)
        if made is None or _is_hidden_operation(func) or any(_is_without_values(each) for _, each in inputs):
            return None
        if is_backward:
            name = _name_of(func)
            number = self._number(made.place, f"{made.label}/{name}", "backward")
            made = _Made(made.place, f"{made.label}/{name}#{number}")
        written = tuple(tensor for name in _written_by(func) for _, tensor in _tensors(named.get(name), name))
        return TorchOperation(made.place, made.label, is_backward, inputs, written=written, epoch=self._epoch)

    def _made_here(
        self, func: Any, inputs: list[tuple[str, torch.Tensor]], running: RunningModule | None, frame: FrameType
    ) -> _Made | None:
        """Return the operation of the forward that begins, and attribute its node; None if it is not reported.

        Autograd makes the node of an operation before it runs the operation. Nodes that it makes afterwards, of writes
        to views, have lower numbers than that of the next operation, and belong to the one before.
        """
        place = self._outside() if running is None else running.place
        is_hidden = running is not None and running.is_hidden
        made: _Made | None = None
        if place is not None and not is_hidden and not _is_hidden_code(frame):
            if running is None and not torch.is_grad_enabled():
                return None
            is_replayed = running is not None and running.is_replayed
            name = _name_of(func)
            # Nodes of hidden operations, such as detach, pass gradients on: their place is all that counts.
            number = 0 if _is_hidden_operation(func) else self._number(place, name, f"forward {is_replayed}")
            line = self._line(frame) or place.line
            made = _Made(replace(place, line=line), f"{name}#{number}")
        newest = _sequence_number()
        begun, self._newest = self._newest, newest
        for sequence in range(begun, newest):
            is_own = sequence == newest - 1 and any(each.requires_grad for _, each in inputs)
            self._made[sequence] = made if is_own else self._latest
        if made is not None and not _is_hidden_operation(func):
            self._latest = made
        return None if running is not None and running.is_replayed else made

    def _made_of_node(self, frame: FrameType) -> _Made | None:
        """Return what the running node of the backward is attributed to; None if its operations are not reported."""
        node: Any = torch._C._current_autograd_node()
        if node is None or node.name() == _ACCUMULATION or _COMPILED_NODE in node.name():
            return None
        if _is_hidden_code(frame) or (torch.is_grad_enabled() and _is_recomputed(frame)):
            return None
        unknown = _Made(self._outside(), node.name())
        return self._made.get(node._sequence_nr(), unknown)

    def _number(self, place: StepLocation, name: str, phase: str) -> int:
        at = (place.name, place.micro, place.call, phase, name)
        number = self._counts.get(at, 0)
        self._counts[at] = number + 1
        return number


@functools.lru_cache(maxsize=1024)
def _name_of(func: Any) -> str:
    """Return the name of an operation without its overload: "aten.mm"."""
    return func.name().partition(".")[0].replace("::", ".")


@functools.lru_cache(maxsize=1024)
def _is_hidden_operation(func: Any) -> bool:
    namespace, _, name = _name_of(func).partition(".")
    return namespace in _HIDDEN_NAMESPACES or name in _HIDDEN_NAMES


@functools.lru_cache(maxsize=1024)
def _may_write(func: Any) -> bool:
    """Return whether an operation may write to tensors; collectives do without saying so."""
    if not isinstance(func, torch._ops.OpOverload):
        return True
    return func._schema.is_mutable or _name_of(func).partition(".")[0] in _HIDDEN_NAMESPACES


@functools.lru_cache(maxsize=1024)
def _written_by(func: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operation writes to."""
    return tuple(
        each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write
    )


def _sequence_number() -> int:
    """Return the number of the next node that autograd makes on this thread."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def _is_without_values(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


@functools.lru_cache(maxsize=4096)
def _is_hidden_file(file: str) -> bool:
    return any(part in file for part in _HIDDEN_FILES)


def _is_hidden_code(frame: FrameType | None) -> bool:
    """Return whether code of a wrapper, a compiled graph or this package has called an operation."""
    while frame is not None:
        code = frame.f_code
        if _is_hidden_file(code.co_filename):
            return True
        if code.co_filename in _CALLERS or is_user_code(code):
            return False
        frame = frame.f_back
    return False


def _is_recomputed(frame: FrameType | None) -> bool:
    """Return whether activation checkpointing runs a part of the forward again."""
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an argument or a result: of lists, each with its index."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            if isinstance(each, torch.Tensor):
                yield f"{name}.{at}".lstrip("."), each


def _place_at_bottom(mode: TorchDispatchMode) -> None:
    """Put a mode below those of the program, which takes its own modes off in their order."""
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    above: list[Any] = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    for each in (mode, *reversed(above)):
        _push_mode(each)


def _take_away(mode: TorchDispatchMode) -> None:
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    above: list[Any] = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    for each in reversed(above):
        if each is not mode:
            _push_mode(each)
