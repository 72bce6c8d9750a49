"""Tensors of a mesh as arguments of endpoints of actors on its ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch_kernel.actor import Actor, ActorError, current_rank, endpoint, this_host
from monarch_kernel.tensor import MixedTensorsError, inspect, remote


class Keeper(Actor):
    """Gets tensors."""

    @endpoint
    def total(self, values: Any, factor: int = 1) -> float:
        return float(sum(float(t.sum()) for t in values.values())) * factor

    @endpoint
    def fill(self, t: Any) -> int:
        t.fill_(current_rank().rank)
        return int(t.numel())


def test_actors_get_what_their_ranks_have(four: Any) -> None:
    keepers = four.spawn("keepers", Keeper)
    slow = remote(lambda t: (__import__("time").sleep(0.05), t * 2)[1], propagate=lambda t: t)
    with four.activate():
        rank = four.rank_tensor("gpus")
        x = slow(torch.ones(3) * rank)
        got = keepers.total.call({"a": x, "b": torch.ones(2)}, factor=10)
        del x  # what was sent stays
    assert [v for _, v in got.get()] == [20, 80, 140, 200]
    with four.activate():
        y = torch.zeros(2)
        keepers.fill.call(y).get()  # not a copy
        assert inspect(y, gpus=3).tolist() == [3, 3]
        part = keepers.slice(gpus=2)
        assert part.total.call_one({"y": y}).get() == 4
    store = y._spec.mesh.engine.ask(y._spec.mesh, _left, y)
    assert store == [0, 0, 0, 0]


def _left(_: Any) -> int:
    from monarch_kernel.runtime.tensor.rank.worker import here

    return len(here().store.lent)


def test_failures_reach_the_call(four: Any) -> None:
    keepers = four.spawn("others", Keeper)
    broken = remote(lambda t: t[99], propagate=lambda t: t)
    with four.activate():
        x = broken(torch.ones(2))
        with pytest.raises(ActorError, match="index 99"):
            keepers.total.call({"x": x}).get()
        assert keepers.total.call({"x": torch.ones(2)}).get().item(gpus=1) == 2  # the actors live


def test_actors_elsewhere_are_refused(four: Any) -> None:
    one = this_host().spawn_procs(per_host={"gpus": 1}, name="one")
    keeper = one.spawn("keeper", Keeper)
    with four.activate():
        x = torch.ones(2)
        with pytest.raises(MixedTensorsError, match="not all on its ranks"):
            keeper.total.call({"x": x})
        part = x.slice_mesh(gpus=slice(0, 2))
        with pytest.raises(MixedTensorsError, match="not all on its ranks"):
            four.spawn("all", Keeper).total.call({"x": part})
    one.stop("its test is over").get()
