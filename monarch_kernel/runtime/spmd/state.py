"""State of a training run, from the rank that has come furthest to all others."""

from __future__ import annotations

import io
import pickle
from typing import Any, Protocol

#: Tensors of fewer bytes travel in the pickle, others by a broadcast of their own.
SMALL = 4096


class Stateful(Protocol):
    """What has a state: modules, optimizers, schedulers, samplers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def share_state(progress: int, *parts: Stateful) -> int:
    """Give every rank of the default process group the state of the one that has come furthest.

    A collective: all ranks call it, with as many parts of the same kinds. A rank that was healed has done nothing yet,
    so it never is the one that is followed. Nor is one that failed in a step which others had completed.

    Args:
        progress: how far this rank has come, as in the number of steps that it has done; of equals the lowest rank is
            followed.
        parts: modules, optimizers, and whatever else has ``state_dict`` and ``load_state_dict``.

    Returns:
        The progress of the rank that was followed, which is everybody's now.
    """
    import torch.distributed

    distributed: Any = torch.distributed
    everybody: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(everybody, progress)
    source = everybody.index(max(everybody))
    leads = distributed.get_rank() == source
    tensors: list[Any] = []
    box: list[Any] = [None]
    if leads:
        box[0] = _pickled([part.state_dict() for part in parts], tensors)
    distributed.broadcast_object_list(box, src=source)
    outline, shapes = box[0]
    if not leads:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
    for tensor in tensors:
        distributed.broadcast(tensor, src=source)
    if not leads:
        states = _Unpickler(io.BytesIO(outline), tensors).load()
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    return everybody[source]


def _pickled(states: list[dict[str, Any]], tensors: list[Any]) -> tuple[bytes, list[tuple[Any, Any, str]]]:
    """A pickle without the large tensors, which are put into the list; and what those are like."""
    stream = io.BytesIO()
    _Pickler(stream, tensors).dump(states)
    return stream.getvalue(), [(t.shape, t.dtype, t.device.type) for t in tensors]


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Any]) -> None:
        super().__init__(stream, protocol=5)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        import torch

        if not isinstance(obj, torch.Tensor) or obj.numel() * obj.element_size() < SMALL or obj.is_sparse:
            return None
        self._tensors.append(obj.detach().contiguous())
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Any]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Any:
        return self._tensors[pid]
