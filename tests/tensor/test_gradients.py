"""Gradients that pass from rank to rank, against one process that has the values of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from monarch_kernel.actor import this_host
from monarch_kernel.tensor import (
    BorrowError,
    RemoteException,
    Stream,
    compile,  # noqa: A004  # Monarch's name
    grad_function,
    inspect,
    no_mesh,
    remote,
    to_mesh,
)

RANKS = [(host, gpu) for host in range(2) for gpu in range(2)]


@pytest.fixture(scope="module")
def grid(runtime: None) -> Any:
    """Four ranks in two dimensions."""
    return this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2}, name="grid")


def numbers(rank: Any, count: int = 8) -> torch.Tensor:
    """Small whole numbers, another set on each rank: sums of them are exact in any order."""
    return ((torch.arange(float(count)) * (2 * rank + 3) + rank) % 7).reshape(4, count // 4)


def on_ranks(mesh: Any) -> Any:
    rank = mesh.rank_tensor("hosts") * 2 + mesh.rank_tensor("gpus")
    return numbers(rank), numbers(rank + 1)


def everywhere(mesh: Any, tensor: Any) -> list[torch.Tensor]:
    return [inspect(tensor, hosts=host, gpus=gpu) for host, gpu in RANKS]


def groups(dims: Any) -> list[list[int]]:
    return {"hosts": [[0, 2], [1, 3]], "gpus": [[0, 1], [2, 3]]}.get(dims, [[0, 1, 2, 3]])


def combined(stacked: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "stack":
        return stacked
    return {"sum": torch.sum, "avg": torch.mean, "min": torch.amin, "max": torch.amax}[kind](stacked, 0)


def locally(kind: str, scatter: bool, dims: Any) -> list[torch.Tensor]:
    """The gradients of all ranks' values, in one process."""
    xs = [numbers(r).requires_grad_() for r in range(4)]
    loss = torch.zeros(())
    for members in groups(dims):
        parts = len(members)
        values = torch.stack([(xs[r] ** 2).reshape(parts, -1) if scatter else xs[r] ** 2 for r in members])
        for place, r in enumerate(members):
            y = combined(values[:, place] if scatter else values, kind)
            weight = numbers(r + 1).flatten()
            loss = loss + (y.flatten() ** 2 * weight.repeat(parts)[: y.numel()]).sum()
    return list(torch.autograd.grad(loss, xs))


@pytest.mark.parametrize("dims", ["gpus", None], ids=str)
@pytest.mark.parametrize(
    ("kind", "scatter"),
    [(kind, False) for kind in ("stack", "sum", "avg", "min", "max")]
    + [(kind, True) for kind in ("stack", "sum", "avg")],
)
def test_reductions_have_the_gradients_of_one_process(grid: Any, dims: Any, kind: str, scatter: bool) -> None:
    parts = 2 if dims else 4
    with grid.activate():
        x, weight = on_ranks(grid)
        x.requires_grad_()
        squares = x**2
        y = (squares.reshape(parts, -1) if scatter else squares).reduce(dims, kind, scatter)
        weights = weight.flatten().repeat(parts)[: y.numel()]
        (y.flatten() ** 2 * weights).sum().backward()
    for got, expected in zip(everywhere(grid, x.grad), locally(kind, scatter, dims)):
        assert torch.equal(got, expected)


def test_a_reduction_to_a_part_of_the_mesh(grid: Any) -> None:
    first = grid.slice(gpus=1)
    for kind in ("sum", "avg", "stack", "max"):
        with grid.activate():
            x, _ = on_ranks(grid)
            x.requires_grad_()
            y = x.reduce("gpus", kind, mesh=first)
        with first.activate():
            (y**2 * (1 + first.rank_tensor("hosts"))).sum().backward()
        xs = [numbers(r).requires_grad_() for r in range(4)]
        loss = sum(
            (combined(torch.stack([xs[2 * host], xs[2 * host + 1]]), kind) ** 2 * (1 + host)).sum() for host in range(2)
        )
        for got, expected in zip(everywhere(grid, x.grad), torch.autograd.grad(loss, xs)):  # type: ignore[arg-type]
            assert torch.equal(got, expected), kind


def test_a_slice_gives_its_ranks_a_gradient_and_others_none(grid: Any) -> None:
    with grid.activate():
        x, _ = on_ranks(grid)
        x.requires_grad_()
        y = x * 3
        part = y.slice_mesh(gpus=1)
    with grid.slice(gpus=1).activate():
        (part**2).sum().backward()
    got = everywhere(grid, x.grad)
    for rank in range(4):
        assert torch.equal(got[rank], 18 * numbers(rank) * (rank % 2))


def test_a_copy_to_other_ranks_sends_its_gradient_back(grid: Any) -> None:
    left, right = grid.slice(gpus=0), grid.slice(gpus=1)
    with left.activate():
        x = torch.arange(3.0) + left.rank_tensor("hosts")
        x.requires_grad_()
        moved = to_mesh(x * 2, right)
    with right.activate():
        once = moved**2
        back = once.to_mesh(left)
    with left.activate():
        everywhere_too: Any = to_mesh(x, grid)  # a broadcast: its gradient is a sum
        (back + x).sum().backward(retain_graph=True)
    assert inspect(x.grad, hosts=1).tolist() == [9.0, 17.0, 25.0]
    with grid.activate():
        (everywhere_too * (1 + grid.rank_tensor("gpus"))).sum().backward()
    assert inspect(x.grad, hosts=1).tolist() == [12.0, 20.0, 28.0]


def test_gradients_come_back_from_another_world(grid: Any) -> None:
    other = this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2, "more": 2}, name="other")
    with grid.activate():
        x, _ = on_ranks(grid)
        x.requires_grad_()
        there = (x * x).to_mesh(other)
    with other.activate():
        (there * (1 + other.rank_tensor("more"))).sum().backward()
    for rank, got in enumerate(everywhere(grid, x.grad)):
        assert torch.equal(got, 6 * numbers(rank))
    other.stop().get()


def test_pipeline_of_stages_trains_as_one_process(grid: Any) -> None:
    first, second = grid.slice(hosts=0), grid.slice(hosts=1)
    with first.activate():
        w1 = torch.arange(6.0).reshape(2, 3).requires_grad_()
        h = (numbers(first.rank_tensor("gpus")) @ w1).relu()
    with second.activate():
        w2 = torch.ones(3, 1, requires_grad=True)
        out = (to_mesh(h, second) @ w2).reduce("gpus", "avg")
        (out**2).sum().backward()
    a1, a2 = torch.arange(6.0).reshape(2, 3).requires_grad_(), torch.ones(3, 1, requires_grad=True)
    b1, b2 = (t.detach().clone().requires_grad_() for t in (a1, a2))
    out = torch.stack([(numbers(g) @ (a1, b1)[g]).relu() @ (a2, b2)[g] for g in range(2)]).mean(0)
    (2 * (out**2).sum()).backward()  # each of the two ranks has this loss
    for gpu, (w, v) in enumerate([(a1, a2), (b1, b2)]):
        assert torch.equal(inspect(w1.grad, gpus=gpu), w.grad)  # type: ignore[arg-type]
        assert torch.equal(inspect(w2.grad, gpus=gpu), v.grad)  # type: ignore[arg-type]


def test_second_derivatives(grid: Any) -> None:
    with grid.activate():
        x = (1 + torch.arange(4.0) + grid.rank_tensor("gpus")).requires_grad_()
        total = (x**3).reduce("gpus", "sum")
        (first,) = torch.autograd.grad((total**2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    a, b = (torch.arange(4.0) + 1 + k for k in range(2))
    a.requires_grad_()
    b.requires_grad_()
    firsts = torch.autograd.grad(2 * ((a**3 + b**3) ** 2).sum(), (a, b), create_graph=True)
    seconds = torch.autograd.grad(firsts[0].sum() + firsts[1].sum(), (a, b))
    for gpu in range(2):
        assert torch.equal(inspect(first, gpus=gpu), firsts[gpu])
        assert torch.equal(inspect(second, gpus=gpu), seconds[gpu])


def test_gradients_pass_a_borrow(grid: Any) -> None:
    other = Stream("other")
    with grid.activate():
        x, _ = on_ranks(grid)
        x.requires_grad_()
        squares = x * x
        with pytest.raises(BorrowError, match="requires grad"):
            other.borrow(squares, mutable=True)
        lent, borrow = other.borrow(squares)
        with other.activate():
            loss = (lent * 3).sum()
            loss.backward()
        borrow.drop()
    for rank, got in enumerate(everywhere(grid, x.grad)):
        assert torch.equal(got, 6 * numbers(rank))


def test_in_place_follows_torch(grid: Any) -> None:
    with grid.activate():
        x, _ = on_ranks(grid)
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="leaf"):
            x.reduce_("gpus")
        with pytest.raises(RuntimeError, match="out=.*grad"):
            x.reduce("gpus", out=torch.empty(4, 2))
        y = x * 3
        assert y.reduce_("gpus", "sum") is y
        (y**2).sum().backward()
        a: Any = torch.ones(2, requires_grad=True)
        saved: Any = torch.ones(2)
        product = a * saved
        saved.reduce_("gpus")  # what the backward of the product needs
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        a.grad = torch.ones(2)
        cast("Any", a.grad).reduce_("gpus", "avg")  # as a training step does
    for rank, got in enumerate(everywhere(grid, x.grad)):
        both = numbers(rank) + numbers(rank ^ 1)
        assert torch.equal(got, 36 * both)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (lambda x: x.reduce("gpus", "product"), "reduce\\(reduction='product'\\)"),
        (lambda x: x.reshape(2, -1).reduce("gpus", "max", scatter=True), "reduce.*scatter=True"),
        (lambda x: remote(lambda t: t * 2, propagate=lambda t: t.clone())(x), "remote"),
        (lambda x: remote(lambda t: [t * 2, 1], propagate=lambda t: [t.clone(), 1])(x)[0], "remote"),
    ],
)
def test_no_gradient_is_an_error_of_the_backward_with_its_line(
    grid: Any, what: Callable[[Any], Any], error: str
) -> None:
    with grid.activate():
        x, _ = on_ranks(grid)
        value = what(x.requires_grad_())
        assert value.requires_grad and isinstance(inspect(value), torch.Tensor)
        with pytest.raises(RuntimeError, match=f"{error}.*test_gradients.py:.*has no gradient.*detach"):
            value.sum().backward()
        with torch.no_grad():
            assert not what(x).requires_grad
        assert not what(x.detach()).requires_grad


def test_a_failure_in_a_backward_names_its_line(grid: Any) -> None:
    @remote(propagate=lambda t: t)
    def picky(t: Any) -> Any:
        raise ValueError("no gradient today")

    with grid.activate():
        x, _ = on_ranks(grid)
        x.requires_grad_()
        y = (x * 2).reduce("gpus", "sum")
        y.register_hook(lambda g: picky(g))
        y.sum().backward()
        with pytest.raises(RemoteException, match="no gradient today") as failed:
            inspect(x.grad)
    assert "picky" in failed.value.controller_frames


def test_a_recorded_step_has_the_same_gradients(grid: Any) -> None:
    w = None

    def step(x: Any) -> Any:
        loss = ((x @ w).reduce("gpus", "avg") ** 2).sum()
        loss.backward()
        with torch.no_grad():
            w.grad.reduce_("gpus", "sum")  # type: ignore[union-attr]
            w.sub_(w.grad * 0.125)  # type: ignore[union-attr]
            w.grad = None  # type: ignore[union-attr]
        return loss.detach()

    found = []
    with grid.activate():
        for function in (step, compile(step)):
            w = torch.ones(2, 3, requires_grad=True)
            losses = [function(numbers(grid.rank_tensor("gpus")) / 8) for _ in range(4)]
            found.append(inspect([*losses, w], gpus=1))
    with no_mesh.activate():
        assert all(map(torch.equal, *found))


def test_functions_with_gradients_over_nested_values(grid: Any) -> None:
    @grad_function
    def scaled(values: dict[str, Any], factor: float, *, more: Any) -> Any:
        result = {"rows": [values["a"] * factor, more + values["b"]], "factor": factor}
        return result, lambda first, second, _: (first * factor, second, second * 2)

    @grad_function
    def wrong(x: Any) -> Any:
        return x * 2

    with grid.activate():
        a, b, c = (torch.full((2,), float(k), requires_grad=True) for k in (1, 2, 3))
        result = scaled({"a": a, "b": b}, 4.0, more=c)
        assert result["factor"] == 4.0
        (result["rows"][0] + result["rows"][1]).sum().backward()
        # one for each tensor: those of the first argument, then that of the keyword
        assert [inspect(x.grad).tolist() for x in (a, b, c)] == [[4, 4], [1, 1], [2, 2]]
        with pytest.raises(TypeError, match="wrong gave no pair"):
            wrong(a)
