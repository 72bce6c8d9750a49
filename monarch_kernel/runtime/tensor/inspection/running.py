"""Find the operation that a thread of a rank runs for a controller, and read values of ranks. Does not import torch.

Running operations record nothing for this: the frame of the worker's loop has all the data.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

from monarch_kernel import programs

# List the tensor engines of this controller, and the lines that issued their records. Does not import torch.

_engines: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def add_engine(key: str, engine: object) -> None:
    """Register an engine for tools, under its key on the ranks."""
    _engines[key] = engine


def all_engines() -> list[Any]:
    """Return the engines of this process, oldest first."""
    return list(_engines.values())


def finish_operations(procs: Any) -> None:
    """Wait until the ranks have run all issued operations, if they share tensors with actors or cells.

    This is called before a cell runs, so that the cell sees the program's writes to such tensors.

    Args:
        procs: the proc mesh (or slice).
    """
    for engine in list(_engines.values()):
        if engine.shares and engine.key == procs._mesh_uid:
            engine.finish()


def issued_at(engine: str, record: int) -> tuple[str, int, str] | None:
    """Return the file, line and function of the controller that issued a record; None if unknown or no longer known."""
    found = _engines.get(engine)
    return None if found is None else found.place_of(record)


_EXECUTOR = os.path.join(programs.PACKAGE, "runtime", "tensor", "rank", "tensor_executor.py")
#: Endpoints of the worker other than running records, and their descriptions.
_ANSWERS = {
    "fetch": "a fetch",
    "ask": "a function of a tool",
    "call_and_fetch": "call_on_shard_and_fetch",
    "run_and_describe": "an operation whose shape depends on values",
    "put": "a tensor that arrives",
}


class RunningOperation(NamedTuple):
    """An operation that runs in this process for a controller.

    Attributes:
        engine: the key of the controller's engine, for `issued_at`.
        record: the number of its record.
        label: `aten::mm`, or the name of a function.
        stream: the name of its stream.
    """

    engine: str
    record: int
    label: str
    stream: str


def operation_on(frames: Iterable[FrameType]) -> RunningOperation | None:
    """Return the operation of the thread with these frames (innermost first); None if it runs none."""
    for frame in frames:
        code = frame.f_code
        if code.co_filename != _EXECUTOR:
            continue
        if code.co_name == "_run":
            values = frame.f_locals
            worker, program, record = values.get("self"), values.get("program"), values.get("record")
            if worker is None or program is None or record is None:
                return None  # it decodes a message
            return RunningOperation(worker.engine, record, program.label.removesuffix(".default"), worker.stream)
        if code.co_name in _ANSWERS:
            worker = frame.f_locals["self"]
            return RunningOperation(worker.engine, worker.record, _ANSWERS[code.co_name], worker.stream)
    return None


def tensor_value(engine: str, number: int) -> Any:
    """Return a value that this rank holds for a controller.

    Raises:
        LookupError: it has no value of that number.
        RuntimeError: the operation that should have made it failed; the message is the traceback.
    """
    values = sys.modules.get("monarch_kernel.runtime.tensor.rank.values")
    store = None if values is None else values.existing_store(engine)
    if values is None or store is None or number not in store.values:
        raise LookupError("the tensor is not on this rank: it is of another mesh, was deleted, or lost with a process")
    value = store.values[number]
    if isinstance(value, values.FailedValue):
        raise RuntimeError(f"the operation that should have made it failed: {value.text.strip().splitlines()[-1]}")
    return value
