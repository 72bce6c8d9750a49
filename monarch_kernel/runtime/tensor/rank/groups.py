"""Form the process groups of this rank as ordered by the controller, and let ranks agree on a failed input."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_kernel.runtime.actor.execution import collectives
from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.wire import FailedValue, OperationFailed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: The key of a rank's groups among the extras of its engine.
_NAME = "groups"

# torch's types here have unions with None that do not occur in this use
_dist: Any = dist


def device_type() -> str:
    """Return ``cuda`` or ``cpu``."""
    return current_executor.of_rank().type


def gpu() -> str:
    """Return the UUID of this rank's GPU; "" if it has none."""
    if device_type() != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(current_executor.of_rank()).uuid)


def default_group() -> tuple[int, int] | None:
    """Return rank and size of torch's default group, if this process has an intact one."""
    if not collectives.in_process_group() or collectives.are_broken():
        return None
    return _dist.get_rank(), _dist.get_world_size()


def form(group: Any) -> None:
    """Join a group of all ranks of the world. Previous groups are destroyed."""
    if device_type() == "cuda":
        torch.cuda.set_device(current_executor.of_rank())
    _groups().clear()
    group.join()
    if gloo_has_gpus():
        _gather_on_gpus()


def gloo_has_gpus() -> bool:
    """Return whether gloo exchanges tensors on GPUs: if two ranks share a GPU, NCCL refuses them."""
    return device_type() == "cuda" and _dist.get_backend_config().endswith("cuda:gloo")


@cache
def _gather_on_gpus() -> torch.library.Library:
    """Make functional all-gathers of tensors on GPUs call an all-gather that gloo supports for them.

    torch calls ``allgather_into_tensor_coalesced``, which treats their addresses as CPU memory (2.11).
    """

    def gather(given: torch.Tensor, size: int, group: ProcessGroup) -> torch.Tensor:
        made = given.new_empty((size * given.shape[0], *given.shape[1:]))
        group = _dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        _dist.all_gather_into_tensor(made, given.contiguous(), group=group)
        return made

    def gather_each(given: list[torch.Tensor], size: int, group: ProcessGroup) -> list[torch.Tensor]:
        return [gather(each, size, group) for each in given]

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather, "CUDA")
    library.impl("all_gather_into_tensor_coalesced", gather_each, "CUDA")
    return library


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The argument of a function in place of a process group. Each rank is in one of several groups.

    Attributes:
        stream: identifies the groups of a stream or of the program.
        partition: the ranks of the world in each group.
    """

    stream: int
    partition: tuple[tuple[int, ...], ...]

    def of_rank(self) -> Any:
        """Return the group of this rank.

        Raises:
            RuntimeError: the rank is in no group, or its process is new.
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

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the function. If it fails here, no other rank waits for this one."""
        flat, tree = tree_flatten((args, kwargs))
        failed = next((x for x in flat if isinstance(x, FailedValue)), None)
        if failed is not None:
            _leave()
            raise OperationFailed(failed)
        args, kwargs = tree_unflatten([x.of_rank() if isinstance(x, RankGroups) else x for x in flat], tree)
        with group_block():
            return self._function(*args, **kwargs)


def make(stream: int, partition: tuple[tuple[int, ...], ...], alone: bool = False) -> None:
    """Create the groups of a stream's collective. All ranks of the world call this, in the controller's order.

    Args:
        alone: whether to also create groups of one rank.
    """
    rank = here().rank
    for ranks in partition:
        group = _dist.new_group(list(ranks)) if alone or len(ranks) > 1 else None
        if rank in ranks:
            _groups()[stream, ranks] = group


def group_of(stream: int, ranks: tuple[int, ...]) -> Any:
    """Return the group of these ranks in a stream.

    Raises:
        RuntimeError: there is none, because the process is new.
    """
    try:
        return _groups()[stream, ranks]
    except KeyError:
        raise RuntimeError(f"no process group of ranks {ranks} has been made in this process") from None


def _groups() -> dict[tuple[int, tuple[int, ...]], object]:
    return here().store.extras.setdefault(_NAME, {})


def refuse_failed(*values: object) -> None:
    """Raise if a value is a failure. The executor then calls again with zeros in its place."""
    for value in values:
        if isinstance(value, FailedValue):
            raise OperationFailed(value)


@contextmanager
def group_block() -> Generator[None]:
    """Run a block in which ranks communicate. If this rank fails in it, the collectives of the others also end."""
    try:
        yield
    except OperationFailed:  # all ranks of the group know
        raise
    except BaseException:
        _leave()
        raise


def _leave() -> None:
    """End the collectives of this rank for all ranks that wait for it.

    This rank may have failed because another rank did the same. Messages between other ranks are then still in transit,
    and if a connection ends in the middle of a message, its receiver waits forever.
    """
    collectives.settle()
    collectives.shut_down_all()


class Agreement:
    """Whether an input has failed on some rank of a group. All its ranks learn it in the same collective."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.failed: FailedValue | None = here().standing_in

    def begin(self) -> Any:
        """Begin the exchange in parallel with the data. Pass the return value to `end`."""
        flag = torch.tensor([self.failed is not None], dtype=torch.int32)
        return flag, _dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def end(self, begun: Any) -> None:
        """Finish the exchange. Raise on every rank if an input has failed on one of them.

        Raises:
            OperationFailed: an input has failed; it has that failure.
        """
        flag, work = begun
        work.wait()
        self.settle(bool(flag))

    def settle(self, failed: bool) -> None:
        """Raise the failure, if the ranks have found one."""
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
