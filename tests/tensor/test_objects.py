"""Objects that live on the ranks of a mesh, and modules among them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from monarch_kernel.actor import Actor, current_rank, endpoint
from monarch_kernel.tensor import (
    OpaqueModule,
    OpaqueObject,
    OpaqueRef,
    RemoteException,
    call_on_shard_and_fetch,
    fetch_shard,
    inspect,
    opaque_method,
    remote,
)


class Adder:
    """On the ranks."""

    def __init__(self, start: torch.Tensor, factor: int = 2) -> None:
        import builtins

        self.sum = start
        self.factor = factor
        self.living = builtins.__dict__.setdefault("_living_in_test", [])
        self.living.append("adder")

    def add(self, t: torch.Tensor) -> torch.Tensor:
        self.sum = self.sum + t
        return self.sum * self.factor

    def both(self, t: torch.Tensor) -> Any:
        return {"t": t, "sums": [self.sum, "there"]}

    def reset(self, factor: int) -> None:
        self.factor = factor

    def figures(self) -> Any:
        return self.factor, float(self.sum.sum())

    def boom(self, t: torch.Tensor) -> torch.Tensor:
        raise ValueError("it went boom")

    def __del__(self) -> None:
        self.living.remove("adder")


class AdderHere(OpaqueObject):
    """On the controller."""

    @opaque_method
    def add(self, t: torch.Tensor) -> torch.Tensor:
        """Add."""
        return t + t

    @opaque_method
    def both(self, t: torch.Tensor) -> Any:
        return {"t": t, "sums": [t, "here"]}

    @opaque_method
    def reset(self, factor: int) -> None: ...

    @opaque_method
    def boom(self, t: torch.Tensor) -> torch.Tensor:
        return t


def living() -> int:
    import builtins

    return len(builtins.__dict__.get("_living_in_test", []))


def test_methods_of_objects(four: Any) -> None:
    with four.activate():
        start = torch.zeros(2) + four.rank_tensor("gpus")
        adder = AdderHere(Adder, start, factor=3)
        first = adder.add(torch.ones(2))
        adder.reset(10)
        second = adder.add(torch.ones(2))
        assert second.shape == (2,)
        got = adder.both(torch.ones(2))
        assert got["sums"][1] == "here"
        assert [t.tolist() for t in inspect((first, second, got["sums"][0]), gpus=2)] == [[9, 9], [40, 40], [4, 4]]
        assert adder.call_method_on_shard_and_fetch("figures", shard={"gpus": 3}).get() == (10, 10.0)
        assert inspect(adder.call_method("add", lambda self, t: t.clone(), torch.ones(2)))[0] == 30
        with pytest.raises(RuntimeError, match="broadcast"):
            adder.add(torch.ones(2) + torch.ones(3))
        with pytest.raises(RuntimeError, match="is on the ranks"):
            adder.value
        with pytest.raises(RuntimeError, match="add of"):
            adder.add(torch.ones(2, requires_grad=True)).sum().backward()
    assert "AdderHere on" in repr(adder)


def test_objects_end_with_their_handles(four: Any) -> None:
    with four.activate():
        before = call_on_shard_and_fetch(living).get()
        adder = AdderHere(Adder, torch.zeros(2))
        again = OpaqueObject(adder)
        assert call_on_shard_and_fetch(living).get() == before + 1
        del adder
        gc.collect()
        inspect(torch.ones(1))
        assert call_on_shard_and_fetch(living).get() == before + 1
        del again
        gc.collect()
        inspect(torch.ones(1))
        assert call_on_shard_and_fetch(living).get() == before


def test_references_are_arguments_and_results(four: Any) -> None:
    build = remote(lambda k: {"ref": OpaqueRef([k, 5]), "t": torch.ones(k)}, propagate=_built)
    total = remote(lambda ref, t: t * sum(ref.value), propagate=lambda ref, t: t)
    with four.activate():
        built = build(3)
        assert inspect(total(built["ref"], built["t"])).tolist() == [8, 8, 8]
        assert call_on_shard_and_fetch(lambda ref: ref.value, built["ref"]).get() == [3, 5]
        keepers = four.spawn("keepers", Keeper)
        assert keepers.length.call(built["ref"]).get().item(gpus=2) == 2
        kept = keepers.kept.rref()
        assert (
            inspect(
                remote(lambda ref: torch.tensor(ref.value), propagate=lambda ref: torch.zeros((), dtype=torch.int64))(
                    kept
                ),
                gpus=3,
            )
            == 3
        )
        with pytest.raises(RuntimeError, match="refers to nothing on the ranks"):
            total(OpaqueRef(3), torch.ones(2))
        ones: Any = torch.ones(2)
        part = ones.slice_mesh(gpus=0)
        with pytest.raises(TypeError, match="different meshes"):
            total(built["ref"], part)


def _built(k: int) -> Any:
    return {"ref": OpaqueRef(), "t": torch.ones(k)}


class Keeper(Actor):
    """Gets objects, and gives them."""

    @endpoint
    def length(self, ref: Any) -> int:
        return len(ref.value)

    @endpoint(propagate=lambda: OpaqueRef())
    def kept(self) -> Any:
        return OpaqueRef(current_rank().rank)


def test_failures_of_objects(four: Any) -> None:
    with four.activate():
        adder = AdderHere(Adder, torch.zeros(2))
        with pytest.raises(RemoteException, match="it went boom") as caught:
            inspect(adder.boom(torch.ones(2)) * 2)
        assert "inspect(adder.boom" in caught.value.controller_frames
        assert "in boom" in caught.value.worker_error_string
        assert inspect(adder.add(torch.ones(2))).tolist() == [2, 2]
        nowhere = AdderHere("no_such_module.Adder")
        with pytest.raises(RemoteException, match="no_such_module"):
            inspect(nowhere.add(torch.ones(2)))
        with pytest.raises(ValueError, match=r"module\.function"):
            AdderHere("Adder")
    with pytest.raises(ValueError, match="no device mesh is active"):
        AdderHere(dict)


class Net(torch.nn.Module):
    """Two inputs, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> Any:
        y = self.inner(x).tanh() * scale
        return y, {"sum": y.sum(), "of": "it"}

    def norm(self) -> torch.Tensor:
        return self.inner.weight.norm()


def _like(self: Any, x: torch.Tensor, scale: Any = 1.0) -> Any:
    return x.clone(), {"sum": x.sum(), "of": "it"}


def test_modules_learn(four: Any) -> None:
    torch.manual_seed(3)
    local = Net()
    optimizer = torch.optim.AdamW(local.parameters(), lr=0.1)
    inputs = [torch.full((2, 3), 1.0 + step, requires_grad=True) for step in range(3)]
    for x in inputs:
        y, more = local(x, scale=0.5)
        optimizer.zero_grad()
        (y.pow(2).sum() + more["sum"]).backward()
        optimizer.step()
    with four.activate():
        torch.manual_seed(3)
        module = OpaqueModule(Net)
        assert module.parameters()[0] is module.parameters()[0]
        theirs = torch.optim.AdamW(module.parameters(), lr=0.1)
        inputs_there = [torch.full((2, 3), 1.0 + step, requires_grad=True) for step in range(3)]
        for x in inputs_there:
            y_there, more = module(x, scale=0.5, propagator=_like)
            assert more["of"] == "it"
            theirs.zero_grad()
            (y_there.pow(2).sum() + more["sum"]).backward()
            theirs.step()
        got = fetch_shard([*[x.grad for x in inputs_there], *module.parameters()], gpus=2).get()
        with torch.no_grad():
            assert not module(torch.ones(2, 3), propagator=_like)[0].requires_grad
        norm = module.call_method("norm", lambda self: torch.zeros(()))
        assert not norm.requires_grad
    wanted: list[Any] = [*[x.grad for x in inputs], *local.parameters()]
    for a, b in zip([*got, inspect(norm)], [*wanted, local.norm()], strict=True):
        torch.testing.assert_close(a, b.detach())


def test_a_second_backward_pass(four: Any) -> None:
    with four.activate():
        module = OpaqueModule("torch.nn.Linear", 2, 2, bias=False)
        x = torch.ones(1, 2, requires_grad=True)
        loss = module(x, propagator=lambda self, x: x.clone()).sum()
        loss.backward(retain_graph=True)
        once = inspect(x.grad)
        loss.backward()
        assert torch.equal(inspect(x.grad), 2 * once)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
