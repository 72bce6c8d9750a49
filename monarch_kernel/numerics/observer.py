"""Observe the training steps of this process: calls of modules, gradients, optimizers and collectives.

`observer` returns the process's only `Observer`. It installs torch's global hooks with the first subscription and
removes them with the last, so no program is changed and nothing remains installed afterwards. A `Subscriber` names the
events that it wants, and receives live tensors that it must not change or keep.

A step begins with the first forward of a model and ends with `optimizer.step()`. The forwards within a step are
numbered as micro-batches. Forwards with autograd disabled (validation, a teacher) are not observed. Names are the
qualified names of the model, without the prefixes of DDP, FSDP, `torch.compile` and activation checkpointing.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from monarch_kernel.debugger.source_locations import is_user_frame, shown_file, user_frame

if TYPE_CHECKING:
    from monarch_kernel.numerics.collectives import Collective
    from monarch_kernel.numerics.operations import OperationMode, TorchOperation

Topic = Literal["modules", "calls", "gradients", "optimizer", "collectives", "operations"]
"""A kind of event: calls of modules with the gradients of their tensors; these calls with the gradients of whole models
alone; gradients of parameters before reduction; steps of optimizers; collectives; torch operations. Begins and ends of
steps are always reported."""

#: What a subscriber receives by default. Operations are observed at a cost for each, so only at request.
TOPICS: frozenset[Topic] = frozenset(("modules", "gradients", "optimizer", "collectives"))
# Topics whose events need no place in a forward.
_OUTSIDE_OF_FORWARDS: frozenset[Topic] = frozenset(("optimizer", "collectives"))
_CALLS: frozenset[Topic] = frozenset(("modules", "calls"))

# Attributes in which wrappers hold the module that they wrap. They are left out of names.
_WRAPPED = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
# Classes that hold it in `module`.
_WRAPPERS = frozenset(("DistributedDataParallel", "DataParallel", "DeepSpeedEngine"))
_STAGES = "torch.distributed.pipelining.stage"
_STAGE_FORWARDS = frozenset(("forward_maybe_with_nosync", "forward_one_chunk"))
_COMPILED = "OptimizedModule"
# Hooks that run once more for the wrapper do no harm here.
_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


#: The name of the place of operations that no module runs, such as those of a loss function.
OUTSIDE = "(outside of modules)"


class StopRun(Exception):  # raised on purpose
    """Raised by a subscriber to stop the observed program. Any other exception ends the subscription instead."""


@dataclass(frozen=True, slots=True)
class StepLocation:
    """Where in a step an event belongs.

    Attributes:
        name: the module's qualified name; "" is the model itself.
        step: the index of the step since the observer's first subscription.
        micro: the index of the model's forward within the step.
        call: the index of the module's call within that forward.
        line: the innermost line of user code, such as "train.py:42"; "" if unknown.
        first, last: whether the module's inputs (outputs) are those of the whole model. Both are True except for the
            model of a pipeline stage.
    """

    name: str
    step: int
    micro: int
    call: int
    line: str
    first: bool = True
    last: bool = True


class RunningModule(NamedTuple):
    """The innermost module that runs on a thread.

    Attributes:
        place: its call; None if it is a wrapper and no module around it has a place.
        is_hidden: whether its operations are not reported: it is compiled, its shapes are only tried out, or a
            subscriber works.
        is_replayed: whether it is a recomputation.
    """

    place: StepLocation | None
    is_hidden: bool
    is_replayed: bool


@dataclass(slots=True, eq=False)
class ModuleCall:
    """A call of a module.

    Attributes:
        place: where it belongs.
        module: the module.
        args, kwargs: the arguments. `Subscriber.forward_begins` may replace them.
        output: what it returned; None before the end.
        is_root: whether no other module is being called on this thread.
        is_compiled: whether `torch.compile` has compiled it, so that nothing within it is reported.
    """

    place: StepLocation
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    is_root: bool = False
    is_compiled: bool = False

    def inputs(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors among the arguments by position or keyword, such as "0", "mask" or "0.1"."""
        return [*_tensors(self.args), *_tensors(self.kwargs)]

    def outputs(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of the output; a single one is named ""."""
        return list(_tensors(self.output))


@dataclass(frozen=True, slots=True, eq=False)
class ModuleGradient:
    """The whole gradient of an input or an output of a module's call, of all uses of that tensor together.

    Attributes:
        place: the place of the call.
        kind: which of the two.
        tensor: its name among the inputs or outputs, as in `ModuleCall`.
        gradient: the gradient.
        is_compiled: whether the module is compiled.
    """

    place: StepLocation
    kind: Literal["grad_input", "grad_output"]
    tensor: str
    gradient: torch.Tensor
    is_compiled: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGradient:
    """A parameter's gradient of one backward, before it is accumulated and reduced over ranks.

    Attributes:
        place: its `name` is the parameter's, `micro` the index of the backward within the step.
        parameter: the parameter; with FSDP, the unsharded one.
        gradient: the gradient.
    """

    place: StepLocation
    parameter: torch.Tensor
    gradient: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NamedParameter:
    """A parameter of an optimizer.

    Attributes:
        name: its qualified name in the model, or `optimizer.GROUP.INDEX` if no observed model has it.
        parameter: the parameter.
        group: its parameter group (`lr`, `weight_decay`).
        in_model: whether an observed model has this parameter.
    """

    name: str
    parameter: torch.Tensor
    group: Mapping[str, Any]
    in_model: bool


class Subscriber:
    """The receiver of events. All methods do nothing by default.

    An exception ends the subscription with a warning and never the training, except `StopRun`. Methods run on the
    thread of the event: gradients of a GPU on a thread of autograd.
    """

    #: The topics that it receives. It may change between steps.
    wants: frozenset[Topic] = TOPICS

    def step_begins(self, step: int) -> None:
        """Called before the first forward of a step."""

    def forward_begins(self, event: ModuleCall) -> None:
        """Called before a module runs."""

    def forward(self, event: ModuleCall) -> None:
        """Called after a module has run. Recomputation by activation checkpointing is not reported."""

    def backward(self, event: ModuleGradient) -> None:
        """Called once a gradient of a module's input or output is known."""

    def gradient(self, event: ParameterGradient) -> None:
        """Called once a parameter's local gradient is known."""

    def optimizer_begins(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> None:
        """Called before `optimizer.step()`. Gradients are final: reduced, accumulated, clipped."""

    def optimizer_ends(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> None:
        """Called after `optimizer.step()`."""

    def step_ends(self, step: int) -> None:
        """Called when every parameter with a gradient has been stepped, or the next step begins."""

    def collective(self, event: Collective) -> None:
        """Called when a collective of this process is complete."""

    def operation_begins(self, event: TorchOperation) -> None:
        """Called before a torch operation of the forward or the backward runs."""

    def operation(self, event: TorchOperation) -> None:
        """Called after it has run."""


class Subscription:
    """A subscriber's subscription. A context manager; `end` may be called more than once."""

    def __init__(self, owner: Observer, subscriber: Subscriber) -> None:
        self._owner = owner
        self.subscriber = subscriber

    def end(self) -> None:
        """End it; the subscriber receives no more events."""
        self._owner._remove(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@dataclass(slots=True)
class _Model:
    """A model: a module that contains the modules called, with the names of its parts."""

    root: weakref.ref[nn.Module]
    prefix: str
    names: dict[int, str] = field(default_factory=dict[int, str])  # by id of a module
    first: bool = True
    last: bool = True
    called: bool = False  # since then, `first` and `last` are known
    named_at: int = -1  # the step

    def rename(self, step: int) -> None:
        """Name the modules anew, once a step, because a program may replace them."""
        root = self.root()
        if self.named_at != step and root is not None:
            self.names = {id(module): name for name, module in named_modules(root, self.prefix)}
            self.named_at = step


@dataclass(slots=True, eq=False)
class _Running:
    """A call in progress.

    Attributes:
        module: the module; `model` the model in which it is named.
        frame: the frame that runs it, which detects calls that were left by an exception.
        event: None if it is not reported: wrappers, and modules within a compiled one.
        replays: whether it is a recomputation.
        has_hooks: whether gradients of its inputs and outputs are reported.
        calls: in the outermost call: how often each module was called, by id.
    """

    module: nn.Module
    frame: FrameType
    model: _Model
    micro: int
    calls: dict[int, int]
    event: ModuleCall | None = None
    place: StepLocation | None = None
    replays: bool = False
    hides: bool = False
    has_hooks: bool = False


_Role = tuple[StepLocation, Literal["grad_input", "grad_output"], str, bool]
"""What a tensor is in the call of a module: the place, an input or an output, its name there, and whether the module is
compiled."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Running] = []
        self.is_reporting = False  # a subscriber works, whose operations are not the program's


class Observer:
    """The observer of this process. See the module."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._subscriptions: tuple[Subscription, ...] = ()
        self._handles: list[Any] = []
        self._tensor_handles: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter
        self._compiled: list[tuple[weakref.ref[nn.Module], Any]] = []
        self._stop_collectives: Callable[[], None] | None = None
        self._operations: OperationMode | None = None
        self._sweeper: Any = None  # removes `_operations` from the stack of another thread
        self._leaf_handles: list[Any] = []
        self._generation = 0  # of what is installed; hooks of graphs from before do nothing
        self._thread = _Thread()
        self._reset()

    def _reset(self) -> None:
        self.step = -1
        self._in_step = False
        self._is_quiet = False  # whether no subscriber wants to know what the latest forward of a model runs
        self._models: dict[int, _Model] = {}  # by id of the root
        self._micros: dict[int, int] = {}  # by id of the called root
        self._micro = 0  # of the latest root
        self._replays: dict[int, int] = {}  # by id of a module: recomputed calls in this step
        self._counts: dict[int, int] = {}  # by id of a module: its calls in a forward of the model
        self._backwards: dict[str, int] = {}  # by name of a parameter
        self._lines: dict[str, str] = {}  # by name of a module
        self._stepped: set[int] = set()  # ids of parameters
        self._optimized: list[NamedParameter] = []
        self._stepping: dict[int, list[NamedParameter]] = {}  # by id of an optimizer whose step has begun
        self._roles: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by tensor: its version and its roles
        self._hooked: set[tuple[str, int, int, str, str]] = set()  # roles of this step, as far as they have hooks

    @property
    def topics(self) -> frozenset[Topic]:
        """The topics that any subscriber wants at present."""
        return frozenset[Topic]().union(*(each.subscriber.wants for each in self._subscriptions))

    @property
    def is_installed(self) -> bool:
        """Whether anything is installed in torch."""
        installed = (self._handles, self._tensor_handles, self._leaf_handles, self._compiled)
        others = self._stop_collectives is not None or self._sweeper is not None
        return any(len(each) for each in installed) or others

    def subscribe(self, subscriber: Subscriber, model: nn.Module | None = None) -> Subscription:
        """Deliver events to a subscriber until its subscription ends.

        Args:
            subscriber: the receiver.
            model: the model that names are relative to; by default, models are found as they are called.
        """
        subscription = Subscription(self, subscriber)
        with self._lock:
            if not self._subscriptions:
                self._reset()
                self._install()
            self._subscriptions = (*self._subscriptions, subscription)
            if model is not None:
                self._add_model(model, "")
            self._observe_collectives()
        return subscription

    def _remove(self, subscription: Subscription) -> None:
        with self._lock:
            if subscription not in self._subscriptions:
                return
            self._subscriptions = tuple(each for each in self._subscriptions if each is not subscription)
            self._observe_collectives()
            if "operations" not in self.topics:
                self._leave_operations()
            if not self._subscriptions:
                self._uninstall()

    # -- installing ------------------------------------------------------------------------------

    def _install(self) -> None:
        warnings.filterwarnings("ignore", _COMPILE_WARNING)
        self._handles = [
            register_module_forward_pre_hook(self._before_module),  # pyright: ignore[reportArgumentType]  # may return
            register_module_forward_hook(self._after_module, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        if "torch._dynamo" in sys.modules:  # a call of a module that was compiled in place runs no global hook
            for each in gc.get_objects():
                if issubclass(type(each), nn.Module) and each.__dict__.get("_compiled_call_impl") is not None:
                    self._wrap_compiled(each)

    def _uninstall(self) -> None:
        for each in [each for each in warnings.filters if getattr(each[1], "pattern", "") == _COMPILE_WARNING]:
            warnings.filters.remove(each)  # pyright: ignore[reportAttributeAccessIssue]  # it is a list
        for handle in (*self._handles, *self._tensor_handles.values(), *self._leaf_handles):
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch forgets this one
        for reference, original in self._compiled:
            if (module := reference()) is not None:
                module._compiled_call_impl = original
        self._handles = []
        self._leaf_handles = []
        self._generation += 1
        self._tensor_handles = WeakIdKeyDictionary()
        self._compiled = []
        self._thread.stack.clear()
        self._reset()

    def _observe_collectives(self) -> None:
        wanted = "collectives" in self.topics
        if wanted and self._stop_collectives is None:
            from monarch_kernel.numerics.collectives import observe

            self._stop_collectives = observe(self._collective)
        elif not wanted and self._stop_collectives is not None:
            self._stop_collectives()
            self._stop_collectives = None

    def _enter_operations(self) -> None:
        """Observe operations of this thread, if a subscriber wants them."""
        if "operations" not in self.topics:
            return
        if self._operations is None:
            from monarch_kernel.numerics.operations import OperationMode

            self._operations = OperationMode(
                self._running_module,
                lambda: StepLocation(OUTSIDE, self.step, self._micro, 0, ""),
                _line,
                lambda method, event: self._emit("operations", method, event),
            )
        self._operations.enter()

    def _leave_operations(self) -> None:
        """Observe no more operations. Only the thread that runs them can take the mode off, so at its next event."""
        mode = self._operations
        if mode is None:
            return
        if mode.leave():
            self._operations = None
            if self._sweeper is not None:
                self._sweeper.remove()
                self._sweeper = None
        elif self._sweeper is None:
            self._sweeper = register_module_forward_pre_hook(lambda *_: self._leave_unwanted_operations())

    def _leave_unwanted_operations(self) -> None:
        with self._lock:
            if "operations" not in self.topics:
                self._leave_operations()

    def _running_module(self) -> RunningModule | None:
        stack = self._thread.stack
        if self._thread.is_reporting:
            return RunningModule(None, True, False)
        if not stack:
            return None
        place = next((each.place for each in reversed(stack) if each.place is not None), None)
        return RunningModule(place, stack[-1].hides, stack[-1].replays)

    def _emit(self, topic: Topic | None, method: str, *args: object) -> None:
        was_reporting, self._thread.is_reporting = self._thread.is_reporting, True
        try:
            self._deliver(topic, method, args)
        finally:
            self._thread.is_reporting = was_reporting

    def _deliver(self, topic: Topic | None, method: str, args: tuple[object, ...]) -> None:
        topics = _CALLS if topic == "calls" else frozenset((topic,))
        for each in self._subscriptions:
            if topic is not None and topics.isdisjoint(each.subscriber.wants):
                continue
            try:
                getattr(each.subscriber, method)(*args)
            except StopRun:
                raise
            except Exception as error:
                each.end()
                warnings.warn(
                    f"{type(each.subscriber).__name__} failed and has ended; training continues: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=3,
                )

    # -- modules ---------------------------------------------------------------------------------

    def _before_module(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if torch.compiler.is_compiling():
            return None
        frame = sys._getframe(1)
        stack = self._thread.stack
        if self._is_quiet and stack and module is not stack[-1].module:
            self._drop_left_calls(stack, frame)
            if stack:
                return None
        kwargs: Any = frame.f_locals.get("kwargs")
        return self._begin(module, args, kwargs if isinstance(kwargs, dict) else {}, frame)

    def _after_module(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        stack = self._thread.stack
        if self._is_quiet and (not stack or module is not stack[-1].module):
            return None
        # torch passes (kwargs, output), or after an exception (output) alone
        output = rest[-1]
        found = self._end(module, output, failed=len(rest) != 2)
        return None if found is output else found

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[Any, ...] | None:
        """Enter a call. Returns the arguments if a subscriber has replaced them."""
        stack = self._thread.stack
        self._drop_left_calls(stack, frame)
        replays = torch._C._current_graph_task_id() != -1
        if not torch.is_grad_enabled() and not stack:
            return None
        if stack:
            outer = stack[-1]
            running = _Running(module, frame, outer.model, outer.micro, outer.calls, replays=outer.replays or replays)
            running.hides = outer.hides
        elif _is_trial(frame, args, kwargs):
            running = _Running(module, frame, _Model(weakref.ref(module), ""), 0, {}, hides=True)
        else:
            running = self._begin_root(module, frame, replays)
        stack.append(running)
        if self._is_quiet:
            return None
        if running.hides or _is_wrapper(module):
            if running.hides or type(module).__name__ != _COMPILED:
                return None
            running.hides = True  # only its edges are reported
        return self._begin_named(running, args, kwargs, len(stack) == 1)

    def _begin_root(self, module: nn.Module, frame: FrameType, replays: bool) -> _Running:
        if replays:  # recomputation of a checkpointed module that is not called by another one
            model = self._model_of(module, frame)
            return _Running(module, frame, model, 0, self._replays, replays=True)
        model = self._model_of(module, frame)
        if not self._in_step:
            if self.step >= 0 and self._optimized:
                self._finish_step()
            self.step += 1
            self._in_step = True
            self._micros.clear()
            self._replays.clear()
            self._backwards.clear()
            self._stepped.clear()
            self._stepping.clear()
            self._roles = WeakIdKeyDictionary()
            self._hooked.clear()
            for handle in self._leaf_handles:
                handle.remove()
            self._leaf_handles.clear()
            if self._operations is not None:
                self._operations.clear()
            self._emit(None, "step_begins", self.step)
            with self._lock:
                self._observe_collectives()  # a subscriber may want more from this step on
        elif self._optimized:
            self._finish_step()
            return self._begin_root(module, frame, replays)
        model.rename(self.step)
        micro = self._micros.get(id(module), 0)
        self._micros[id(module)] = micro + 1
        self._micro = micro
        self._is_quiet = self.topics <= _OUTSIDE_OF_FORWARDS
        if self._is_quiet:
            return _Running(module, frame, model, micro, {})
        self._prepare(module)
        self._enter_operations()
        return _Running(module, frame, model, micro, {})

    def _begin_named(
        self, running: _Running, args: tuple[Any, ...], kwargs: dict[str, Any], is_root: bool
    ) -> tuple[Any, ...] | None:
        module, model = running.module, running.model
        calls = self._replays if running.replays else running.calls
        call = calls.get(id(module), 0)
        calls[id(module)] = call + 1
        if running.replays:  # one forward after the other, as backwards follow each other
            running.micro, call = divmod(call, self._counts.get(id(module), 1))
        else:
            self._counts[id(module)] = call + 1
        name = model.names.get(id(module))
        if name is None:  # a part that its parent holds elsewhere than in its registered modules
            stack = self._thread.stack
            outer = next((each.place.name for each in reversed(stack[:-1]) if each.place is not None), "")
            name = f"{outer}.{type(module).__name__}".lstrip(".")
        whole = name == model.prefix
        line = self._line_of(running)
        running.place = StepLocation(
            name, self.step, running.micro, call, line, model.first or not whole, model.last or not whole
        )
        topics = self.topics
        is_compiled = running.hides or module._compiled_call_impl is not None
        if running.replays:
            if "modules" in topics:
                running.event = ModuleCall(running.place, module, args, kwargs, is_compiled=is_compiled)
                running.has_hooks = True
                self._hook_tensors(running.event, "grad_input", running.event.inputs(), replays=True)
            return None
        self._lines[name] = line
        if "gradients" in topics:
            self._hook_parameters(module, name)
            stack = self._thread.stack
            if len(stack) > 1 and stack[-2].place is not None:  # FSDP has gathered them after its own call began
                self._hook_parameters(stack[-2].module, stack[-2].place.name)
        if topics.isdisjoint(_CALLS):
            return None
        event = running.event = ModuleCall(running.place, module, args, kwargs, None, is_root, is_compiled)
        self._emit("calls", "forward_begins", event)
        if event.kwargs is not kwargs:
            kwargs.update(event.kwargs)
        running.has_hooks = whole or is_root or "modules" in topics
        if running.has_hooks:
            self._hook_tensors(event, "grad_input", event.inputs())
        return event.args if event.args is not args else None

    def _line_of(self, running: _Running) -> str:
        """Return the line of user code that makes a call: that of the call around it, if no user code is between."""
        outer = next((each for each in reversed(self._thread.stack[:-1]) if each.place is not None), None)
        if outer is None or outer.place is None:
            return _line(running.frame)
        at: FrameType | None = running.frame
        while at is not None and at is not outer.frame:
            if is_user_frame(at):
                return _line(at)
            at = at.f_back
        return outer.place.line

    def _end(self, module: nn.Module, output: Any, failed: bool) -> Any:
        """Leave a call. Returns its output, which a subscriber may have replaced."""
        stack = self._thread.stack
        if not any(each.module is module for each in stack):
            return output
        while stack[-1].module is not module:
            stack.pop()
        running = stack.pop()
        event = running.event
        if not failed and event is not None:
            event.output = output
            if not running.replays:
                self._emit("calls", "forward", event)
            if running.has_hooks:
                self._hook_tensors(event, "grad_output", event.outputs(), running.replays)
            output = event.output
        return output

    def _hook_tensors(
        self,
        event: ModuleCall,
        kind: Literal["grad_input", "grad_output"],
        tensors: list[tuple[str, torch.Tensor]],
        replays: bool = False,
    ) -> None:
        """Report gradients of tensors. A tensor has one hook for all modules that take or return it.

        Of a parameter there is only the gradient of all its uses together, which `ParameterGradient` reports.
        Those of a recomputation count only if the first forward had no graph (reentrant checkpoints).
        """
        place = event.place
        for label, tensor in tensors:
            if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
                continue
            key = (place.name, place.micro, place.call, kind, label)
            if replays and key in self._hooked:
                continue
            self._hooked.add(key)
            known = self._roles.get(tensor)
            if known is not None and known[0] == tensor._version:
                known[1].append((place, kind, label, event.is_compiled))
                continue
            roles: list[_Role] = [(place, kind, label, event.is_compiled)]
            handle = tensor.register_hook(functools.partial(self._on_gradient, self._generation, roles))
            if tensor.is_leaf:
                self._leaf_handles.append(handle)  # other hooks go with their graph
            self._roles[tensor] = (tensor._version, roles)  # an operation in place makes it another node of the graph

    def _on_gradient(self, generation: int, roles: list[_Role], gradient: torch.Tensor) -> None:
        if self._subscriptions and generation == self._generation:
            gradient = gradient.detach()
            for place, kind, label, is_compiled in roles:
                self._emit("calls", "backward", ModuleGradient(place, kind, label, gradient, is_compiled))

    def _drop_left_calls(self, stack: list[_Running], frame: FrameType) -> None:
        """Drop calls that an exception has left without torch noticing (`KeyboardInterrupt`)."""
        while stack:
            at: FrameType | None = frame
            while at is not None and at is not stack[-1].frame:
                at = at.f_back
            if at is not None:
                return
            stack.pop()

    # -- parameters ------------------------------------------------------------------------------

    def _prepare(self, root: nn.Module) -> None:
        """Observe parameters and compiled modules of a model whose forward begins."""
        topics = self.topics
        model = self._models_of(root)
        for module in root.modules():
            if "gradients" in topics and model is not None:
                self._hook_parameters(module, model.names.get(id(module), ""))
            if module._compiled_call_impl is not None and "modules" in topics:
                self._wrap_compiled(module)

    def _models_of(self, module: nn.Module) -> _Model | None:
        return next((model for model in self._models.values() if id(module) in model.names), None)

    def _hook_parameters(self, module: nn.Module, name: str) -> None:
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter not in self._tensor_handles:
                full = f"{name}.{key}".lstrip(".")
                hook = functools.partial(self._on_parameter_gradient, full, name, weakref.ref(parameter))
                self._tensor_handles[parameter] = parameter.register_hook(hook)

    def _on_parameter_gradient(
        self, name: str, owner: str, reference: weakref.ref[torch.Tensor], gradient: torch.Tensor
    ) -> None:
        parameter = reference()
        if not self._subscriptions or parameter is None:
            return
        micro = self._backwards.get(name, 0)
        self._backwards[name] = micro + 1
        place = StepLocation(name, self.step, micro, 0, self._lines.get(owner, ""))
        self._emit("gradients", "gradient", ParameterGradient(place, parameter, gradient.detach()))

    def _wrap_compiled(self, module: nn.Module) -> None:
        """Observe the edges of a module that was compiled in place (`module.compile()`)."""
        original = module._compiled_call_impl
        if original is None or getattr(original, "observes", None) is self:
            return

        def observed(*args: Any, **kwargs: Any) -> Any:
            replaced = self._begin(module, args, kwargs, sys._getframe())
            if self._thread.stack:
                self._thread.stack[-1].hides = True
            try:
                output = original(*(args if replaced is None else replaced), **kwargs)
            except BaseException:
                self._end(module, None, failed=True)
                raise
            return self._end(module, output, failed=False)

        observed.observes = self  # pyright: ignore[reportFunctionMemberAccess]
        module._compiled_call_impl = observed
        self._compiled.append((weakref.ref(module), original))

    # -- optimizers ------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self._operations is not None:
            self._operations.leave()
        if self.step < 0:  # a program that calls no module
            self.step = 0
            self._in_step = True
            self._emit(None, "step_begins", 0)
        if "optimizer" in self.topics:
            named = self._stepping[id(optimizer)] = self._named(optimizer)
            self._emit("optimizer", "optimizer_begins", optimizer, named)

    def _after_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling() or self.step < 0:
            return
        parameters = self._stepping.pop(id(optimizer), None) or self._named(optimizer)
        self._optimized.extend(parameters)
        self._emit("optimizer", "optimizer_ends", optimizer, parameters)
        self._stepped.update(id(each.parameter) for each in parameters)
        if self._in_step and all(
            parameter.grad is None or id(parameter) in self._stepped for parameter in self._parameters()
        ):
            self._finish_step()

    def _finish_step(self) -> None:
        self._in_step = False
        self._optimized = []
        self._emit(None, "step_ends", self.step)

    def _parameters(self) -> Iterator[torch.Tensor]:
        for model in self._models.values():
            if (root := model.root()) is not None:
                yield from root.parameters()

    def _named(self, optimizer: Optimizer) -> list[NamedParameter]:
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        found: list[NamedParameter] = []
        groups: Iterable[dict[str, Any]] = optimizer.param_groups
        for at, group in enumerate(groups):
            for index, parameter in enumerate(group["params"]):
                name = names.get(id(parameter))
                found.append(
                    NamedParameter(name or f"optimizer.{at}.{index}", parameter, group, in_model=name is not None)
                )
        return found

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return all parameters of the observed models by name. With FSDP, they are the sharded ones."""
        return [each for root, prefix in self.models() for each in named_parameters(root, prefix)]

    def models(self) -> list[tuple[nn.Module, str]]:
        """Return the observed models, each with the prefix of its names, in the order of their first calls."""
        found = ((model.root(), model.prefix) for model in self._models.values())
        return [(root, prefix) for root, prefix in found if root is not None]

    # -- models ----------------------------------------------------------------------------------

    def _model_of(self, module: nn.Module, frame: FrameType) -> _Model:
        """Return the model in which a module that is called by itself is named."""
        known = self._models.get(id(module)) or self._models_of(module)
        if known is not None and known.root() is not None:
            if not known.called:  # a program has named it before
                known.called = True
                known.first, known.last = _stage(frame) or (True, True)
            return known
        variable, container = _container(module, frame)
        stage = _stage(frame)
        with self._lock:
            taken = {model.prefix for model in self._models.values() if model.root() is not None}
            trains = any(True for _ in container.parameters())
            if trains and ("" not in taken or stage is not None):
                prefix = ""
            else:
                prefix = variable or type(container).__name__
                count = itertools.count(2)
                base = prefix
                while prefix in taken:
                    prefix = f"{base}#{next(count)}"
            model = self._add_model(container, prefix)
        model.called = True
        if stage is not None:
            model.first, model.last = stage
        return model

    def _add_model(self, root: nn.Module, prefix: str) -> _Model:
        known = self._models.get(id(root))
        if known is not None and known.root() is root:
            return known
        model = _Model(weakref.ref(root), prefix)
        model.rename(-2)
        self._models[id(root)] = model
        return model

    # -- collectives -----------------------------------------------------------------------------

    def _collective(self, event: Collective) -> None:
        self._emit("collectives", "collective", event)


#: The files of cells in lines of places: the whole file name by the shown one. Only a notebook knows a cell's number.
cell_files: dict[str, str] = {}

_observer = Observer()


def observer() -> Observer:
    """Return the observer of this process."""
    return _observer


def named_modules(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once with its qualified name, without the prefixes of wrappers.

    A wrapper has the name of the module that it wraps.
    """
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        wraps = _is_wrapper(module)
        for key, child in module._modules.items():
            if child is not None:
                hidden = wraps and key in (*_WRAPPED, "module")
                yield from walk(child, name if hidden else f"{name}.{key}".lstrip("."))

    return walk(root, prefix)


class NamedBuffer(NamedTuple):
    """A buffer of a model.

    Attributes:
        name: its qualified name, without the prefixes of wrappers.
        module: the module that has it.
        is_persistent: whether it is a part of the model's state.
    """

    name: str
    module: nn.Module
    buffer: torch.Tensor
    is_persistent: bool


def named_buffers(root: nn.Module, prefix: str = "") -> Iterator[NamedBuffer]:
    """Yield the buffers of each module, in program order."""
    for name, module in named_modules(root, prefix):
        for key, buffer in module._buffers.items():
            if buffer is not None:
                is_persistent = key not in module._non_persistent_buffers_set
                yield NamedBuffer(f"{name}.{key}".lstrip("."), module, buffer, is_persistent)


def named_parameters(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter once with its qualified name, without the prefixes of wrappers."""
    seen: set[int] = set()
    for name, module in named_modules(root, prefix):
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{key}".lstrip("."), parameter


def _is_wrapper(module: nn.Module) -> bool:
    children = module._modules
    if "module" in children and type(module).__name__ in _WRAPPERS:
        return True
    return any(key in children for key in _WRAPPED)


def _container(module: nn.Module, frame: FrameType) -> tuple[str, nn.Module]:
    """Find the largest module that contains one, in the variables of user code; with the variable's name.

    A program that calls the parts of a model itself still gets the names of the whole model.
    """
    best, name, size = module, "", len(list(module.modules()))
    at: FrameType | None = user_frame(frame)
    while at is not None:
        for key, value in list(at.f_locals.items()):
            for part, candidate in _module_values(key, value):
                if candidate is best and not name and candidate is module:
                    name = part
                if candidate is best or candidate is module:
                    continue
                inside = list(candidate.modules())
                if len(inside) > size and any(each is module for each in inside):
                    best, name, size = candidate, part, len(inside)
        at = user_frame(at.f_back)
    return name, best


def _module_values(name: str, value: object) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module in a variable, and those in the attributes of an object of user code such as a trainer."""
    if issubclass(type(value), nn.Module):  # isinstance would run code of lazy objects
        yield name, cast("nn.Module", value)
    elif name == "self":
        for key, inner in list(getattr(value, "__dict__", {}).items()):
            if issubclass(type(inner), nn.Module):
                yield key, inner


def _stage(frame: FrameType | None) -> tuple[bool, bool] | None:
    """Return whether the pipeline stage that calls a module is the first and the last; None outside a pipeline."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _STAGES:
            stage: Any = frame.f_locals.get("self")
            if hasattr(stage, "is_first") and hasattr(stage, "is_last"):
                return bool(stage.is_first), bool(stage.is_last)
        frame = frame.f_back
    return None


def _is_trial(frame: FrameType | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call only finds out shapes: with tensors without data, or by a pipeline stage in advance."""
    if any(each.is_meta or type(each).__name__ == "FakeTensor" for _, each in (*_tensors(args), *_tensors(kwargs))):
        return True
    in_stage = False
    while frame is not None:
        if frame.f_globals.get("__name__") == _STAGES:
            in_stage = True
            if frame.f_code.co_name in _STAGE_FORWARDS:
                return False
        frame = frame.f_back
    return in_stage


_exists = functools.lru_cache(maxsize=1024)(os.path.exists)  # asked for each call of a module


def _line(frame: FrameType | None) -> str:
    found = user_frame(frame)
    if found is None:
        return ""
    file = found.f_code.co_filename
    shown = shown_file(file)
    if shown not in cell_files and not _exists(file):
        cell_files[shown] = file
    return f"{shown}:{found.f_lineno}"


def _tensors(value: Any, label: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in tuples, lists, dictionaries and data classes, each with its path."""
    if isinstance(value, torch.Tensor):
        yield label, value
        return
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif hasattr(value, "__dataclass_fields__"):
        items = vars(value).items() if hasattr(value, "__dict__") else ()
    else:
        return
    for key, inner in items:
        yield from _tensors(inner, f"{label}.{key}".lstrip("."))
