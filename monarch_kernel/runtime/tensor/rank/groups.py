"""The process groups of this rank, as the controller orders them, and how ranks agree that an input has failed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_kernel.runtime.actor.execution import collectives
from monarch_kernel.runtime.tensor.rank import device
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.wire import FailedValue, OperationFailed

#: Where a rank keeps its groups among the extras of its engine.
_NAME = "groups"

# torch's types here hold unions with None that this use cannot meet
_dist: Any = dist


def device_type() -> str:
    """``cuda`` or ``cpu``."""
    return device.of_rank().type


def gpu() -> str:
    """The UUID of the GPU of this rank; "" if it has none."""
    if device_type() != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device.of_rank()).uuid)


def default_group() -> tuple[int, int] | None:
    """Rank and size of torch's default group, if this process is in one and it is intact."""
    if not collectives.in_process_group() or collectives.are_broken():
        return None
    return _dist.get_rank(), _dist.get_world_size()


def form(group: Any) -> None:
    """Join a group of all ranks of the world; the groups of before are gone."""
    if device_type() == "cuda":
        torch.cuda.set_device(device.of_rank())
    _groups().clear()
    group.join()
    if gloo_has_gpus():
        _gather_on_gpus()


def gloo_has_gpus() -> bool:
    """Whether ranks exchange tensors of GPUs by gloo: two of them share one, which NCCL refuses."""
    return device_type() == "cuda" and _dist.get_backend_config().endswith("cuda:gloo")


@cache
def _gather_on_gpus() -> torch.library.Library:
    """Have functional all-gathers of tensors on GPUs call an all-gather that gloo has for them.

    torch's call ``allgather_into_tensor_coalesced``, which takes their addresses for memory of the CPU (2.11).
    """

    def gather(given: torch.Tensor, size: int, group: Any) -> torch.Tensor:
        made = given.new_empty((size * given.shape[0], *given.shape[1:]))
        group = _dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        _dist.all_gather_into_tensor(made, given.contiguous(), group=group)
        return made

    def gather_each(given: list[torch.Tensor], size: int, group: Any) -> list[torch.Tensor]:
        return [gather(each, size, group) for each in given]

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather, "CUDA")
    library.impl("all_gather_into_tensor_coalesced", gather_each, "CUDA")
    return library


@dataclass(frozen=True, slots=True)
class RankGroups:
    """In the place of a process group among the arguments of a function: each rank is in one of several.

    Attributes:
        stream: what tells the groups of streams, and those of the program, apart.
        partition: the ranks of the world in each.
    """

    stream: int
    partition: tuple[tuple[int, ...], ...]

    def of_rank(self) -> Any:
        """The group that this rank is in.

        Raises:
            RuntimeError: it is in none, or the process is a new one.
        """
        rank = here().rank
        for ranks in self.partition:
            if rank in ranks:
                return group_of(self.stream, ranks)
        raise RuntimeError(f"rank {rank} is in none of the groups {self.partition}")


class WithGroups:
    """A function of the ranks with process groups among its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__: str = getattr(function, "__name__", str(function))
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it. If it fails here, no other rank waits for this one."""
        flat, tree = tree_flatten((args, kwargs))
        failed = next((x for x in flat if isinstance(x, FailedValue)), None)
        if failed is not None:
            _leave()
            raise OperationFailed(failed)
        args, kwargs = tree_unflatten([x.of_rank() if isinstance(x, RankGroups) else x for x in flat], tree)
        with group_block():
            return self._function(*args, **kwargs)


def make(stream: int, partition: tuple[tuple[int, ...], ...], alone: bool = False) -> None:
    """Make the groups of a stream's collective. All ranks of the world call it, in the controller's order.

    Args:
        alone: whether a rank that meets no other gets a group, too.
    """
    rank = here().rank
    for ranks in partition:
        group = _dist.new_group(list(ranks)) if alone or len(ranks) > 1 else None
        if rank in ranks:
            _groups()[stream, ranks] = group


def group_of(stream: int, ranks: tuple[int, ...]) -> Any:
    """The group of these ranks in a stream.

    Raises:
        RuntimeError: there is none: the process is a new one.
    """
    try:
        return _groups()[stream, ranks]
    except KeyError:
        raise RuntimeError(f"no process group of ranks {ranks} has been made in this process") from None


def _groups() -> dict[tuple[int, tuple[int, ...]], Any]:
    return here().store.extras.setdefault(_NAME, {})


def refuse_failed(*values: Any) -> None:
    """Raise if there is a failure in the place of a value: the worker then calls again with zeros in its place."""
    for value in values:
        if isinstance(value, FailedValue):
            raise OperationFailed(value)


@contextmanager
def group_block() -> Generator[None]:
    """A block in which ranks meet. If this rank fails in it, the others must not wait: their collectives end, too."""
    try:
        yield
    except OperationFailed:  # all ranks of the group know
        raise
    except BaseException:
        _leave()
        raise


def _leave() -> None:
    """End the collectives of this rank, for all ranks that wait for it.

    It may have failed because another rank did the same: messages between others are still under way then, and one that
    is half received when its connection ends would be waited for forever.
    """
    collectives.settle()
    collectives.shut_down_all()


class Agreement:
    """Whether an input has failed on some rank of a group: all ranks of it find out in the same collective."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.failed: FailedValue | None = here().standing_in

    def begin(self) -> Any:
        """Exchange it beside the data; give what this returns to `end`."""
        flag = torch.tensor([self.failed is not None], dtype=torch.int32)
        return flag, _dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def end(self, begun: Any) -> None:
        """Raise on every rank if an input has failed on one.

        Raises:
            OperationFailed: with that failure.
        """
        flag, work = begun
        work.wait()
        self.settle(bool(flag))

    def settle(self, failed: bool) -> None:
        """Raise that failure, if the ranks found out that there is one."""
        if not failed:
            return
        own = b"" if self.failed is None else self.failed.packed()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._group.size())]
        _dist.all_gather(lengths, torch.tensor([len(own)]), group=self._group)
        longest = max(map(int, lengths))
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
        _dist.all_gather(texts, padded, group=self._group)
        text, length = next((text, int(length)) for text, length in zip(texts, lengths, strict=True) if length)
        raise OperationFailed(self.failed or FailedValue.unpacked(text[:length].numpy().tobytes()))
