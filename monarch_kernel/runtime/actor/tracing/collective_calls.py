"""Records of the collectives of ``torch.distributed``: while a trace is on, its functions are replaced by ones that
record. With no trace they are torch's own.

What C++ code calls (the gradients of DistributedDataParallel) does not pass through these functions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from monarch_kernel.protocol.trace_records import COLLECTIVE
from monarch_kernel.runtime.actor.execution.collectives import C10D
from monarch_kernel.runtime.actor.import_hooks import after_import
from monarch_kernel.runtime.node import recorder

#: Functions of ``torch.distributed`` that wait for other ranks.
FUNCTIONS = (
    *("all_reduce", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)
#: The modules whose namespaces have them.
_MODULES = ("torch.distributed", C10D)

_watched = False


def install() -> None:
    """Record collectives from now on, as soon as torch.distributed is imported."""
    global _watched
    if not _watched:
        _watched = True
        after_import(C10D, lambda _module: _replace())
    else:
        _replace()


def uninstall() -> None:
    """Give torch its own functions back."""
    for name in _MODULES:
        module = sys.modules.get(name)
        for function in FUNCTIONS if module is not None else ():
            original = getattr(getattr(module, function, None), "_monarch_records", None)
            if original is not None:
                setattr(module, function, original)


def _replace() -> None:
    c10d = sys.modules.get(C10D)
    if recorder.recording is None or c10d is None:
        return
    for function in FUNCTIONS:
        original = getattr(c10d, function, None)
        if original is None or hasattr(original, "_monarch_records"):
            continue
        recording = _recording(function, original)
        for name in _MODULES:
            module: Any = sys.modules.get(name)
            if getattr(module, function, None) is original:
                setattr(module, function, recording)


def _recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        ring = recorder.recording
        if ring is None:
            return original(*args, **kwargs)
        number = ring.begin(COLLECTIVE, name, recorder.group.get(), "", _nbytes((*args, *kwargs.values())))
        failed = 1
        try:
            result = original(*args, **kwargs)
            failed = 0
            return result
        finally:
            ring.end(number, failed)

    collective._monarch_records = original  # type: ignore[attr-defined]  # how uninstall() finds it
    return collective


def _nbytes(values: Any) -> int:
    """Bytes of the largest tensor, or list of tensors, among arguments."""
    largest = 0
    for value in values:
        if isinstance(value, (list, tuple)):
            largest = max(largest, sum(_bytes_of(each) for each in value))
        else:
            largest = max(largest, _bytes_of(value))
    return largest


def _bytes_of(value: Any) -> int:
    nbytes = getattr(value, "nbytes", 0)
    return nbytes if type(nbytes) is int else 0
