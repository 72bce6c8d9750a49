"""Collectives over values: the controller's ``reduce`` calls `reduced` and `reduce_into` on the ranks.

In each collective, the ranks also detect a failed input on any rank. Small data carries a mark; for large data, a
second collective runs concurrently. A failure therefore has the same consequences on all ranks of the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.rank.groups import Agreement, gloo_has_gpus, group_block, group_of, refuse_failed
from monarch_kernel.runtime.tensor.wire import FailedValue, OperationFailed, RankMoves, Reduction
from monarch_kernel.runtime.transfer.buffer import RDMABuffer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Move values between ranks: the controller's ``to_mesh`` calls `transferred` on them.

#: Kinds of messages: the length of the failure that replaces the data (0: no failure), that failure, the data.
_LENGTH, _FAILURE, _DATA = 1, 2, 3

# torch's types here have unions with None that do not occur in this use
_dist: Any = dist


def transferred(value: Any, how: RankMoves) -> torch.Tensor | None:
    """Return the value that a rank receives; None on ranks that receive none. Failures are moved like values."""
    me = here().rank
    source = next((sender for sender, receiver in how.routes if receiver == me), None)
    receivers = [receiver for sender, receiver in how.routes if sender == me and receiver != me]
    with group_block():
        sends = _send(value, receivers, how)
        result = None
        if source is not None and source != me:
            result = _receive(source, how)
        for send in sends:
            send.wait()
    if source == me:
        if isinstance(value, FailedValue):
            raise OperationFailed(value)
        return value.clone()
    return result


def _send(value: Any, receivers: list[int], how: RankMoves) -> list[Any]:
    if not receivers:
        return []
    group = group_of(how.stream, how.ranks)
    failure = b""
    if isinstance(value, FailedValue):
        failure, data = value.packed(), torch.empty(0, dtype=torch.uint8)
    else:
        data = value.contiguous().reshape(-1).view(torch.uint8)
        if gloo_has_gpus():  # it sends only CPU memory
            data = data.cpu()
    length = torch.tensor([len(failure)])
    text = torch.frombuffer(bytearray(failure), dtype=torch.uint8) if failure else None
    sends: list[Any] = []
    for receiver in receivers:
        sends.append(_dist.isend(length, receiver, group=group, tag=_LENGTH))
        if text is not None:
            sends.append(_dist.isend(text, receiver, group=group, tag=_FAILURE))
        elif data.numel():
            sends.append(_dist.isend(data, receiver, group=group, tag=_DATA))
    return sends


def _receive(source: int, how: RankMoves) -> torch.Tensor:
    group = group_of(how.stream, how.ranks)
    length = torch.zeros(1, dtype=torch.int64)
    _dist.recv(length, source, group=group, tag=_LENGTH)
    if int(length):
        text = torch.empty(int(length), dtype=torch.uint8)
        _dist.recv(text, source, group=group, tag=_FAILURE)
        raise OperationFailed(FailedValue.unpacked(text.numpy().tobytes()))
    result = torch.empty(how.size, dtype=how.dtype, device="cpu" if gloo_has_gpus() else current_executor.of_rank())
    if result.numel():
        _dist.recv(result.reshape(-1).view(torch.uint8), source, group=group, tag=_DATA)
    return result.to(current_executor.of_rank())


def spread(value: Any, ranks: frozenset[int], size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a value on the ranks that have it, and zeros on other ranks."""
    if here().rank not in ranks:
        return torch.zeros(size, dtype=dtype, device=current_executor.of_rank())
    refuse_failed(value)
    return value.clone()


# -- between worlds ---------------------------------------------------------------------------------


def offered(value: torch.Tensor) -> tuple[int, RDMABuffer | None]:
    """Return this rank, and its value as memory for ranks of another world; None if it has no elements."""
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    if not flat.numel():
        return here().rank, None
    buffer = RDMABuffer(flat)
    here().store.extras.setdefault("offers", {})[id(buffer)] = (buffer, flat)
    return here().rank, buffer


def withdraw() -> None:
    """Release the offered values: all ranks have copied them."""
    for buffer, _ in here().store.extras.pop("offers", {}).values():
        buffer.drop().get()


def taken(number: int, offers: dict[int, RDMABuffer | None], size: tuple[int, ...], dtype: torch.dtype) -> None:
    """Store a copy of the value that a rank of another world offers to this one."""
    made = torch.empty(size, dtype=dtype)
    buffer = offers[here().rank]
    if buffer is not None:
        buffer.read_into(made.view(-1).view(torch.uint8), timeout=None).get()
    here().store.values[number] = made.to(current_executor.of_rank())


#: The maximum size of data that carries the mark (bytes).
SMALL = 65536
#: The marks of ranks without and with a failed input.
_MARKS = {"sum": (0, 1), "avg": (0, 1), "product": (1, 0), "min": (1, 0), "max": (0, 1), "band": (1, 0), "bor": (0, 1)}
_OPERATIONS: dict[str, object] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
#: Types that gloo and NCCL add and compare. Numbers of other types are gathered, and reduced on each rank.
_KNOWN = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)
_BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}

# torch 2.13 renames them, and warns about the old names
_all_gather = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


def reduced(value: torch.Tensor, how: Reduction) -> torch.Tensor | None:
    """Return the result of a collective; None on ranks that do not receive it."""
    refuse_failed(value)
    return _run(value, how, None)


def reduce_into(out: torch.Tensor, value: torch.Tensor, how: Reduction) -> None:
    """Write the result of a collective to `out`, which may be `value`."""
    refuse_failed(out, value)
    result = _run(value, how, out)
    if result is not None and result is not out:
        out.copy_(result)


def _run(value: torch.Tensor, how: Reduction, out: torch.Tensor | None) -> torch.Tensor | None:
    ranks = _ranks(how.groups, here().rank)
    with group_block():
        group = group_of(how.stream, ranks)
        if group is None:
            result = _alone(value, how, out)
        else:
            result = _together(value, how, group, ranks, out)
    if how.roots is not None and here().rank not in how.roots:
        return None
    return result


@functools.lru_cache(1024)
def _ranks(groups: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in groups if rank in ranks)


def _alone(value: torch.Tensor, how: Reduction, out: torch.Tensor | None) -> torch.Tensor:
    """Return the result in a group of one rank."""
    if how.scatter:
        return value.clone() if how.kind == "stack" else value[0].clone()
    return value[None].clone() if how.kind == "stack" else value if out is value else value.clone()


def _together(
    value: torch.Tensor, how: Reduction, group: ProcessGroup, ranks: tuple[int, ...], out: torch.Tensor | None
) -> torch.Tensor | None:
    agreement = Agreement(group)
    root = _only_root(how, ranks)
    if how.kind == "stack":
        if how.scatter:
            return _exchanged(value, group, agreement)
        return _gathered(value, group, agreement) if root is None else _gathered_at(root, value, group, agreement)
    if not _is_native(value.dtype, how.kind):
        return _reduced_here(value, how, group, agreement)
    if how.scatter:
        return _reduce_scattered(value, how, group, agreement)
    if root is not None:
        begun = agreement.begin()
        buffer = _number_view(value.contiguous().clone())
        _dist.reduce(buffer, dst=root, op=_operation(how.kind, value.dtype), group=group)
        agreement.end(begun)
        return _averaged(buffer.view(value.dtype), how.kind, len(ranks)) if root == here().rank else None
    return _all_reduced(value, how, group, agreement, out)


def _only_root(how: Reduction, ranks: tuple[int, ...]) -> int | None:
    """Return the only rank of the group that receives the result; None if several do."""
    if how.roots is None or how.scatter:
        return None
    roots = [rank for rank in ranks if rank in how.roots]
    return roots[0] if len(roots) == 1 else None


# -- values as they are -----------------------------------------------------------------------------


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _marked(rows: torch.Tensor, mark: float) -> torch.Tensor:
    """Append a mark to each row."""
    return torch.cat([rows, rows.new_full((rows.size(0), 1), mark)], 1)


def _gathered(value: torch.Tensor, group: ProcessGroup, agreement: Agreement) -> torch.Tensor:
    """Return the stacked values of all ranks."""
    count, data = group.size(), _bytes(value)
    if data.numel() <= SMALL:
        mine = _marked(data[None], agreement.failed is not None)[0]
        rows = data.new_empty(count, mine.numel())
        _all_gather(rows.view(-1), mine, group=group)
        agreement.settle(bool(rows[:, -1].any()))
        return rows[:, :-1].reshape(-1).view(value.dtype).view(count, *value.shape)
    begun = agreement.begin()
    stacked = value.new_empty((count, *value.shape))
    _all_gather(_bytes(stacked), data, group=group)
    agreement.end(begun)
    return stacked


def _gathered_at(root: int, value: torch.Tensor, group: ProcessGroup, agreement: Agreement) -> torch.Tensor | None:
    """Return the stacked values of all ranks, on one rank."""
    begun = agreement.begin()
    stacked = value.new_empty((group.size(), *value.shape)) if here().rank == root else None
    parts = None if stacked is None else [_bytes(part) for part in stacked]
    _dist.gather(_bytes(value), parts, dst=root, group=group)
    agreement.end(begun)
    return stacked


def _exchanged(value: torch.Tensor, group: ProcessGroup, agreement: Agreement) -> torch.Tensor:
    """Exchange rows. Row i of the result comes from rank i, which sends the row at this rank's position."""
    count = group.size()
    data = _bytes(value).view(count, -1)
    if data.numel() <= SMALL:
        mine = _marked(data, agreement.failed is not None)
        rows = torch.empty_like(mine)
        _dist.all_to_all_single(rows, mine, group=group)
        agreement.settle(bool(rows[:, -1].any()))
        return rows[:, :-1].reshape(-1).view(value.dtype).view(value.shape)
    begun = agreement.begin()
    result = torch.empty_like(value, memory_format=torch.contiguous_format)
    _dist.all_to_all_single(_bytes(result), data.view(-1), group=group)
    agreement.end(begun)
    return result


# -- one of many ------------------------------------------------------------------------------------


def _is_native(dtype: torch.dtype, kind: str) -> bool:
    if dtype == torch.bool:
        return kind != "bxor"
    return dtype in _KNOWN or (dtype.is_complex and kind in ("sum", "avg"))


def _operation(kind: str, dtype: torch.dtype) -> object:
    if dtype == torch.bool:  # as numbers 0 and 1
        return dist.ReduceOp.MAX if kind in ("max", "bor") else dist.ReduceOp.MIN
    return _OPERATIONS[kind]


def _number_view(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.uint8) if value.dtype == torch.bool else value


def _averaged(value: torch.Tensor, kind: str, count: int) -> torch.Tensor:
    return value.div_(count) if kind == "avg" else value


def _all_reduced(
    value: torch.Tensor, how: Reduction, group: ProcessGroup, agreement: Agreement, out: torch.Tensor | None
) -> torch.Tensor:
    operation, dtype = _operation(how.kind, value.dtype), value.dtype
    if how.kind in _MARKS and value.numel() * value.element_size() <= SMALL:
        well, failed = _MARKS[how.kind]
        flat = _number_view(value).reshape(1, -1)
        buffer = _marked(flat, failed if agreement.failed is not None else well)[0]
        _dist.all_reduce(buffer, op=operation, group=group)
        agreement.settle(bool(buffer[-1] != well))
        return _averaged(buffer[:-1].view(dtype).view(value.shape), how.kind, group.size())
    begun = agreement.begin()
    if out is not None and out.is_contiguous():
        buffer = out if out is value else out.copy_(value)
    else:
        buffer = value.clone(memory_format=torch.contiguous_format)
    _dist.all_reduce(_number_view(buffer), op=operation, group=group)
    agreement.end(begun)
    return _averaged(buffer, how.kind, group.size())


def _reduce_scattered(value: torch.Tensor, how: Reduction, group: ProcessGroup, agreement: Agreement) -> torch.Tensor:
    """Return the row of the reduced values at this rank's position."""
    operation, count, dtype = _operation(how.kind, value.dtype), group.size(), value.dtype
    data = _number_view(value.contiguous()).view(count, -1)
    if how.kind in _MARKS and value.numel() * value.element_size() <= SMALL:
        well, failed = _MARKS[how.kind]
        mine = _marked(data, failed if agreement.failed is not None else well)
        row = mine.new_empty(mine.size(1))
        _reduce_scatter(row, mine.view(-1), op=operation, group=group)
        agreement.settle(bool(row[-1] != well))
        row = row[:-1]
    else:
        begun = agreement.begin()
        row = data.new_empty(data.size(1))
        _reduce_scatter(row, data.view(-1), op=operation, group=group)
        agreement.end(begun)
    return _averaged(row.view(dtype).view(value.shape[1:]), how.kind, count)


def _reduced_here(value: torch.Tensor, how: Reduction, group: ProcessGroup, agreement: Agreement) -> torch.Tensor:
    """Gather numbers of types that the backends do not support, and reduce them on each rank."""
    if how.scatter:
        return combine(_exchanged(value, group, agreement), how.kind)
    return combine(_gathered(value, group, agreement), how.kind)


def combine(stacked: torch.Tensor, kind: str) -> torch.Tensor:
    """Reduce values that are stacked in dimension 0. The dtype does not change."""
    if kind in _BITS:
        bits: Callable[..., torch.Tensor] = _BITS[kind]
        return functools.reduce(bits, stacked.unbind(0))
    if kind == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if kind == "avg":
        return stacked.mean(0)
    if kind == "product":
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amin(0) if kind == "min" else stacked.amax(0)
