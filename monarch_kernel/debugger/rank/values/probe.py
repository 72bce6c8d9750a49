"""Functions that `diff` and `pull` call in a rank: evaluate an expression, read its value, and compare it with others.

The functions run on a thread of the rank's debug agent, `InFrame` on the stopped thread.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monarch_kernel.debugger.model.readings import Contrast, Leaf, Reading
from monarch_kernel.debugger.rank.rank_debugger import rank_of
from monarch_kernel.debugger.rank.values import kept_values
from monarch_kernel.debugger.rank.values.blocks import Array, Deadline, is_steady
from monarch_kernel.debugger.rank.values.evaluation import Question, evaluate, evaluate_in
from monarch_kernel.debugger.rank.values.kept_values import KeptValue, parts_of
from monarch_kernel.debugger.rank.values.reduce import Parts
from monarch_kernel.debugger.source_locations import location_of


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
        kept_values.keep(self.question.token, value).where = where


def read(question: Question) -> Reading:
    """Evaluate the expression, keep its value, and reduce it."""
    started = time.perf_counter()
    value, where = evaluate(question)
    kept = kept_values.keep(question.token, value)
    kept.where = where
    return _read(question, kept, started)


def read_kept(question: Question) -> Reading:
    """Reduce a value that was evaluated in a frame."""
    return _read(question, kept_values.find(question.token), time.perf_counter())


def _read(question: Question, kept: KeptValue, started: float) -> Reading:
    try:
        kept.parts = Parts(kept.value, Deadline(question.limit), question.grads)
    except BaseException:
        kept_values.release(question.token)
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


def fetch(question: Question) -> Any:
    """Evaluate an expression. Return the value in a form that can be sent."""
    return sendable(evaluate(question)[0])


def fetch_kept(token: str) -> Any:
    """Return a value that was evaluated in a frame, in a form that can be sent."""
    value = kept_values.find(token).value
    kept_values.release(token)
    return sendable(value)


def sendable(value: Any) -> Any:
    """Return `value` with its tensors on the CPU, because the receiver may lack the device.

    Only tensors on a device are copied. Tensors that need a gradient are sent without their graph.
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
    """Return a copy of a module whose parameters and buffers are on the CPU."""
    # A deep copy does not copy objects in its memo, so the device gets no second module.
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        moved = tensor.detach().cpu()
        memo[id(tensor)] = type(tensor)(moved, tensor.requires_grad) if _is_parameter(tensor) else moved
    return copy.deepcopy(module, memo)


def _is_parameter(tensor: Any) -> bool:
    torch: Any = sys.modules["torch"]
    return type(tensor) is torch.nn.Parameter
