"""What `diff` and `pull` have ranks do: evaluate an expression, read its value, and keep it until all is compared.

The functions here run in the rank, on a thread of its debug agent; `InFrame` on the stopped thread. A value is kept
under a token, so that the expression is evaluated once however much is asked about it, and let go by `release`, or
after `KEEP` seconds if whoever asked is gone.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monarch_kernel.actor import Actor
from monarch_kernel.debugger.model.readings import Contrast, Leaf, Reading
from monarch_kernel.debugger.rank.process import rank_of
from monarch_kernel.debugger.rank.values.blocks import Deadline, is_steady
from monarch_kernel.debugger.rank.values.reduce import Parts
from monarch_kernel.debugger.source_locations import place_of
from monarch_kernel.tools import actors_here

#: How long a value is kept for further questions (seconds).
KEEP = 60.0
#: What tracebacks call the expression.
FILE = "<diff>"


@dataclass(frozen=True, slots=True)
class Question:
    """An expression, and where it is to be evaluated.

    Attributes:
        expression: of Python.
        token: what its value is kept under.
        actor: the unique name of the actor mesh whose actor is `self`; "" for the rank's `__main__`.
        grads: read the gradients of a module, and not its parameters.
        limit: for reading the value (seconds).
    """

    expression: str
    token: str
    actor: str = ""
    grads: bool = False
    limit: float = 30.0


class _Kept:
    """A value that is being asked about; `parts` once it was read."""

    def __init__(self, token: str, value: Any) -> None:
        self.value = value
        self.where = ""
        self.parts: Parts | None = None
        self.timer = threading.Timer(KEEP, release, (token,))
        self.timer.daemon = True
        self.timer.name = "monarch-debugger"
        self.timer.start()


_kept: dict[str, _Kept] = {}


def _keep(token: str, value: Any) -> _Kept:
    kept = _kept[token] = _Kept(token, value)
    return kept


def release(token: str) -> None:
    """Let go of a value."""
    kept = _kept.pop(token, None)
    if kept is not None:
        kept.timer.cancel()


def ping() -> None:
    """Nothing: whoever answers this is worth asking more."""


# -- evaluating ------------------------------------------------------------------------------------


def evaluate(question: Question) -> tuple[Any, str]:
    """The value of the expression, and where it was evaluated, where that is not what was to be expected."""
    code = compile(question.expression, FILE, "eval")
    if question.actor:
        found = actors_here(question.actor)
        if question.actor not in found:
            raise LookupError("there is no such actor in this process any more")
        if found[question.actor] is None:
            raise LookupError("the actor is not there yet: its __init__ still runs")
        return eval(code, _names_of(found[question.actor])), ""
    names = vars(sys.modules["__main__"])
    if "self" not in names and _mentions(code, "self"):
        actors = _user_actors()
        if len(actors) > 1:
            known = ", ".join(sorted(name for name, _ in actors))
            raise LookupError(
                f"there are several actors here ({known}): say whose self is meant, by giving the actors and not their "
                "procs"
            )
        for name, actor in actors:
            return eval(code, _names_of(actor)), f"actor {name}"
    try:
        return eval(code, names), ""
    except NameError as error:
        actors = _user_actors()
        if not actors or getattr(error, "name", None) in (None, "self"):
            raise
        known = " or ".join(sorted(name for name, _ in actors))
        raise NameError(f"{error} in the rank's namespace; what actor {known} has is under self") from None


def _mentions(code: types.CodeType, name: str) -> bool:
    """Whether an expression uses a name, also in its comprehensions and lambdas."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return name in code.co_names or any(_mentions(each, name) for each in inner)


def _user_actors() -> list[tuple[str, Any]]:
    """The actors of this process that are no tools, with the names that they were spawned under."""
    return [
        (uid.rsplit("-", 1)[0], actor)
        for uid, actor in actors_here().items()
        if actor is not None and not getattr(type(actor), "__tool__", False)
    ]


def _names_of(actor: Any) -> dict[str, Any]:
    """What the methods of an actor's class see, and `self`."""
    names: dict[str, Any] = {}
    for kind in reversed(type(actor).__mro__):
        if kind.__module__ == Actor.__module__:
            continue
        for member in vars(kind).values():
            function = inspect.unwrap(member)
            if isinstance(function, types.FunctionType):
                # A class that came by value has its own few globals for each method.
                names.update(function.__globals__)
    return {**names, "self": actor}


@dataclass(frozen=True, slots=True)
class InFrame:
    """Evaluates an expression in a stopped frame, on the stopped thread, and keeps the value for `read_kept`."""

    question: Question

    def __call__(self, frame: types.FrameType) -> str:
        """Gives the place of the frame."""
        question = self.question
        # One namespace, so that comprehensions and lambdas in the expression see the locals, too.
        names = {**frame.f_globals, **frame.f_locals}
        value = eval(compile(question.expression, FILE, "eval"), names)
        place = place_of(frame)
        _keep(question.token, value).where = f"{os.path.basename(place.file)}:{place.line} in {place.name}"
        return ""


# -- reading ---------------------------------------------------------------------------------------


def read(question: Question) -> Reading:
    """Evaluate the expression and reduce its value, which is kept."""
    started = time.perf_counter()
    value, where = evaluate(question)
    kept = _keep(question.token, value)
    kept.where = where
    return _read(question, kept, started)


def read_kept(question: Question) -> Reading:
    """Reduce a value that was evaluated in a frame."""
    return _read(question, _find(question.token), time.perf_counter())


def _read(question: Question, kept: _Kept, started: float) -> Reading:
    try:
        kept.parts = Parts(kept.value, Deadline(question.limit), question.grads)
    except BaseException:
        release(question.token)
        raise
    reading = kept.parts.reading()
    return replace(reading, where=kept.where, seconds=time.perf_counter() - started)


def _find(token: str) -> _Kept:
    kept = _kept.get(token)
    if kept is None:
        raise LookupError(f"the value is not kept any more: nobody asked about it for {KEEP:g} s")
    return kept


def _parts(token: str) -> Parts:
    parts = _find(token).parts
    if parts is None:
        raise LookupError("the value has not been read yet")
    return parts


# -- comparing -------------------------------------------------------------------------------------

Spans = Mapping[str, Sequence[int]]
"""Blocks, by the path of the array that they are of."""


def leaves(token: str) -> list[Leaf]:
    """All parts of the value."""
    return _parts(token).leaves


def digests(token: str, wanted: Mapping[int, Sequence[str]]) -> dict[str, bytes]:
    """The block digests of arrays; `wanted` has their paths for each rank."""
    arrays = _parts(token).arrays
    return {path: arrays[path].digests for path in wanted[rank_of()[1]]}


def pieces(token: str, blocks: Spans) -> tuple[dict[str, dict[int, bytes]], bool]:
    """The contents of blocks, by path and number; and whether they are still what they were when they were read."""
    arrays = _parts(token).arrays
    found: dict[str, dict[int, bytes]] = {}
    steady = True
    for path, numbers in blocks.items():
        array = arrays[path]
        found[path] = {at: array.piece(at * array.block, _length(array, at)) for at in numbers}
        steady = steady and is_steady(array, numbers)
    return found, steady


def contrasts(
    token: str, wanted: Mapping[int, Spans], theirs: Mapping[str, Mapping[int, bytes]]
) -> tuple[dict[str, Contrast], bool]:
    """How blocks of arrays here differ from those of another rank; and whether they are still what they were."""
    arrays = _parts(token).arrays
    found: dict[str, Contrast] = {}
    steady = True
    for path, numbers in wanted[rank_of()[1]].items():
        array = arrays[path]
        found[path] = array.contrasts([(at * array.block, theirs[path][at]) for at in sorted(numbers)])
        steady = steady and is_steady(array, numbers)
    return found, steady


def _length(array: Any, block: int) -> int:
    return min(array.block, array.size - block * array.block)


# -- moving ----------------------------------------------------------------------------------------


def fetch(question: Question) -> Any:
    """The value itself, fit to be sent."""
    return sendable(evaluate(question)[0])


def fetch_kept(token: str) -> Any:
    """A value that was evaluated in a frame, fit to be sent."""
    value = _find(token).value
    release(token)
    return sendable(value)


def sendable(value: Any) -> Any:
    """`value` with its tensors on the CPU: whoever gets it may have no such device.

    Nothing is copied but what lies on a device. Tensors that need a gradient are sent without their graph.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach() if value.is_meta else value.detach().cpu()
    kind = type(value)
    if kind is dict:
        return {key: sendable(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(sendable(item) for item in value)
    if isinstance(value, torch.nn.Module):
        held = (*value.parameters(), *value.buffers())
        return value if all(tensor.device.type in ("cpu", "meta") for tensor in held) else on_cpu(value)
    return value


def on_cpu(module: Any) -> Any:
    """A copy of a module whose parameters and buffers are on the CPU."""
    # What a deep copy finds in its memo it does not copy: so no second module is made on the device.
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        moved = tensor.detach().cpu()
        memo[id(tensor)] = type(tensor)(moved, tensor.requires_grad) if _is_parameter(tensor) else moved
    return copy.deepcopy(module, memo)


def _is_parameter(tensor: Any) -> bool:
    torch: Any = sys.modules["torch"]
    return type(tensor) is torch.nn.Parameter
