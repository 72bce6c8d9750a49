"""Copy the state of a training run from the most advanced rank to all others."""

from __future__ import annotations

import io
import pickle
from typing import Any, Protocol

#: Smaller tensors are sent in the pickle, each larger one in a separate broadcast (bytes).
SMALL = 4096


class Stateful(Protocol):
    """An object with a state, such as a module, optimizer, scheduler or sampler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def share_state(progress: int, *parts: Stateful) -> int:
    """Copy the state of the most advanced rank to every rank of the default process group.

    This is a collective: all ranks call it, with the same number and kinds of parts. The source is never a healed rank,
    which has made no progress yet, nor a rank that failed in a step that others completed.

    Args:
        progress: the progress of this rank, such as its number of completed steps; the lowest rank wins a tie.
        parts: modules, optimizers, and other objects with ``state_dict`` and ``load_state_dict``.

    Returns:
        The progress of the source, which all ranks now have.
    """
    import torch.distributed

    distributed: Any = torch.distributed
    progresses: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(progresses, progress)
    source = progresses.index(max(progresses))
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
    return progresses[source]


def _pickled(states: list[dict[str, Any]], tensors: list[Any]) -> tuple[bytes, list[tuple[Any, Any, str]]]:
    """Pickle states without the large tensors, which are appended to ``tensors``.

    Also return their shapes, types and devices.
    """
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
