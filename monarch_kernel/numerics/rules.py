"""Rules that every right training step keeps, checked while it runs.

`rules` checks them until its ``with`` block ends. A rule is a function of a `CheckedStep`: it yields broken rules that
this rank sees by itself (`CheckedStep.broken`), or claims about values of several ranks (`CheckedStep.equal`,
`CheckedStep.different`), which rank 0 compares. `rule` adds one.

Nothing of a program is changed, and no collective is added (see `claims`). Rules look at every Nth step only. Which
ranks hold the same parameter follows from DTensor, FSDP2 and DistributedDataParallel, from placements that the program
names, or from what it does: gradients that it reduces, and values that stay equal while they are trained.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from monarch_kernel.debugger.source_locations import user_frame, user_line
from monarch_kernel.display.quantities import few
from monarch_kernel.engines.join.progress_monitor import issued
from monarch_kernel.numerics.claims import CONSTANT, DEADLINE, BrokenRule, Claim, Exchange, Relation
from monarch_kernel.numerics.mesh_summaries import is_on_mesh, rank_on_mesh
from monarch_kernel.numerics.observer import (
    ModuleCall,
    ModuleGradient,
    NamedParameter,
    StopRun,
    Subscriber,
    Subscription,
    Topic,
    named_buffers,
    named_modules,
    observer,
)
from monarch_kernel.numerics.summaries import Placements, Replicate, Shard, Split, hash_of, local_of

if TYPE_CHECKING:
    from monarch_kernel.tensor import Tensor

# A gradient is outside its history if its norm exceeds the largest of at least so many checks by this factor.
_HISTORY, _SPIKE = 10, 1000.0
# An update is outside its history if it exceeds the largest of earlier ones, per unit of the learning rate, by this
# factor; and by that one, if something other than an optimizer has written to the weights since the last step.
_JUMP, _JUMP_AFTER_WRITE = 100.0, 10.0
# Elements of a parameter that are kept to measure its update.
_SAMPLE = 1024
# Inputs of fewer elements may be equal by chance; so may masks.
_FEW_FLOATS, _FEW_INTEGERS, _FEW_MASKED = 4, 16, 64
_DROPOUTS, _MASKED = 8, 1 << 14  # modules whose masks are compared in a step, and elements of each
# Memory grows without end if it does so at this many checks in succession, by this many bytes each.
_GROWTHS, _GROWTH = 20, 1 << 20

Finding = BrokenRule | Claim
RuleFunction = Callable[["CheckedStep"], Iterable[Finding]]
Function = TypeVar("Function", bound=RuleFunction)


@dataclass(slots=True, eq=False)
class CheckedParameter:
    """A parameter in a step.

    Attributes:
        name: its qualified name.
        parameter: the parameter after the step; live, must not be changed.
        norm: the norm of its final local gradient; None if it had none.
        lr: its learning rate; None if no optimizer has it.
        before, after: hashes of its local part before and after the step. `before` is "" if a sample of its elements
            moved at the last check: then the sample shows that it moves.
        update: the root mean square of its change, measured on a sample of its elements.
        groups: the groups of ranks, with this one, that hold the same part of it, and why that is known. None if
            nothing is known; then rank 0 learns it from gradients and values (`claims.Judge`).
        gradient: a hash of its final local gradient, where nothing is known.
        family: the class of its module if that is a norm, or "".
        is_constant: whether all its elements were equal before the step.
        optimizer: the optimizer that has it, and stepped.
        is_held: whether any optimizer that stepped so far has it.
    """

    name: str
    parameter: torch.Tensor
    norm: float | None = None
    lr: float | None = None
    before: str = ""
    after: str = ""
    update: float = 0.0
    groups: list[tuple[tuple[int, ...], str]] | None = None
    gradient: str = ""
    family: str = ""
    is_constant: bool = False
    optimizer: Optimizer | None = None
    is_held: bool = False
    _sample: torch.Tensor | None = None  # before the step

    @property
    def has_moved(self) -> bool:
        """Whether any element changed in the step. True if that is unknown; see `is_doubtful`."""
        return not self.before or self.before != self.after

    @property
    def is_doubtful(self) -> bool:
        """Whether no sampled element changed, and others may have: the next step that is checked will show it."""
        return not self.before and not self.update


@dataclass(slots=True)
class CheckedInput:
    """The input of a model in one micro-batch.

    Attributes:
        name: the model's name; "" for the first one.
        digest: a hash of all its tensors; "" if they are too few elements, or all equal, to tell batches apart.
        weights: a mark that changes when the model's weights do.
        follows_backward: whether a backward came between this forward and the previous one.
        line: the line of user code that called the model.
    """

    name: str
    digest: str
    weights: int
    follows_backward: bool
    line: str


@dataclass(slots=True)
class CheckedMask:
    """What a dropout module dropped.

    Attributes:
        name: the module's name.
        digest: a hash of which of its first elements it dropped.
        inputs: a hash of its whole input; "" if no ranks hold parts of one model.
        line: the line of user code that called it.
    """

    name: str
    digest: str
    inputs: str
    line: str


@dataclass(slots=True, eq=False)
class CheckedStep:
    """What this rank has seen of a step, for the functions of rules.

    Attributes:
        number: the index of the step.
        rank, size: of this process in the job.
        line: the line of user code that called `optimizer.step()`.
        parameters: the parameters of all models, and of optimizers that hold others.
        buffers: the buffers of all models by name, but for those that DistributedDataParallel broadcasts.
        inputs, masks: of the models and dropout modules.
        optimizers: those that stepped, with their parameters.
        data_ranks: the ranks, with this one, that train the same model on different batches, or "data" if rank 0 has
            to learn which they are.
        model_ranks: the ranks, with this one, that hold parts of one model, or "model" likewise.
        memory: memory in use in bytes, and its kind.
        was_written: whether something other than an optimizer wrote to parameters since the last step.
        notes: belongs to the rule; what it stores here it finds again at its next check.
        next_step_too: set it to have the next step checked as well.
    """

    number: int
    rank: int
    size: int
    line: str = ""
    parameters: list[CheckedParameter] = field(default_factory=list[CheckedParameter])
    buffers: list[tuple[str, torch.Tensor]] = field(default_factory=list[tuple[str, torch.Tensor]])
    inputs: list[CheckedInput] = field(default_factory=list[CheckedInput])
    masks: list[CheckedMask] = field(default_factory=list[CheckedMask])
    optimizers: list[tuple[Optimizer, list[NamedParameter]]] = field(
        default_factory=list[tuple[Optimizer, list[NamedParameter]]]
    )
    data_ranks: tuple[int, ...] | Relation = "data"
    model_ranks: tuple[int, ...] | Relation = "model"
    memory: tuple[int, str] = (0, "")
    was_written: bool = False
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    next_step_too: bool = False
    _rule: str = ""

    def broken(self, names: str | Sequence[str], message: str, *, line: str = "", sure: bool = True) -> BrokenRule:
        """Return that this rank breaks the rule.

        Args:
            names: the parameters or modules concerned.
            message: what is wrong, and what to do next.
            line: the line of user code; by default, that of the step.
            sure: False if there is another explanation, which the message gives.
        """
        named = (names,) if isinstance(names, str) else tuple(names)
        return BrokenRule(self._rule, self.number, (self.rank,), named, message, line or self.line, sure)

    def equal(self, name: str, value: object, ranks: Sequence[int] | Relation, **more: Any) -> Claim:
        """Return the claim that a value is equal on all of these ranks; `Claim` describes further arguments."""
        return self._claim(name, value, "equal", ranks, more)

    def different(self, name: str, value: object, ranks: Sequence[int] | Relation, **more: Any) -> Claim:
        """Return the claim that no two of these ranks have this value; `Claim` describes further arguments."""
        return self._claim(name, value, "different", ranks, more)

    def _claim(
        self, name: str, value: object, kind: Any, ranks: Sequence[int] | Relation, more: dict[str, Any]
    ) -> Claim:
        chosen = ranks if isinstance(ranks, str) else tuple(ranks)
        return Claim(self._rule, name, str(value), kind, chosen, line=more.pop("line", self.line), **more)


# -- the rules -------------------------------------------------------------------------------------------

_RULES: dict[str, RuleFunction] = {}


def rule(function: Function) -> Function:
    """Add a rule, named as its function; a function of the same name replaces it.

    The function is called on every rank at the end of each checked step, and yields broken rules and claims::

        @rule
        def small_weights(step):
            for each in step.parameters:
                if each.parameter.abs().max() > 100:
                    yield step.broken(each.name, "a weight exceeds 100")
    """
    if not callable(function):
        raise TypeError(f"@rule takes a function of a step, not {function!r}")
    _RULES[function.__name__] = function
    return function


def run_rule(name: str, function: RuleFunction, step: CheckedStep) -> list[Finding]:
    """Return what a rule finds in a step."""
    step._rule = name
    return list(function(step))


def rule_names() -> list[str]:
    """Return the names of all rules."""
    return list(_RULES)


@rule
def replicas(step: CheckedStep) -> Iterator[Finding]:
    """Parameters that several ranks hold are equal on all of them."""
    for each in step.parameters:
        if not each.after:
            continue
        if each.groups is None:
            trained = (each.before or f"rank {step.rank}") if each.norm else ""
            given = CONSTANT if each.is_constant else ""
            yield step.equal(each.name, each.after, "replicas", before=trained, given=given, family=each.family)
            continue
        for ranks, why in each.groups:
            if len(ranks) > 1:
                yield step.equal(each.name, each.after, ranks, why=why)


@rule
def updates(step: CheckedStep) -> Iterator[Finding]:
    """A parameter that an optimizer has, and that has a gradient, moves in a step, once, and as far as usual."""
    yield from _updated_twice(step)
    yield from _without_optimizer(step)
    yield from _unmoved(step)
    history: dict[str, list[float]] = step.notes.setdefault("history", {})
    factor = _JUMP_AFTER_WRITE if step.was_written else _JUMP
    jumps: dict[str, float] = {}
    for each in step.parameters:
        if not each.update or not each.norm or not each.lr:
            continue
        distance, ratio = each.update / each.lr, each.update / each.lr / each.norm
        farthest, largest, count = history.setdefault(each.name, [0.0, 0.0, 0])
        if count >= 2 and distance > factor * farthest > 0 and ratio > factor * largest:
            jumps[each.name] = distance / farthest
        history[each.name] = [max(farthest, distance), max(largest, ratio), count + 1]
    if jumps:
        name = max(jumps, key=lambda name: jumps[name])
        more = f" ({len(jumps) - 1} more moved too far, too)" if len(jumps) > 1 else ""
        since = "after something else had written to the weights" if step.was_written else "in this step"
        yield step.broken(
            tuple(jumps),
            f"{name} moved {jumps[name]:.3g} times as far as in any checked step before{more}, {since}, and not "
            "because of its gradient or learning rate: the optimizer may hold stale copies of weights that were loaded "
            "since",
            sure=False,
        )


def _updated_twice(step: CheckedStep) -> Iterator[Finding]:
    for _, parameters in step.optimizers:
        ranges: list[tuple[int, int, str]] = []
        for each in parameters:
            local = local_of(each.parameter)
            if each.parameter.grad is None or not local.numel() or local.device.type == "meta":
                continue
            start = local.data_ptr()
            ranges.append((start, start + local.numel() * local.element_size(), _name_in_group(each)))
        ranges.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
            if start < end:
                yield step.broken(
                    sorted({first, second}),
                    f"the optimizer has the memory of {first} twice, as {second}, too, and updates it twice a step",
                )


def _name_in_group(each: NamedParameter) -> str:
    """Return the name that the optimizer was given for a parameter that no model has."""
    names: Sequence[str] = each.group.get("param_names", ())
    if each.in_model or not names:
        return each.name
    return names[next(at for at, held in enumerate(each.group["params"]) if held is each.parameter)]


def _without_optimizer(step: CheckedStep) -> Iterator[Finding]:
    lost = [each for each in step.parameters if each.norm and not each.is_held and not each.has_moved]
    seen: set[str] = step.notes.setdefault("lost", set())
    again = [each.name for each in lost if each.name in seen]
    seen |= {each.name for each in lost}
    if lost and not again:
        step.next_step_too = True
    if not again:
        return
    shown = few(again, 3)
    strange = [each for _, parameters in step.optimizers for each in parameters if not each.in_model]
    idle = sum(each.parameter.grad is None for each in strange)
    if step.optimizers and strange and idle == len(strange) == sum(len(each) for _, each in step.optimizers):
        yield step.broken(
            again,
            f"{shown} get gradients and do not move: the optimizer holds {idle} parameters that no model has and that "
            "get no gradients. It was probably made before the model was wrapped or moved; make it afterwards",
        )
    else:
        yield step.broken(
            again,
            f"{shown} get gradients, but no optimizer has them. If that is on purpose, requires_grad_(False) saves "
            "their gradients",
            sure=False,
        )


def _unmoved(step: CheckedStep) -> Iterator[Finding]:
    counts: dict[str, int] = step.notes.setdefault("unmoved", {})
    for optimizer, _ in step.optimizers:
        own = [each for each in step.parameters if each.optimizer is optimizer and each.norm and each.lr]
        still = [each for each in own if not each.has_moved and _should_move(each)]
        doubtful = [each for each in own if each.is_doubtful]
        for each in own:
            counts[each.name] = counts.get(each.name, 0) + 1 if each in still else 0
        # An optimizer that moves nothing for some steps may accumulate gradients by itself.
        needed = 2 if len(still) + len(doubtful) < len(own) else 4
        names = [each.name for each in still if counts[each.name] == needed]
        if still and not names:
            step.next_step_too = step.next_step_too or any(counts[each.name] < needed for each in still)
        step.next_step_too = step.next_step_too or bool(doubtful)
        if names:
            shown = few(names, 3)
            yield step.broken(
                names, f"{shown} did not move in {needed} checked steps, with gradients and learning rates above 0"
            )


def _should_move(each: CheckedParameter) -> bool:
    """Whether the largest gradient, times the learning rate, exceeds the resolution of the parameter's type."""
    local = local_of(each.parameter)
    grad = each.parameter.grad
    if grad is None or each.lr is None or getattr(each.optimizer, "found_inf", None) is not None:
        return False
    largest = float(local_of(grad).abs().max())
    return each.lr * largest > 2 * torch.finfo(local.dtype).eps * max(float(local.abs().max()), 1e-30)


@rule
def data(step: CheckedStep) -> Iterator[Finding]:
    """No two ranks read the same batch, and no rank reads a micro-batch twice in a step."""
    ranks = step.data_ranks
    counts: dict[str, int] = {}
    for each in step.inputs:
        at = counts[each.name] = counts.get(each.name, -1) + 1
        if each.digest:
            name = f"{each.name or 'the model'} (micro-batch {at})" if at else each.name or "the model"
            yield step.different(name, each.digest, ranks, what="inputs", line=each.line, twice=True)
    for name in counts:
        yield from _repeated(step, [each for each in step.inputs if each.name == name])


def _repeated(step: CheckedStep, micros: list[CheckedInput]) -> Iterator[Finding]:
    first: dict[tuple[str, int], int] = {}
    repeats: list[tuple[int, int]] = []
    is_split = False
    for at, each in enumerate(micros):
        is_split = is_split or (at > 0 and each.follows_backward)
        if not each.digest:
            continue
        earlier = first.setdefault((each.digest, each.weights), at)
        if earlier != at and any(between.follows_backward for between in micros[earlier + 1 : at + 1]):
            repeats.append((earlier, at))
    if not repeats or not is_split:
        return
    earlier, at = repeats[0]
    sure = len(micros) > 2 and 2 * len(repeats) < len(micros)
    rest = (
        "" if sure else "; a method that runs forward twice on the same batch (SAM, for example) does that on purpose"
    )
    yield step.broken(
        (),
        f"the input of micro-batch {at} equals that of micro-batch {earlier} of the same step, with the same "
        f"weights{rest}",
        line=micros[at].line,
        sure=sure,
    )


@rule
def random(step: CheckedStep) -> Iterator[Finding]:
    """Dropout draws different masks for different activations, and equal ones for replicated activations."""
    for each in step.masks:
        more: dict[str, Any] = {"line": each.line, "what": "dropout masks"}
        why = "data-parallel ranks need masks of their own"
        yield step.different(each.name, each.digest, step.data_ranks, why=why, **more)
        if not each.inputs:
            continue
        why = "the activations differ on these ranks, which therefore need masks of their own"
        yield step.different(each.name, each.digest, step.model_ranks, given=each.inputs, why=why, **more)
        why = "the activations are equal on these ranks, which therefore need equal masks"
        yield step.equal(each.name, each.digest, step.model_ranks, given=each.inputs, why=why, **more)


@rule
def grads(step: CheckedStep) -> Iterator[Finding]:
    """Gradients are finite and within their history, and a replicated parameter has one on every rank or on none."""
    history: dict[str, list[float]] = step.notes.setdefault("history", {})
    bad: list[str] = []
    for each in step.parameters:
        for ranks in _sharing(step, each):
            yield step.equal(each.name, "none" if each.norm is None else "one", ranks, what="gradients (present?)")
        if each.norm is None or getattr(each.optimizer, "found_inf", None) is not None:  # a GradScaler skips the step
            continue
        if not math.isfinite(each.norm):
            bad.append(each.name)
            continue
        largest = history.setdefault(each.name, [0.0, 0])
        if largest[1] >= _HISTORY and each.norm > _SPIKE * largest[0] > 0:
            yield step.broken(
                each.name,
                f"the gradient of {each.name} has the norm {each.norm:.3g}, {each.norm / largest[0]:.3g} times the "
                f"largest of the {int(largest[1])} checked steps before",
                sure=False,
            )
        history[each.name] = [max(largest[0], each.norm), largest[1] + (each.norm > 0)]
    if bad:
        shown = few(bad, 3)
        yield step.broken(bad, f"NaN or Inf in the gradients of {shown} that the optimizer was given")


@rule
def lr(step: CheckedStep) -> Iterator[Finding]:
    """Ranks that train the same parameter use the same learning rate."""
    for each in step.parameters:
        if each.lr is not None:
            for ranks in _sharing(step, each):
                yield step.equal(each.name, f"{each.lr:.17g}", ranks, what="learning rates")


def _sharing(step: CheckedStep, each: CheckedParameter) -> list[tuple[int, ...] | Relation]:
    """Return the groups of ranks that train a parameter together."""
    known = [ranks for ranks, _ in each.groups or () if len(ranks) > 1]
    return [*known] or [step.data_ranks]


@rule
def buffers(step: CheckedStep) -> Iterator[Finding]:
    """Buffers that several ranks hold are equal on all of them."""
    why = "each rank updates its buffer, and nothing reduces it"
    for name, buffer in step.buffers:
        yield step.equal(name, hash_of_part(buffer), step.data_ranks, why=why)


@rule
def memory(step: CheckedStep) -> Iterator[Finding]:
    """Memory does not grow without end."""
    used, kind = step.memory
    if not kind:
        return
    past: list[int] = step.notes.setdefault("past", [])
    if past and used < past[-1] + _GROWTH:
        past.clear()
    past.append(used)
    if len(past) > _GROWTHS and used > 1.25 * past[0]:
        gib = [f"{each / 2**30:.2f} GiB" for each in (past[0], used)]
        past.clear()
        yield step.broken(
            (),
            f"{kind} grew at each of {_GROWTHS} checks, from {gib[0]} to {gib[1]}: tensors of earlier steps may be "
            "kept, for example losses with their graphs",
            sure=False,
        )


# -- checking ----------------------------------------------------------------------------------------------


class RuleCheck(Subscriber):
    """Checks rules on the steps of this process. `rules` makes one; see there for the arguments."""

    wants: frozenset[Topic] = frozenset(("optimizer",))

    def __init__(
        self,
        names: Sequence[str],
        *,
        every: int,
        stop: bool,
        placements: Mapping[str, Split] | None,
        session: str,
        deadline: float,
        late: bool,
        in_debugger: bool,
        report: Callable[[BrokenRule], None] | None,
    ) -> None:
        self.names = tuple(names)
        self.every, self.stop = every, stop
        self.broken: list[BrokenRule] = []
        """The rules that were broken, as this rank has seen; rank 0 sees those of all ranks."""
        self.checked = 0
        """The number of steps that this rank has checked."""
        self._patterns = dict(placements or {})
        self._placements: Placements | None = None
        self._session, self._deadline, self._late = session, deadline, late
        self._in_debugger = in_debugger
        self._report_to = report
        self._notes: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        self._exchange: Exchange | None = None
        self._step: CheckedStep | None = None
        self._captured: dict[int, CheckedParameter] = {}  # by id of a parameter
        self._has_own_rules = not set(_BUILT_IN).issuperset(names)
        self._reads_values = self._has_own_rules or bool(_OF_VALUES & set(names))
        # Whether masks depend on the inputs of other ranks. Not so where all ranks of all parameters are known.
        self._compares_model_ranks = True
        self._moving: set[str] = set()  # names of parameters whose samples moved at the last check
        self._replicas: _Replicas | None = None  # of this step
        self._backwards = False
        self._roots: set[str] = set()  # names of models
        self._on_mesh: torch.Tensor | None = None  # a parameter of this step on a mesh
        self._mesh_check: MeshCheck | None = None
        self._extra = False  # whether the next step is checked, due or not
        self._is_extra = False  # whether this step is checked by this rank alone
        self._versions: dict[int, int] = {}  # by id of an optimizer: of its parameters after its step
        self._held = WeakIdKeyDictionary()  # parameters of optimizers that stepped
        self._nested = 0
        self._ends_later = False
        self._issued: int | None = None  # collectives at the begin of the step before
        self._stepped: int | None = None  # steps of the optimizer by its own count
        self._local: list[BrokenRule] = []
        self._stopped_for: set[tuple[str, tuple[str, ...]]] = set()
        self._subscription: Subscription | None = None
        self._has_ended = False

    # -- life --

    def begin(self, model: nn.Module | None = None) -> None:
        """Begin with the next step."""
        self._subscription = observer().subscribe(self, model)

    def end(self) -> None:
        """End it. Claims that were sent before are still judged."""
        self._has_ended = True
        if self._subscription is not None:
            self._subscription.end()
        if self._exchange is not None:
            self._exchange.end()

    @property
    def summary(self) -> str:
        """One line: what was checked, and what was found."""
        steps = f"{self.checked} step{'s' * (self.checked != 1)} checked"
        found = f"{len(self.broken)} broken" if self.broken else "no rule broken"
        exchange = self._exchange
        across = ""
        if exchange is None or self._mesh_check is not None:  # no step has begun, or one process sees all ranks
            pass
        elif not exchange.reaches_others:
            across = "; rules across ranks need a process group, which there is not"
        elif exchange.missing:
            across = f"; not compared: {exchange.missing[-1]}"
        return f"{steps} ({', '.join(self.names)}): {found}{across}."

    def _report(self, broken: BrokenRule) -> None:
        self.broken.append(broken)
        if self._report_to is not None:
            self._report_to(broken)

    # -- events --

    def step_begins(self, step: int) -> None:
        self._step = None
        self.wants = frozenset(("optimizer",))
        self._captured = {}
        self._replicas = None
        self._nested = 0
        self._ends_later = False
        self._is_extra = self._extra
        if self._extra or self._is_due(step):
            self._open(step)
        self._extra = False

    def _open(self, step: int) -> None:
        """Check this step."""
        import torch.distributed as dist

        self._on_mesh = next((each for _, each in observer().named_parameters() if is_on_mesh(each)), None)
        has_group = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)
        self._step = CheckedStep(step, rank, size)
        if self._exchange is None or (has_group and size > 1 and not self._exchange.reaches_others):
            self._connect(rank, size, has_group)
        if self._on_mesh is not None:
            self._begin_on_mesh()
        elif self._has_own_rules or {"data", "random"} & set(self.names):
            self.wants = frozenset(("optimizer", "calls"))
        self._backwards = False

    def _begin_on_mesh(self) -> None:
        """Have ranks check rules, where the model's tensors are theirs."""
        if self._mesh_check is None:
            self._mesh_check = MeshCheck({name: _RULES[name] for name in self.names}, self._patterns)
            self.names = tuple(name for name in self.names if name not in BY_CONSTRUCTION)

    def _is_due(self, step: int) -> bool:
        if not self._late:
            return step % self.every == 0
        now, before = issued() or 0, self._issued
        self._issued = now
        if before is not None and now > before:
            return now // (now - before) % self.every == 0
        if before is None:  # this step may have begun before the check
            return False
        return (step if self._stepped is None else self._stepped + 1) % self.every == 0

    def _key(self, step: CheckedStep) -> str | None:
        """Return a name of the step that is the same on all ranks; None if there is none.

        Ranks that begin in a running job count steps from different ones. The collectives that the default group has
        issued agree, if the program uses it in every step, and so do the counts of Adam and its kin.
        """
        if not self._late:
            return f"step {step.number}"
        now = issued()
        if now is not None and self._issued is not None and now > self._issued:
            return f"collective {now}"
        return None if self._stepped is None else f"update {self._stepped}"

    def forward(self, event: ModuleCall) -> None:
        step = self._step
        if step is None or self._on_mesh is not None:
            return
        place, module = event.place, event.module
        if place.name not in self._roots and (event.is_root or not self._roots):
            self._roots = {prefix for _, prefix in observer().models()}
        if place.name in self._roots and place.first and any(True for _ in module.parameters()):
            weights = sum(each._version for each in module.parameters())
            digest = _input_digest([tensor for _, tensor in event.inputs()])
            step.inputs.append(CheckedInput(place.name, digest, weights, self._backwards, place.line))
            self._backwards = False
        if (
            isinstance(module, nn.modules.dropout._DropoutNd)
            and module.training
            and 0.02 < module.p < 0.98
            and place.micro == place.call == 0
            and len(step.masks) < _DROPOUTS
        ):
            self._mask(step, event)

    def _mask(self, step: CheckedStep, event: ModuleCall) -> None:
        inputs, outputs = event.inputs(), event.outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            return
        source, result = local_of(inputs[0][1]), local_of(outputs[0][1])
        if source.shape != result.shape or source.data_ptr() == result.data_ptr():  # in place
            return
        live = source.reshape(-1)[:_MASKED] != 0
        dropped = (result.reshape(-1)[:_MASKED] == 0) & live
        if int(live.sum()) >= _FEW_MASKED and int(dropped.sum()) >= _FEW_FLOATS:
            inputs = hash_of_part(source) if self._compares_model_ranks else ""
            step.masks.append(CheckedMask(event.place.name, hash_of_part(dropped), inputs, event.place.line))

    def backward(self, event: ModuleGradient) -> None:
        self._backwards = True

    def optimizer_begins(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> None:
        self._nested += 1
        versions = _versions(parameters)
        was_written = self._versions.get(id(optimizer), versions) != versions
        if was_written and self._step is None and self._nested == 1 and self._exchange is not None:
            self._is_extra = True
            self._open(observer().step)
        step = self._step
        if step is not None:
            step.was_written = step.was_written or was_written
        if step is None or self._nested > 1:  # an optimizer that calls another one
            if step is not None and all(each is not optimizer for each, _ in step.optimizers):
                step.optimizers.append((optimizer, list(parameters)))
            return
        step.line = step.line or user_line(sys._getframe())
        step.optimizers.append((optimizer, list(parameters)))
        held = {id(each.parameter): each for each in parameters}
        todo: list[tuple[str, torch.Tensor]] = []
        for name, parameter in observer().named_parameters():
            if parameter.requires_grad and (id(parameter) in held or id(parameter) not in self._captured):
                todo.append((name, parameter))
        if self._mesh_check is not None and self._on_mesh is not None:
            todo += [(each.name, each.parameter) for each in parameters if not each.in_model]
            self._mesh_check.begins(todo, optimizer, held)
            return
        self._replicas = self._replicas or _Replicas(step, self._placements)
        self._capture(todo, optimizer, held)

    def _capture(
        self, named: list[tuple[str, torch.Tensor]], optimizer: Optimizer, held: dict[int, NamedParameter]
    ) -> None:
        replicas = self._replicas
        assert replicas is not None
        local = [local_of(parameter) for _, parameter in named]
        grads = [None if each.grad is None else local_of(each.grad) for _, each in named]
        norms = _norms([each for each in grads if each is not None])
        described: list[CheckedParameter] = []
        for (name, parameter), part, grad in zip(named, local, grads):
            norm = None if grad is None else next(norms)
            if part.device.type == "meta":
                continue
            found = CheckedParameter(name, parameter, norm)
            if self._reads_values and name not in self._moving:
                found.before = hash_of_part(part)
            holder = held.get(id(parameter))
            if holder is not None:
                found.optimizer, found.lr = optimizer, float(holder.group.get("lr", 0.0))
            replicas.describe(found)
            if found.groups is None and grad is not None and found.norm:
                found.gradient = hash_of_part(grad)
            self._captured[id(parameter)] = found
            described.append(found)
        if self._reads_values:
            sample_parameters(described)
        for found in described:
            found.is_constant = found.groups is None and _is_constant(found)

    def optimizer_ends(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> None:
        self._nested = max(0, self._nested - 1)
        self._versions[id(optimizer)] = _versions(parameters)
        for each in parameters:
            self._held[each.parameter] = True
        if self._late and not self._nested:
            self._stepped = _count_of(optimizer)
        if self._step is None or self._nested:
            return
        if self._mesh_check is not None and self._on_mesh is not None:
            self._mesh_check.ends(parameters)
        measure_updates([found for each in parameters if (found := self._captured.get(id(each.parameter))) is not None])
        if self._ends_later:
            self.step_ends(observer().step)

    def step_ends(self, step: int) -> None:
        self._ends_later = self._nested > 0  # an optimizer that calls another one has not ended
        if self._ends_later:
            return
        checked, self._step = self._step, None
        if checked is None or self._has_ended:
            return
        if not checked.optimizers:
            return
        if self._mesh_check is not None and self._on_mesh is not None:
            self._check_on_mesh(checked, self._mesh_check, self._on_mesh)
            return
        self._complete(checked)
        claims: list[Claim] = []
        self._local = []
        for name in self.names:
            checked.notes = self._notes[name]
            try:
                findings = run_rule(name, _RULES[name], checked)
            except StopRun:
                raise
            except Exception as error:
                self.names = tuple(each for each in self.names if each != name)
                warnings.warn(
                    f"rule {name} failed and is checked no more: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                continue
            claims += [each for each in findings if isinstance(each, Claim)]
            self._local += [each for each in findings if isinstance(each, BrokenRule)]
        self._extra = checked.next_step_too
        self.checked += 1
        self._send(checked, claims + _gradient_claims(checked))

    def _send(self, step: CheckedStep, claims: list[Claim]) -> None:
        exchange = self._exchange
        assert exchange is not None
        exchange.keep(self._local)
        found = list(self._local)
        key = None if self._is_extra else self._key(step)
        if key is None and not self._is_extra and step.size > 1:
            exchange.missing.append(
                f"step {step.number}: nothing tells which steps of the ranks are the same; use rules() in the program"
            )
        if key is not None:
            # Before ranks of a running job check the same steps, waiting for each other would hold the job.
            waits = self.stop and step.size > 1 and not exchange.missing and (not self._late or exchange.is_joint)
            exchange.send(key, step.number, claims, waits)
            if waits:
                answer = exchange.verdicts(key, self._deadline)
                if answer is None:
                    exchange.missing.append(f"step {step.number}: no verdict within {self._deadline:g} s")
                found += answer or ()
        self._stop_for(found)

    def _stop_for(self, found: list[BrokenRule]) -> None:
        """Stop for what is certainly broken and was not known before, if that is wanted."""
        known = self._stopped_for
        new = [each for each in found if each.sure and (each.rule, each.names) not in known]
        if self.stop and new:
            known |= {(each.rule, each.names) for each in new}
            _stop("\n".join(dict.fromkeys(map(str, new))), self._in_debugger)

    def _check_on_mesh(self, step: CheckedStep, check: MeshCheck, tensor: torch.Tensor) -> None:
        exchange = self._exchange
        assert exchange is not None
        held = [name for name, each in observer().named_parameters() if each in self._held]
        buffers = [
            (each.name, each.buffer)
            for root, prefix in observer().models()
            for each in named_buffers(root, prefix)
            if each.is_persistent and each.buffer.numel()
        ]
        found = check.check(step, held, buffers, tensor)
        self._extra = step.next_step_too
        self.checked += 1
        self._stop_for(exchange.conclude(step.number, found))

    # -- facts --

    def _connect(self, rank: int, size: int, has_group: bool) -> None:
        store: Any = None
        if has_group and size > 1:
            from torch.distributed.distributed_c10d import _get_default_store

            default: Any = _get_default_store()
            store = default.clone() if hasattr(default, "clone") else _Polled(default)  # since torch 2.7
        self._exchange = Exchange(store, rank, size, self._session, self._report, self._deadline)
        self._placements = Placements(self._patterns, rank, size) if self._patterns else None

    def _complete(self, step: CheckedStep) -> None:
        """Add what is known at the end of a step."""
        step.parameters = list(self._captured.values())
        self._captured = {}
        self._moving = moving_names(step.parameters)
        known = all(each.groups is not None for each in step.parameters)
        self._compares_model_ranks = not known or step.model_ranks != "model"
        for each in step.parameters:
            if self._reads_values:
                each.after = hash_of_part(each.parameter)
            each.is_held = each.parameter in self._held
        step.memory = memory_in_use()


class _Polled:
    """A store of the program, over the program's own connection: no wait blocks it."""

    def __init__(self, store: Any) -> None:
        self.set, self.get, self.check, self.delete_key = store.set, store.get, store.check, store.delete_key

    def wait(self, keys: list[str], limit: Any) -> None:
        """Wait for keys. Raises RuntimeError if they do not come in time."""
        until = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"{keys} did not come in time")
            time.sleep(0.01)


class _Replicas:
    """Finds which ranks hold the same parameters, as far as wrappers and placements tell.

    Args:
        step: gets its buffers, and the ranks that share data or the model.
        placements: those that the program names.
    """

    def __init__(self, step: CheckedStep, placements: Placements | None) -> None:
        self._step, self._placements = step, placements
        self._world = tuple(range(step.size))
        self._wrapped: dict[int, tuple[int, ...]] = {}  # id of a parameter -> the ranks of its DDP
        self._owners: dict[str, str] = {}  # name of a parameter -> class of its module
        self._fsdp: tuple[int, ...] = ()
        self._ddp: tuple[int, ...] = ()
        if step.size > 1:
            self._scan()
            self._add_buffers()
            if self._fsdp or self._ddp:
                step.data_ranks = tuple(sorted({*self._fsdp, *self._ddp}))

    def describe(self, each: CheckedParameter) -> None:
        """Set a parameter's groups and family."""
        if self._step.size < 2:
            each.groups = []
            return
        each.groups = self._groups(each)
        owner = self._owners.get(each.name, "")
        each.family = owner if "Norm" in owner else ""

    def _scan(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        for root, prefix in observer().models():
            for module in root.modules():
                if isinstance(module, DistributedDataParallel):
                    self._ddp = _ranks_of(module.process_group)
                    ignored: set[str] = set(module.parameters_to_ignore)
                    for name, parameter in module.module.named_parameters():
                        if name not in ignored:
                            self._wrapped[id(parameter)] = self._ddp
                elif "torch.distributed.fsdp" in sys.modules:
                    self._fsdp = self._fsdp or _fsdp_ranks(module)
            for name, module in named_modules(root, prefix):
                for key in module._parameters:
                    self._owners[f"{name}.{key}".lstrip(".")] = type(module).__name__

    def _groups(self, each: CheckedParameter) -> list[tuple[tuple[int, ...], str]] | None:
        found: list[tuple[tuple[int, ...], str]] = []
        known = False
        mesh = getattr(each.parameter, "device_mesh", None)
        if mesh is not None:
            known = True
            kinds: Any = each.parameter.placements  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor
            if not self._fsdp and any(kind.is_shard() for kind in kinds):
                self._step.model_ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
            ranks = _same_part(mesh, kinds, self._step.rank)
            found.append((ranks, "its DTensor is replicated over them"))
        placed = self._placed(each)
        if placed is not None:
            known = True
            found.append((placed, "placements say that it is replicated"))
        if (wrapped := self._wrapped.get(id(each.parameter))) is not None:
            known = True
            found.append((wrapped, "DistributedDataParallel replicates it"))
        return found if known else None

    def _placed(self, each: CheckedParameter) -> tuple[int, ...] | None:
        if self._placements is None:
            return None
        self._placements.of(each.name, local_of(each.parameter))  # finds the pattern, and checks that it fits
        pattern = self._placements._known.get(each.name)
        if pattern is None:
            return None
        split = pattern[1]
        if isinstance(split, Replicate):
            return self._world
        if isinstance(split, Shard):
            self._step.model_ranks = self._world if split.ranks is None else split.ranks
            size = len(split.ranks) if split.ranks is not None else split.size or self._step.size
            if split.ranks is None:
                return tuple(rank for rank in self._world if rank % size == self._step.rank % size)
        return (self._step.rank,)

    def _add_buffers(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        step = self._step
        synced: set[int] = set()
        for root, prefix in observer().models():
            for module in root.modules():
                if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
                    synced |= {id(each) for each in module.modules()}  # the next forward makes them equal
            for name, module, buffer, is_persistent in named_buffers(root, prefix):
                if is_persistent and id(module) not in synced and buffer.device.type != "meta" and buffer.numel():
                    step.buffers.append((name, local_of(buffer)))


def sample_parameters(parameters: Sequence[CheckedParameter]) -> None:
    """Copy a sample of each parameter before a step, with one copy for all of a kind."""
    for together in _by_kind(parameters):
        samples = [_sample(each.parameter) for each in together]
        parts = torch.cat(samples).split([len(each) for each in samples])
        for each, part in zip(together, parts, strict=True):
            each._sample = part


def _by_kind(parameters: Iterable[CheckedParameter]) -> list[list[CheckedParameter]]:
    """Return the parameters with elements here, by device and type of their elements."""
    found: dict[tuple[torch.device, torch.dtype], list[CheckedParameter]] = {}
    for each in parameters:
        part = local_of(each.parameter)
        if part.numel():
            found.setdefault((part.device, part.dtype), []).append(each)
    return list(found.values())


def _is_constant(found: CheckedParameter) -> bool:
    """Return whether all elements of a parameter are equal; first of its sample, which is quick."""
    sample = found._sample
    if sample is None or not bool((sample == sample[0]).all()):
        return False
    return bool((local_of(found.parameter) == sample[0]).all())


def _gradient_claims(step: CheckedStep) -> list[Claim]:
    """Return what a rank tells of gradients whose ranks are not known, to find them."""
    return [
        Claim("", each.name, each.gradient, "gradient", family=each.family) for each in step.parameters if each.gradient
    ]


def moving_names(parameters: Iterable[CheckedParameter]) -> set[str]:
    """Return the names of parameters whose samples moved in a step, so that the next check needs no hash before it."""
    return {each.name for each in parameters if 0 < each.update < math.inf}


def measure_updates(parameters: Sequence[CheckedParameter]) -> None:
    """Measure how far a step has moved parameters, on their samples, with one wait for a device."""
    for together in _by_kind(each for each in parameters if each._sample is not None):
        before = [each._sample for each in together if each._sample is not None]
        after = torch.cat([_sample(each.parameter) for each in together])
        change = after.double() - torch.cat(before).double()
        parts = list(change.split([len(each) for each in before]))
        for each, part, norm in zip(together, parts, _norms(parts), strict=True):
            each.update = norm / math.sqrt(len(part))


def _same_part(mesh: Any, placements: Sequence[Any], rank: int) -> tuple[int, ...]:
    """Return the ranks of a device mesh that hold the same part of a DTensor as this one."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return (rank,)
    ranks: torch.Tensor = mesh.mesh
    at = tuple(slice(None) if placement.is_replicate() else index for index, placement in zip(coordinate, placements))
    return tuple(sorted(ranks[at].flatten().tolist()))


def _fsdp_ranks(module: nn.Module) -> tuple[int, ...]:
    """Return the ranks over which FSDP2 shards and replicates a module; empty for other modules."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return ()
    group: Any = module._get_fsdp_state()._fsdp_param_group
    mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
    return () if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))


def _ranks_of(group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(sorted(dist.get_process_group_ranks(group)))


def hash_of_part(tensor: torch.Tensor) -> str:
    """Return a hash of the local part of a tensor, with its shape."""
    part = local_of(tensor)
    if part.dtype == torch.bool:
        part = part.to(torch.uint8)
    return f"{tuple(part.shape)}{hash_of(part.contiguous())}" if part.numel() else str(tuple(part.shape))


def _input_digest(tensors: list[torch.Tensor]) -> str:
    """Return a hash of a model's inputs; "" if other batches could have the same."""
    digests: list[str] = []
    is_telling = False
    for each in tensors:
        part = local_of(each)
        few = _FEW_FLOATS if part.is_floating_point() else _FEW_INTEGERS
        if part.numel() >= few and part.dtype != torch.bool and not bool((part == part.flatten()[0]).all()):
            is_telling = True
        digests.append(hash_of_part(part))
    return " ".join(digests) if is_telling else ""


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements of the local part of a parameter; a view where that is contiguous."""
    flat = local_of(parameter).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]


def _norms(tensors: list[torch.Tensor]) -> Iterator[float]:
    """Yield the norms of tensors, with one wait for a device."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, each in enumerate(tensors):
        by_kind.setdefault((each.device, each.dtype), []).append(at)
    found = [0.0] * len(tensors)
    for indices in by_kind.values():
        dense = [tensors[at].to_dense() if tensors[at].is_sparse else tensors[at] for at in indices]
        each_norm: Any = torch._foreach_norm(dense)  # pyright: ignore[reportPrivateImportUsage]
        norms = torch.stack(list(each_norm)).tolist()
        for at, norm in zip(indices, norms):
            found[at] = norm
    return iter(found)


def _count_of(optimizer: Optimizer) -> int | None:
    """Return how many steps an optimizer counts; None if it does not."""
    for state in optimizer.state.values():
        count = state.get("step") if isinstance(state, dict) else None
        return None if count is None else int(count)
    return None


def _stop(text: str, in_debugger: bool) -> None:
    """Stop the program: in the debugger of this rank, or by an exception where there is none."""
    frame = user_frame(sys._getframe())
    if in_debugger and frame is not None:
        from monarch_kernel.debugger.rank.rank_debugger import stop_here

        with suppress(RuntimeError):
            stop_here(frame, text)
            return
    raise StopRun(text)


def _versions(parameters: Sequence[NamedParameter]) -> int:
    """Return a number that changes when something writes to a parameter in place."""
    return sum(each.parameter._version for each in parameters)


def memory_in_use() -> tuple[int, str]:
    """Return the memory in use in bytes, and its kind."""
    if "torch.cuda" in sys.modules and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.memory_allocated(), "allocated GPU memory"
    with suppress(OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize(), "the memory of this process"
    return 0, ""


# -- models whose tensors are on a mesh, which this process controls ------------------------------------------
#
# The hooks of this process see handles. `MeshCheck` has every rank describe its own parameters, gradients and buffers,
# in order with the program's operations. At the end of a checked step, each rank runs the rules on what it has, and
# returns broken rules and claims, which this process compares. The functions whose names end in `_here` run in ranks.

#: Rules that are kept by construction, because one process reads the batch, seeds the ranks and sets learning rates.
BY_CONSTRUCTION = ("data", "random", "lr")
# Built-in rules that need the values of parameters.
_OF_VALUES = frozenset(("replicas", "updates"))


class MeshCheck:
    """Rules on the ranks of one mesh, from the process that controls it.

    Args:
        rules: the functions of the rules by name.
        placements: how parameters that are plain tensors lie on ranks.
    """

    def __init__(self, rules: Mapping[str, RuleFunction], placements: Mapping[str, Split] | None) -> None:
        from monarch_kernel.tensor import remote

        self._rules = {name: rule for name, rule in rules.items() if name not in BY_CONSTRUCTION}
        self._placements = dict(placements or {})
        self._key = uuid.uuid4().hex
        self._optimizers: list[int] = []  # ids, in the order of their first step
        self._describe = remote(describe_here, propagate="inspect")
        self._measure = remote(measure_here, propagate="inspect")
        self._note_buffer = remote(note_buffer_here, propagate="inspect")
        self._check = remote(check_here)

    def begins(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        optimizer: Optimizer,
        held: Mapping[int, NamedParameter],
    ) -> None:
        """Have the ranks describe parameters before a step of an optimizer.

        Args:
            named: the parameters by name.
            held: those of the optimizer, by id.
        """
        if id(optimizer) not in self._optimizers:
            self._optimizers.append(id(optimizer))
        number = self._optimizers.index(id(optimizer))
        for name, parameter in named:
            holder = held.get(id(parameter))
            rate = None if holder is None else float(holder.group.get("lr", 0.0))
            gradient = None if parameter.grad is None else parameter.grad.detach()
            if is_on_mesh(parameter):
                in_model = holder is None or holder.in_model
                self._describe.broadcast(parameter.detach(), gradient, rate, self._key, name, number, in_model)

    def ends(self, parameters: Iterable[NamedParameter]) -> None:
        """Have the ranks measure how far a step of an optimizer has moved its parameters."""
        for each in parameters:
            if is_on_mesh(each.parameter):
                self._measure.broadcast(each.parameter.detach(), self._key, each.name)

    def check(
        self, step: CheckedStep, held: Sequence[str], buffers: Sequence[tuple[str, torch.Tensor]], tensor: torch.Tensor
    ) -> dict[int, tuple[list[Claim], list[BrokenRule]]]:
        """Run the rules on the ranks; return the claims and broken rules of each.

        Args:
            step: its number and line; `next_step_too` is set if a rule wants the next step.
            held: names of the parameters that an optimizer has.
            buffers: of the models, by name.
            tensor: any tensor of the mesh.

        Raises:
            RuntimeError: a rank has died, or a rule has failed there.
        """
        for name, buffer in buffers:
            if is_on_mesh(buffer):
                self._note_buffer.broadcast(buffer.detach(), self._key, name)
        order = _MeshOrder(step.number, step.line, tuple(held), step.was_written, self._placements, self._rules)
        found: dict[int, tuple[list[Claim], list[BrokenRule]]] = {}
        answers: Any = self._check.call(cast("Tensor", tensor.detach()), self._key, order).get()
        for rank, claims, broken, wants_next in answers.values():
            made = [Claim(**{**each, "ranks": _as_ranks(each["ranks"])}) for each in claims]
            found[rank] = made, [BrokenRule.from_dict(each) for each in broken]
            step.next_step_too = step.next_step_too or wants_next
        return found


def _as_ranks(value: Any) -> Any:
    return value if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, slots=True, eq=False)
class _MeshOrder:
    """What ranks are to check."""

    number: int
    line: str
    held: tuple[str, ...]
    was_written: bool
    placements: dict[str, Split]
    rules: dict[str, RuleFunction]


@dataclass(slots=True)
class _RankState:
    """What a rank keeps of a check: of this step, and of each rule."""

    parameters: dict[str, CheckedParameter] = field(default_factory=dict[str, CheckedParameter])
    numbers: dict[str, int] = field(default_factory=dict[str, int])  # of the optimizer that has it
    outside: set[str] = field(default_factory=set[str])  # parameters that no model has
    buffers: list[tuple[str, torch.Tensor]] = field(default_factory=list[tuple[str, torch.Tensor]])
    notes: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    moving: set[str] = field(default_factory=set[str])  # names of parameters whose samples moved at the last check
    error: str = ""


_mesh_states: dict[str, _RankState] = {}
_mesh_lock = threading.RLock()  # each stream has a thread


def _note_here(key: str, note: Callable[[_RankState], None]) -> None:
    """Note something. An error is kept for `check_here`: here, it would be the program's."""
    with _mesh_lock:
        state = _mesh_states.setdefault(key, _RankState())
        try:
            note(state)
        except Exception as error:
            state.error = state.error or f"{type(error).__name__}: {error}"


def describe_here(
    value: torch.Tensor,
    gradient: torch.Tensor | None,
    rate: float | None,
    key: str,
    name: str,
    number: int,
    in_model: bool,
) -> None:
    """Describe this rank's part of a parameter before the step."""

    def note(state: _RankState) -> None:
        parameter = value.detach()
        parameter.grad = None if gradient is None else gradient.detach()
        norm = None if gradient is None else float(torch.linalg.vector_norm(local_of(gradient).float()))
        found = CheckedParameter(name, parameter, norm, lr=rate)
        if name not in state.moving:
            found.before = hash_of_part(parameter)
        sample_parameters([found])
        found.is_constant = _is_constant(found)
        state.parameters[name] = found
        if rate is not None:
            state.numbers[name] = number
        if not in_model:
            state.outside.add(name)

    _note_here(key, note)


def measure_here(value: torch.Tensor, key: str, name: str) -> None:
    """Measure how far a step has moved a parameter."""

    def note(state: _RankState) -> None:
        found = state.parameters.get(name)
        if found is not None:
            gradient = found.parameter.grad
            found.parameter = value.detach()
            found.parameter.grad = gradient
            measure_updates([found])

    _note_here(key, note)


def note_buffer_here(value: torch.Tensor, key: str, name: str) -> None:
    """Note a buffer at the end of the step."""
    _note_here(key, lambda state: state.buffers.append((name, local_of(value))))


def check_here(
    value: torch.Tensor, key: str, order: _MeshOrder
) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]], bool]:
    """Run the rules of a step. Return rank, claims, broken rules, and whether the next step is checked, too."""
    step = CheckedStep(order.number, *rank_on_mesh(), order.line)
    with _mesh_lock:
        state = _mesh_states.setdefault(key, _RankState())
        if state.error:
            raise RuntimeError(state.error)
        step.parameters, step.buffers = list(state.parameters.values()), state.buffers
        step.was_written, step.memory = order.was_written, memory_in_use()
        _add_mesh_optimizers(step, state)
        _complete_on_mesh(step, order)
        claims: list[Claim] = []
        broken: list[BrokenRule] = []
        for name, rule in order.rules.items():
            step.notes = state.notes.setdefault(name, {})
            for finding in run_rule(name, rule, step):
                claims.append(finding) if isinstance(finding, Claim) else broken.append(finding)
        claims += _gradient_claims(step)
        state.moving = moving_names(step.parameters)
        state.parameters, state.numbers, state.outside, state.buffers = {}, {}, set(), []
    return step.rank, [asdict(each) for each in claims], [asdict(each) for each in broken], step.next_step_too


def _add_mesh_optimizers(step: CheckedStep, state: _RankState) -> None:
    """Give a step optimizers of the same parameters as the controller's."""
    for number in sorted(set(state.numbers.values())):
        own = [each for each in step.parameters if state.numbers.get(each.name) == number]
        optimizer = torch.optim.SGD([each.parameter for each in own], lr=0.0)
        for each in own:
            each.optimizer = optimizer
        named = [
            NamedParameter(each.name, each.parameter, {"lr": each.lr}, each.name not in state.outside) for each in own
        ]
        step.optimizers.append((optimizer, named))


def _complete_on_mesh(step: CheckedStep, order: _MeshOrder) -> None:
    """Add what is known at the end of a step."""
    placements = Placements(order.placements, step.rank, step.size) if order.placements else None
    replicas = _Replicas(step, placements)
    for each in step.parameters:
        each.after = hash_of_part(each.parameter)
        each.is_held = each.name in order.held
        replicas.describe(each)
        if each.groups is None and each.parameter.grad is not None and each.norm:
            each.gradient = hash_of_part(each.parameter.grad)


_BUILT_IN = tuple(_RULES)
_sessions = 0


def check_rules(
    names: Sequence[str] | str | None = None,
    *,
    every: int = 10,
    stop: bool = False,
    placements: Mapping[str, Split] | None = None,
    model: nn.Module | None = None,
    session: str = "",
    deadline: float = DEADLINE,
    late: bool = False,
    in_debugger: bool = False,
    report: Callable[[BrokenRule], None] | None = None,
) -> RuleCheck:
    """Check rules on every rank from the next step on, until `RuleCheck.end`; `rules` is the same as a context.

    Args:
        names: the rules; all by default.
        every: check every Nth step.
        stop: stop at the end of a step that certainly breaks a rule; ranks then wait for each other's claims.
        placements: how parameters that are plain tensors lie on ranks: `{"*.wq.weight": Shard(0)}`.
        model: the model that names are relative to; by default, models are found as they are called.
        session: the same on all ranks, and new each time; by default, calls are counted.
        deadline: how long to wait for claims of other ranks (seconds).
        late: whether ranks may begin at different steps of a running job.
        in_debugger: whether `stop` stops in the debugger, if this is a rank of a mesh or of a joined job, instead of
            raising `StopRun`.
        report: called with each broken rule, on rank 0 for all ranks; by default, it is printed to standard error.

    Raises:
        ValueError: there is no such rule, or `every` is not positive.
    """
    global _sessions
    chosen = [names] if isinstance(names, str) else list(_RULES if names is None else names)
    unknown = [name for name in chosen if name not in _RULES]
    if unknown or not chosen:
        raise ValueError(f"no rule {', '.join(unknown) or 'was given'}; there are {', '.join(_RULES)}")
    if every < 1:
        raise ValueError(f"every is {every}: give a number of steps from 1 on")
    _sessions += 1
    check = RuleCheck(
        chosen,
        every=every,
        stop=stop,
        placements=placements,
        session=session or f"call {_sessions}",
        deadline=deadline,
        late=late,
        in_debugger=in_debugger,
        report=_print if report is None else report,
    )
    check.begin(model)
    return check


@contextmanager
def rules(names: Sequence[str] | str | None = None, **options: Any) -> Generator[RuleCheck]:
    """Check rules in a ``with`` block, in every process of a job. `check_rules` describes the arguments."""
    check = check_rules(names, **options)
    try:
        yield check
    finally:
        check.end()


def _print(broken: BrokenRule) -> None:
    print(broken, file=sys.stderr, flush=True)


# -- for a controller, which calls these in ranks -----------------------------------------------------------

_check: RuleCheck | None = None


def begin_here(names: list[str] | None, session: str, options: dict[str, Any]) -> list[str]:
    """Begin to check rules in this process, for a controller; an earlier check of one ends. Returns their names."""
    global _check
    end_here()
    _check = check_rules(names, session=session, late=True, in_debugger=True, **options)
    return list(_check.names)


def report_here() -> dict[str, Any]:
    """Return what the check of a controller has found so far, as plain data."""
    if _check is None:
        return {"summary": "", "checked": 0, "broken": []}
    return {"summary": _check.summary, "checked": _check.checked, "broken": [asdict(each) for each in _check.broken]}


def end_here() -> dict[str, Any]:
    """End the check of a controller; returns its last report."""
    global _check
    if _check is not None:
        _check.end()
    report = report_here()
    _check = None
    return report
