"""After a process group was formed again, bind values to it or make them failures on every rank; report failures.

`StreamPosition` reports the position of a rank's stream, even while the stream is stuck in a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from monarch_kernel.runtime.actor.context import current_rank
from monarch_kernel.runtime.actor.definition import Actor, endpoint
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.rank.values import store_of
from monarch_kernel.runtime.tensor.sharded.rank import views
from monarch_kernel.runtime.tensor.sharded.rank.state import rules
from monarch_kernel.runtime.tensor.wire import FailedValue

Failures = dict[int, FailedValue]


def rebind() -> Failures:
    """Bind the values of this rank to the new device meshes. Return the failures among them."""
    state, worker = rules(), here()
    key_of = {id(mesh): key for key, mesh in state.former.items()}
    values = worker.store.values
    for value in [*values.values(), *views.sources()]:
        if isinstance(value, DTensor):
            mesh = state.meshes.get(key_of.get(id(value.device_mesh)))
            if mesh is not None:
                spec = value._spec
                value._spec = DTensorSpec(mesh, spec.placements, tensor_meta=spec.tensor_meta)
    state.former.clear()
    debug._clear_sharding_prop_cache()  # its entries refer to the old meshes
    worker.unseen = None
    return {number: value for number, value in values.items() if isinstance(value, FailedValue)}


def fail(failures: Failures) -> None:
    """Make these values failures on this rank too.

    Operations that depend on them then fail on all ranks, and none waits.
    """
    here().store.values.update(failures)


def lose(kept: Iterable[int], text: str) -> None:
    """Make sharded values failures if a part was on a process that died, except for restored values."""
    worker, keep = here(), set(kept)
    values = worker.store.values
    for number, value in values.items():
        if number not in keep and isinstance(value, DTensor):
            values[number] = FailedValue(-1, worker.rank, text, lost=True)


def report_to(port: Any, group: int) -> None:
    """Report operations that fail first on this rank to the controller.

    Args:
        port: receives ``(group, failure, ranks)``, with the ranks of the meshes of the operation's inputs.
        group: the number of the process group.
    """

    def report(failed: FailedValue, inputs: Sequence[Any]) -> None:
        ranks = {r for x in inputs if isinstance(x, DTensor) for r in x.device_mesh.mesh.flatten().tolist()}
        port.send((group, failed, sorted(ranks)))

    here().store.report = report


def generator() -> Any:
    """Return the random states."""
    return rules().generator.get()


def set_generator(states: Any) -> None:
    """Set the random states of another rank."""
    rules().generator.restore(states)


class StreamPosition(Actor):
    """Runs in each rank beside the executors of an engine."""

    __tool__ = True

    def __init__(self, engine: str) -> None:
        self._store = store_of(engine, current_rank().rank)

    @endpoint
    def at(self) -> int:
        """Return the number of the record in the main stream that runs now or ran last."""
        return self._store.at()
