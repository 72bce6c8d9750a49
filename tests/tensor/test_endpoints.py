"""Tensors of a mesh as arguments of endpoints of actors on its ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch_kernel.actor import Actor, ActorError, as_endpoint, current_rank, endpoint, this_host
from monarch_kernel.tensor import MixedTensorsError, RemoteException, inspect, remote


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
        y: Any = torch.zeros(2)
        keepers.fill.call(y).get()  # not a copy
        assert inspect(y, gpus=3).tolist() == [3, 3]
        part = keepers.slice(gpus=2)
        assert part.total.call_one({"y": y}).get() == 4
    store = y._spec.mesh.engine.ask(y._spec.mesh, _left, y)
    assert store == [0, 0, 0, 0]


def _left(_: Any) -> int:
    from monarch_kernel.runtime.tensor.rank.current_executor import here

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
        x: Any = torch.ones(2)
        with pytest.raises(MixedTensorsError, match="not all on its ranks"):
            keeper.total.call({"x": x})
        with pytest.raises(ValueError, match=r"send the number \(t\.item\(\)\)"):
            keeper.total.call({"x": x.sum()})
        part = x.slice_mesh(gpus=slice(0, 2))
        with pytest.raises(MixedTensorsError, match="not all on its ranks"):
            four.spawn("all", Keeper).total.call({"x": part})
    one.stop("its test is over").get()


class Doubler(Actor):
    """Gives tensors."""

    def __init__(self) -> None:
        self.calls = 0
        self.state = torch.zeros(2)

    @endpoint(propagate=lambda t, factor=2: t)
    def scaled(self, t: Any, factor: int = 2) -> Any:
        return t * factor

    @endpoint(propagate=lambda t: {"twice": t, "more": [t.sum(), "name"]})
    def nested(self, t: Any) -> Any:
        return {"twice": t * 2, "more": [t.sum(), "another"]}

    @endpoint(propagate=lambda: torch.zeros(2))
    def count(self) -> Any:
        self.calls += 1
        return torch.full((2,), float(self.calls + 10 * current_rank().rank))

    @endpoint
    def learnt(self, t: Any) -> Any:
        self.calls += 1
        return t[0], self.calls * 0 + 5

    @endpoint(propagate=lambda t: t)
    def other_shape(self, t: Any) -> Any:
        return torch.zeros(7)

    @endpoint(propagate=lambda t: t)
    def broken(self, t: Any) -> Any:
        raise ValueError("no such luck")

    @endpoint(propagate=lambda t: None)
    def slowly_filled(self, t: Any) -> None:
        __import__("time").sleep(0.05)
        t.fill_(9)

    @endpoint
    def slowly_given(self, t: Any) -> Any:
        __import__("time").sleep(0.05)
        return t

    @endpoint(explicit_response_port=True)
    def through_a_port(self, port: Any, t: Any) -> None:
        port.send(None)

    def plain(self, t: Any) -> Any:
        return t + 1


def test_results_stay_on_the_ranks(four: Any) -> None:
    actors = four.spawn("doublers", Doubler)
    with four.activate():
        x = torch.ones(2, 3) * four.rank_tensor("gpus")
        y = actors.scaled.rref(x, factor=3) + 1
        assert y.shape == (2, 3)
        assert inspect(y, gpus=2)[0, 0] == 7
        got = actors.nested.rref(x)
        assert got["more"][1] == "name"
        assert inspect((got["twice"], got["more"][0]), gpus=3)[1] == 18
        first, second = actors.count.rref(), actors.count.rref()
        x.add_(first[0])
        assert inspect((first, second, x), gpus=1)[1].tolist() == [12, 12]
        part = actors.slice(gpus=1).scaled.rref(x.slice_mesh(gpus=1))
        assert inspect(part)[0, 0] == 24
        assert actors.slowly_filled.rref(x) is None
        assert inspect(x)[0, 0] == 9
        assert inspect(as_endpoint(actors.plain, propagate=lambda t: t).rref(x))[0, 0] == 10


def test_shapes_of_results_are_learnt_from_the_first(four: Any) -> None:
    actors = four.spawn("learners", Doubler)
    with four.activate():
        x = torch.arange(6.0).view(2, 3)
        found = [actors.learnt.rref(x) for _ in range(3)]
        assert [(row.shape, number) for row, number in found] == [((3,), 5)] * 3
        assert inspect(found[2][0], gpus=3).tolist() == [0, 1, 2]
        assert inspect(actors.count.rref())[0] == 4  # each call ran once


def test_calls_are_in_order_with_operations(four: Any) -> None:
    actors = four.spawn("slow", Doubler)
    with four.activate():
        x = torch.zeros(2)
        actors.slowly_filled.call(x)
        assert inspect(x + 1, gpus=3).tolist() == [10, 10]
        y = torch.ones(40_000) * four.rank_tensor("gpus")
        call = actors.slowly_given.call(y)
        y.mul_(0)  # not before the value has been given
        assert [float(v[-1]) for _, v in call.get()] == [0, 1, 2, 3]
        assert inspect(y, gpus=3)[-1] == 0
        here = actors.slowly_given.call(y[:2]).get()[1] + 1  # a tensor of this process, though a mesh is active
        assert type(actors.slowly_given.call(here).get()[3]) is torch.Tensor
        actors.slice(gpus=2).slowly_filled.call_one(y)
        assert [float(inspect(y, gpus=k)[0]) for k in range(4)] == [0, 0, 9, 0]


def test_failures_of_references(four: Any) -> None:
    actors = four.spawn("failing", Doubler)
    lost = remote(lambda t: t[99], propagate=lambda t: t)
    with four.activate():
        x = torch.ones(2)
        with pytest.raises(RemoteException, match="no such luck") as caught:
            inspect(actors.broken.rref(x) + 1)
        assert "actors.broken.rref(x)" in caught.value.controller_frames
        with pytest.raises(RemoteException, match="index 99"):
            inspect(actors.scaled.rref(lost(x)))
        with pytest.raises(RemoteException, match=r"gave .*\[7\].*says .*\[2\]"):
            inspect(actors.other_shape.rref(x))
        with pytest.raises(RuntimeError, match="broadcast"):
            as_endpoint(actors.plain, propagate=lambda t: t + torch.ones(5)).rref(x)
        with pytest.raises(ValueError, match="port"):
            actors.through_a_port.rref(x)
        assert inspect(actors.scaled.rref(x)).tolist() == [2, 2]  # all goes on
        with pytest.raises(TypeError, match="missing"):
            actors.scaled.rref()
    with pytest.raises(ValueError, match="no device mesh is active"):
        actors.count.rref()


def test_an_actor_that_ends_does_not_hold_operations_up(four: Any) -> None:
    actors = four.spawn("ending", Doubler)
    with four.activate():
        x = torch.ones(2)
        actors.stop("its test is over").get()
        y = actors.scaled.rref(x)
        assert inspect(x).tolist() == [1, 1]
        with pytest.raises(RemoteException, match="stopped: its test is over"):
            inspect(y)


class Described(Actor):
    """Tells in other ways what it gives."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    @endpoint(propagate="inspect")
    def note(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(x.sum()))
        if len(self.seen) == 2:
            raise ValueError("twice")
        return x

    @endpoint(propagate="mocked")
    def rows(self, x: torch.Tensor) -> Any:
        return {"sums": x.sum(1), "count": len(x)}

    @endpoint
    def all(self) -> list[float]:
        return self.seen

    @endpoint(propagate="mocked")
    def kept(self, x: torch.Tensor) -> Any:
        return x * len(self.seen)


def test_endpoints_that_describe_themselves(four: Any) -> None:
    actors = four.spawn("described", Described)
    with four.activate():
        x = torch.ones(3, 2) * four.rank_tensor("gpus")
        for _ in range(3):
            assert actors.note.rref(x) is None  # whatever it gives or raises
        assert actors.all.call().get().item(gpus=2) == [12.0] * 3
        found = actors.rows.rref(x)
        assert found["count"] == 3 and inspect(found["sums"], gpus=3).tolist() == [6, 6, 6]
        with pytest.raises(AttributeError, match="seen"):  # it is called with None for self
            actors.kept.rref(x)
        with pytest.raises(ValueError, match='"inspect"'):
            as_endpoint(actors.rows, propagate="unknown").rref(x)
        assert inspect(x, gpus=1)[0, 0] == 1
