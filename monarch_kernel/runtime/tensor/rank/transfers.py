"""Move values between ranks: the controller's ``to_mesh`` calls `transferred` on them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from monarch_kernel.runtime.tensor.rank import device
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.rank.groups import gloo_has_gpus, group_block, group_of, refuse_failed
from monarch_kernel.runtime.tensor.wire import FailedValue, OperationFailed, RankMoves
from monarch_kernel.runtime.transfer.buffer import RDMABuffer

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
    result = torch.empty(how.size, dtype=how.dtype, device="cpu" if gloo_has_gpus() else device.of_rank())
    if result.numel():
        _dist.recv(result.reshape(-1).view(torch.uint8), source, group=group, tag=_DATA)
    return result.to(device.of_rank())


def spread(value: Any, ranks: frozenset[int], size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a value on the ranks that have it, and zeros on other ranks."""
    if here().rank not in ranks:
        return torch.zeros(size, dtype=dtype, device=device.of_rank())
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
    here().store.values[number] = made.to(device.of_rank())
