"""Functions that `diff` and `pull` call in a rank: evaluate an expression, read its value, and compare it with others.

The functions run on a thread of the rank's debug agent, `InFrame` on the stopped thread.
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
from functools import lru_cache
from types import CodeType
from typing import Any

from monarch_kernel.actor import Actor
from monarch_kernel.debugger.model.readings import Contrast, Leaf, Reading
from monarch_kernel.debugger.rank.rank_debugger import rank_of
from monarch_kernel.debugger.rank.values.blocks import Array, Deadline, is_steady
from monarch_kernel.debugger.rank.values.reduce import Parts
from monarch_kernel.debugger.source_locations import location_of
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import main_names, tensor_value

# Evaluate an expression in a rank: among the names of an actor, of the rank's `__main__`, or of a frame.

#: The file name of the expression in tracebacks.
FILE = "<diff>"


@dataclass(frozen=True, slots=True)
class Question:
    """An expression, and the namespace in which to evaluate it.

    Attributes:
        expression: the Python expression.
        token: the key under which its value is kept.
        actor: the unique name of the actor mesh whose actor is `self`; "" for the rank's `__main__`.
        grads: read the gradients of a module instead of its parameters.
        limit: the time limit for reading the value (seconds).
        tensor: the key of an engine and the number of a value: that tensor is the value, whatever the expression.
    """

    expression: str
    token: str
    actor: str = ""
    grads: bool = False
    limit: float = 30.0
    tensor: tuple[str, int] | None = None


def evaluate(question: Question) -> tuple[Any, str]:
    """Evaluate the expression. Return the value, and the namespace if it is not the default one."""
    if question.tensor is not None:
        return tensor_value(*question.tensor), ""
    code = compile(question.expression, FILE, "eval")
    if question.actor:
        found = tool_runtime().actors_here(question.actor)
        if question.actor not in found:
            raise LookupError("the actor is gone from this process")
        if found[question.actor] is None:
            raise LookupError("the actor is not there yet: its __init__ is still running")
        return eval(code, _names_of(found[question.actor])), ""
    names = main_names()
    if "self" not in names and _mentions(code, "self"):
        actors = user_actors()
        if len(actors) > 1:
            known = ", ".join(sorted(name for name, _ in actors))
            raise LookupError(
                f"there are several actors here ({known}), so self is ambiguous: pass the mesh of one of them, not "
                "its procs"
            )
        for name, actor in actors:
            return eval(code, _names_of(actor)), f"actor {name}"
    try:
        return eval(code, names), ""
    except NameError as error:
        actors = user_actors()
        if not actors or getattr(error, "name", None) in (None, "self"):
            raise
        known = " or ".join(sorted(name for name, _ in actors))
        raise NameError(f"{error} in the rank's namespace; the attributes of actor {known} are under self") from None


def _mentions(code: types.CodeType, name: str) -> bool:
    """Return whether an expression uses a name, including in its comprehensions and lambdas."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return name in code.co_names or any(_mentions(each, name) for each in inner)


def user_actors() -> list[tuple[str, object]]:
    """Return the actors of this process that are not tools, with the names under which they were spawned."""
    return [
        (uid.rsplit("-", 1)[0], actor)
        for uid, actor in tool_runtime().actors_here().items()
        if actor is not None and not getattr(type(actor), "__tool__", False)
    ]


def _names_of(actor: object) -> dict[str, object]:
    """Return the names that the methods of an actor's class see, and `self`."""
    names: dict[str, object] = {}
    for kind in reversed(type(actor).__mro__):
        if kind.__module__ == Actor.__module__:
            continue
        for member in vars(kind).values():
            function = inspect.unwrap(member)
            if isinstance(function, types.FunctionType):
                # A class that was pickled by value has separate globals for each method.
                names.update(function.__globals__)
    return {**names, "self": actor}


def evaluate_in(question: Question, frame: types.FrameType) -> object:
    """Evaluate the expression in a frame."""
    # A single namespace, so that comprehensions and lambdas in the expression also see the locals.
    names = {**frame.f_globals, **frame.f_locals}
    return eval(compile(question.expression, FILE, "eval"), names)


# Keep values in this rank while the controller queries them, each under a token.
#
# An expression is therefore evaluated once, however many queries concern its value. `release` drops a value. If the
# controller is gone, a timer drops it `KEEP` seconds after the evaluation.

#: How long a value is kept for further queries (seconds).
KEEP = 60.0


class KeptValue:
    """A value that is being queried; `parts` is set once it was read."""

    def __init__(self, token: str, value: object) -> None:
        self.value = value
        self.where = ""
        self.parts: Parts | None = None
        self.timer = threading.Timer(KEEP, release, (token,))
        self.timer.daemon = True
        self.timer.name = "monarch-debugger"
        self.timer.start()


_kept: dict[str, KeptValue] = {}


def keep(token: str, value: object) -> KeptValue:
    """Keep a value."""
    kept = _kept[token] = KeptValue(token, value)
    return kept


def release(token: str) -> None:
    """Drop a value."""
    kept = _kept.pop(token, None)
    if kept is not None:
        kept.timer.cancel()


def find(token: str) -> KeptValue:
    """Return the value of a token. Raises LookupError if it is no longer kept."""
    kept = _kept.get(token)
    if kept is None:
        raise LookupError(f"the value is not kept any more: there was no question about it for {KEEP:g} s")
    return kept


def parts_of(token: str) -> Parts:
    """Return the parts of the value of a token. Raises LookupError if it is no longer kept, or has not been read."""
    parts = find(token).parts
    if parts is None:
        raise LookupError("the value has not been read yet")
    return parts


# Sample one number of a rank repeatedly, for a plot, on a thread of the debug agent.


def sample(expression: str) -> float:
    """Evaluate an expression to a number, in the namespace of the rank's cells, or else of its actors.

    Raises:
        TypeError: its value is not a number, nor a tensor or an array with one element.
    """
    code = _compiled(expression)
    names: dict[str, object] = main_names()
    try:
        value = eval(code, names)
    except NameError as error:
        actors = dict(user_actors())
        if getattr(error, "name", None) not in actors:
            raise
        value = eval(code, {**names, **actors})
    return _number(value)


@lru_cache(maxsize=64)
def _compiled(expression: str) -> CodeType:
    return compile(expression, FILE, "eval")


def _number(value: Any) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    if getattr(value, "is_meta", False) or isinstance(value, str | bytes | complex):
        raise TypeError(f"a {type(value).__name__} is no number")
    size = getattr(value, "numel", None)  # for a tensor
    count = size() if callable(size) else getattr(value, "size", 1)  # for an array
    if count != 1:
        raise TypeError(f"a {type(value).__name__} with {count} elements is no number: reduce it, as with .mean()")
    detached = value.detach() if hasattr(value, "detach") else value
    return float(detached)


def ping() -> None:
    """Do nothing. A rank that answers this can answer further queries."""


# -- evaluating and reading --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InFrame:
    """Evaluates an expression in a stopped frame, on the stopped thread, and keeps the value for `read_kept`."""

    question: Question

    def __call__(self, frame: types.FrameType) -> None:
        """Evaluate in the frame; the tracer calls this."""
        place = location_of(frame)
        value = evaluate_in(self.question, frame)
        where = f"{os.path.basename(place.file)}:{place.line} in {place.name}"
        keep(self.question.token, value).where = where


def read(question: Question) -> Reading:
    """Evaluate the expression, keep its value, and reduce it."""
    started = time.perf_counter()
    value, where = evaluate(question)
    kept = keep(question.token, value)
    kept.where = where
    return _read(question, kept, started)


def read_kept(question: Question) -> Reading:
    """Reduce a value that was evaluated in a frame."""
    return _read(question, find(question.token), time.perf_counter())


def _read(question: Question, kept: KeptValue, started: float) -> Reading:
    try:
        kept.parts = Parts(kept.value, Deadline(question.limit), question.grads)
    except BaseException:
        release(question.token)
        raise
    reading = kept.parts.reading()
    return replace(reading, where=kept.where, seconds=time.perf_counter() - started)


# -- comparing -------------------------------------------------------------------------------------

Spans = Mapping[str, Sequence[int]]
"""Numbers of blocks, by the path of their array."""


def leaves(token: str) -> list[Leaf]:
    """Return all parts of the value."""
    return parts_of(token).leaves


def digests(token: str, wanted: Mapping[int, Sequence[str]]) -> dict[str, bytes]:
    """Return the block digests of arrays. `wanted` has their paths for each rank."""
    arrays = parts_of(token).arrays
    return {path: arrays[path].digests for path in wanted[rank_of()[1]]}


def pieces(token: str, blocks: Spans) -> tuple[dict[str, dict[int, bytes]], bool]:
    """Return the contents of blocks, by path and number, and whether they are unchanged since they were read."""
    arrays = parts_of(token).arrays
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
    """Compare blocks of arrays with those of another rank. Return the differences, and whether blocks are unchanged."""
    arrays = parts_of(token).arrays
    found: dict[str, Contrast] = {}
    steady = True
    for path, numbers in wanted[rank_of()[1]].items():
        array = arrays[path]
        found[path] = array.contrasts([(at * array.block, theirs[path][at]) for at in sorted(numbers)])
        steady = steady and is_steady(array, numbers)
    return found, steady


def _length(array: Array, block: int) -> int:
    return min(array.block, array.size - block * array.block)


# -- moving ----------------------------------------------------------------------------------------


def fetch(question: Question) -> object:
    """Evaluate an expression. Return the value in a form that can be sent."""
    return sendable(evaluate(question)[0])


def fetch_kept(token: str) -> object:
    """Return a value that was evaluated in a frame, in a form that can be sent."""
    value = find(token).value
    release(token)
    return sendable(value)


def sendable(value: Any) -> object:
    """Return `value` with its tensors on the CPU, because the receiver may lack the device.

    Only tensors on a device are copied. Tensors that need a gradient are sent without their graph.
    """
    torch = sys.modules.get("torch")
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


def on_cpu(module: Any) -> object:
    """Return a copy of a module whose parameters and buffers are on the CPU."""
    # A deep copy does not copy objects in its memo, so the device gets no second module.
    memo: dict[int, object] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        moved = tensor.detach().cpu()
        memo[id(tensor)] = type(tensor)(moved, tensor.requires_grad) if _is_parameter(tensor) else moved
    return copy.deepcopy(module, memo)


def _is_parameter(tensor: object) -> bool:
    torch = sys.modules["torch"]
    return type(tensor) is torch.nn.Parameter
