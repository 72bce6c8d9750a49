"""Observe, or answer, the collectives of `torch.distributed` in this process.

Every collective reaches a `c10d` operator of PyTorch's dispatcher, whether Python calls it, a functional collective or
a DTensor, or C++ (the reducer of DDP, FSDP2, compiled graphs). This module puts kernels of its own before those of the
backends, at the key `BackendSelect`, to which each operator is dispatched first. So it also sees groups that existed
before, and changes neither groups nor programs. The kernels are installed with the first callback and removed with the
last.

`observe` reports collectives that run. `answer` runs none: a callback fills the results instead, which is how a replay
needs no other process.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from monarch_kernel.debugger.source_locations import user_line
from monarch_kernel.display.quantities import few

# Operator -> the kind of collective, as the functions of torch.distributed are named.
_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
# Dispatch keys of backends, in the dispatcher's order.
_BACKENDS = ("SparseCUDA", "SparseCPU", "PrivateUse1", "XPU", "CUDA", "CPU")
# Arguments of the operators that hold the tensors.
_IN_PLACE = "tensors"
_INPUTS = ("input_tensors", "input_tensor", "inputs", "input", "input_list")
_OUTPUTS = ("output_tensors", "output_tensor", "outputs", "output", "output_lists")
_PEERS = ("root_rank", "src", "dst")
_POINT_TO_POINT = ("send", "recv")


class CollectivesError(RuntimeError):
    """Collectives cannot be observed or answered here."""


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """A collective, or a point-to-point operation, as this process takes part in it.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
            "barrier", "send" or "recv".
        group: the global ranks of its process group, in the group's order.
        group_name: PyTorch's name of the group, which tells groups of the same ranks apart.
        sequence: its index among the collectives of the group since observation began; of "send" and "recv": among
            those with the same peer and tag.
        inputs: what this rank contributes. Once the collective is complete, inputs that it overwrites are copies, or
            missing if nobody asked for them.
        outputs: what this rank receives; complete only once `finished` is called. Not of this rank's concern, and of
            any value, for "reduce" and "gather" at ranks other than `peer`.
        op: the reduction: "sum", "avg", "max" …; "" if it reduces nothing.
        peer: the global rank of root, source or destination; None if there is none, or any.
        tag: the tag of "send" and "recv".
        line: the innermost line of user code that called it, such as "train.py:42"; "" if there is none.
    """

    kind: str
    group: tuple[int, ...]
    group_name: str
    sequence: int
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    op: str = ""
    peer: int | None = None
    tag: int = 0
    line: str = ""

    def __str__(self) -> str:
        shown = self.inputs or self.outputs
        tensors = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in shown]
        return title_of(self.kind, self.op, tensors, self.line)


def title_of(kind: str, op: str, tensors: Sequence[str], line: str) -> str:
    """Name a collective for a message: "all_reduce (sum) of float32[8] at train.py:7"."""
    at = f" at {line}" if line else ""
    return f"{kind}{f' ({op})' if op else ''} of {few(tensors, 3) or 'nothing'}{at}"


Callback = Callable[[Collective], object]
"""Receives a collective. Those of `observe` must not change its tensors, and may be called on any thread."""


class _Observer(NamedTuple):
    finished: Callback | None
    started: Callback | None
    keep_inputs: bool


def observe(finished: Callback | None, started: Callback | None = None, *, keep_inputs: bool = True) -> Interception:
    """Report each collective of this process until the result is called.

    An exception in a callback ends this observation with a warning; it never reaches the program.

    Args:
        finished: called when the collective is complete, before any waiting thread continues.
        started: called before it begins.
        keep_inputs: whether `finished` gets copies of the inputs that a collective overwrites.

    Raises:
        CollectivesError: this version of PyTorch has no such hook.
    """
    return _interceptor.add(_Observer(finished, started, keep_inputs))


def answer(answerer: Callback) -> Interception:
    """Run no collective until the result is called: `answerer` fills `outputs` instead. Its exceptions are raised.

    Raises:
        CollectivesError: an answerer exists already, or this version of PyTorch has no such hook.
    """
    return _interceptor.set_answerer(answerer)


class Interception:
    """Ends an observation when it is called, or at the end of its ``with`` block. Further calls have no effect."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end()

    def __enter__(self) -> Interception:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


class _Interceptor:
    """The kernels of this process, and who is called by them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observers: tuple[_Observer, ...] = ()
        self._answerer: Callback | None = None
        self._library: torch.library.Library | None = None
        self._sequences: dict[tuple[object, ...], int] = {}

    @property
    def is_installed(self) -> bool:
        """Whether kernels of this module are registered."""
        return self._library is not None

    def add(self, observer: _Observer) -> Interception:
        with self._lock:
            self._install()
            self._observers = (*self._observers, observer)
        return Interception(lambda: self._remove(observer))

    def _remove(self, observer: _Observer) -> None:
        with self._lock:
            self._observers = tuple(each for each in self._observers if each is not observer)
            self._uninstall_if_unused()

    def set_answerer(self, answerer: Callback) -> Interception:
        with self._lock:
            if self._answerer is not None:
                raise CollectivesError("a replay runs in this process already; end it first")
            self._install()
            self._answerer = answerer

        def end() -> None:
            with self._lock:
                if self._answerer is answerer:
                    self._answerer = None
                    self._uninstall_if_unused()

        return Interception(end)

    def _install(self) -> None:
        if self._library is not None:
            return
        if not dist.is_available():
            raise CollectivesError("this build of PyTorch has no torch.distributed")
        if not hasattr(torch.library, "get_kernel") or not hasattr(dist.Work, "unbox"):
            raise CollectivesError(
                f"PyTorch {torch.__version__} cannot report its collectives: this needs a later version, such as 2.13"
            )
        self._sequences = {}
        library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            # PyTorch warns of each kernel that takes another's place, which is what happens here, and is undone.
            warnings.simplefilter("ignore")
            for name in _KINDS:
                library.impl(name, self._kernel(name), "BackendSelect", with_keyset=True)
        self._library = library

    def _uninstall_if_unused(self) -> None:
        if self._library is not None and not self._observers and self._answerer is None:
            self._library._destroy()
            self._library = None

    def _kernel(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.c10d, name).default
        backends = [torch._C.DispatchKey.__members__[each] for each in _BACKENDS]
        arguments = [(each.name, each.default_value) for each in torch._C._get_schema(f"c10d::{name}", "").arguments]

        def run(keyset: Any, values: tuple[Any, ...]) -> Any:
            # Unlike `call_boxed`, this releases the GIL. A thread of gloo holds the lock of its queue while it frees
            # tensors, for which it may need the GIL, so a caller that waits for that lock must not hold it.
            return operator._op_dk(next((key for key in backends if keyset.has(key)), backends[-1]), *values)

        def kernel(keyset: Any, *values: Any) -> Any:
            named: dict[str, Any] = dict(arguments[len(values) :])
            named.update(zip((key for key, _ in arguments), values, strict=False))
            answerer = self._answerer
            if answerer is not None:
                collective = self._describe(name, named)
                answerer(collective)
                return _answered(name, named)
            observers = self._observers
            if not observers:
                return run(keyset, values)
            collective = self._describe(name, named)
            for each in observers:
                self._call(each, each.started, collective)
            if _IN_PLACE in named and collective.outputs:
                kept = (
                    tuple(each.clone() for each in collective.inputs) if any(e.keep_inputs for e in observers) else ()
                )
                collective = replace(collective, inputs=kept)
            result = run(keyset, values)
            return self._when_complete(result, named, lambda: self._finished(observers, collective))

        return kernel

    def _finished(self, observers: Sequence[_Observer], collective: Collective) -> None:
        for each in observers:
            if each in self._observers:
                self._call(each, each.finished, collective)

    def _call(self, observer: _Observer, callback: Callback | None, collective: Collective) -> None:
        if callback is None:
            return
        try:
            with torch.no_grad():
                callback(collective)
        except Exception as error:
            self._remove(observer)
            warnings.warn(
                f"collectives are no longer observed; the program continues: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _when_complete(self, result: Any, named: dict[str, Any], finished: Callable[[], None]) -> Any:
        """Return the operator's result, such that who waits for it waits for `finished`, too."""
        boxed = result[-1] if isinstance(result, tuple) else result
        work = None if boxed is None else dist.Work.unbox(boxed)
        if work is None:  # without asynchronous form, or part of a batch: NCCL completes the batch as a whole
            finished()
            return result
        if not named.get("async_op", True):
            work.wait()
            finished()
            return result
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's sends and receives have none

            def wait(timeout: Any) -> bool:
                done = work.wait(timeout) if timeout else work.wait()
                finished()
                return done

            following = _callback_work(wait)
        else:

            def then(completed: torch.futures.Future[Any]) -> Any:
                value = completed.value()
                finished()
                return value

            following = _following(future.then(then))
        return (*result[:-1], following.boxed()) if isinstance(result, tuple) else following.boxed()

    def _describe(self, name: str, named: dict[str, Any]) -> Collective:
        kind = _KINDS[name]
        group = dist.ProcessGroup.unbox(named["process_group"])
        ranks = _ranks_of(group)
        peer = next((ranks[named[key]] for key in _PEERS if key in named), None)
        tag = int(named.get("tag", 0))
        sends, receives = kind != "recv", kind != "send"
        both = tuple(_tensors(named.get(_IN_PLACE)))
        inputs = (*(both if sends else ()), *(each for key in _INPUTS for each in _tensors(named.get(key))))
        outputs = (*(both if receives else ()), *(each for key in _OUTPUTS for each in _tensors(named.get(key))))
        op = _op_name(named["reduce_op"]) if "reduce_op" in named else ""
        counted = (ranks, group.group_name, *((kind, peer, tag) if kind in _POINT_TO_POINT else ()))
        with self._lock:
            sequence = self._sequences.get(counted, 0)
            self._sequences[counted] = sequence + 1
        line = user_line(sys._getframe(2))
        return Collective(kind, ranks, group.group_name, sequence, inputs, outputs, op, peer, tag, line)


_interceptor = _Interceptor()


def is_installed() -> bool:
    """Whether this module has anything installed in PyTorch."""
    return _interceptor.is_installed


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):  # made without torch.distributed's registry
        return tuple(range(group.size()))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of `Tensor`, `Tensor[]` and `Tensor[][]`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _op_name(boxed: Any) -> str:
    op = boxed.op()
    return next((name.lower() for name, value in dist.ReduceOp.RedOpType.__members__.items() if value == op), str(op))


def _following(future: torch.futures.Future[Any]) -> dist.Work:
    from torch._C import _distributed_c10d  # not in builds without torch.distributed

    return _distributed_c10d._create_work_from_future(future)  # pyright: ignore[reportAttributeAccessIssue]  # no stub


def _callback_work(wait: Callable[[Any], bool]) -> dist.Work:
    from torch._C._distributed_c10d import PythonCallbackWork

    return PythonCallbackWork(wait)


def _answered(name: str, named: dict[str, Any]) -> Any:
    """Return what the operator returns once it is complete."""
    if name == "monitored_barrier_":
        return None
    filled = next((named[key] for key in (_IN_PLACE, *_OUTPUTS) if key in named), [])
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(_tensors(filled)))
    work = _following(future).boxed()
    schema = torch._C._get_schema(f"c10d::{name}", "")
    return (filled, work) if len(schema.returns) > 1 else work
