"""Ranks remember what DTensor made of which layouts. Whatever is remembered, repeated operations stay right.

Each operation runs often enough to be remembered, among others that differ from it in one thing only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from monarch_kernel import tensor
from monarch_kernel.distributed import Mesh, distribute
from monarch_kernel.runtime.tensor.sharded.rank.state import rules
from monarch_kernel.tensor import RemoteException, call_on_shard_and_fetch, fetch_shard

pytestmark = pytest.mark.filterwarnings("ignore::monarch_kernel.distributed.FallbackWarning")

#: How often operations run: they are watched at the second call, and remembered from then on.
TIMES = 4


@pytest.fixture(scope="module")
def mesh(runtime: None) -> Iterator[Mesh]:
    """Three ranks, which divide no size here but six."""
    with Mesh((3,), ("x",)) as made:
        yield made


def table(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers for the same size."""
    return torch.arange(1, torch.Size(size).numel() + 1).view(size).to(dtype) / 7


def remembered(x: Any) -> int:
    """How many kinds of inputs a rank runs operations on parts for."""
    return sum(len(known.results) for known in rules()._known)


def count(x: Any) -> int:
    return call_on_shard_and_fetch(remembered, x).get()


OPERATIONS: list[Callable[..., Any]] = [
    operator.add,
    operator.mul,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: (a @ b.t()).relu(),
    lambda a, b: torch.addmm(a.sum(0, keepdim=True)[:, :1], a, b.t()),
    lambda a, b: a.sum(0) + b.mean(0),
    lambda a, b: torch.softmax(a, -1) - b.exp().clamp(max=3.0),
    lambda a, b: torch.cat([a, b], 1).tanh(),
]
LAYOUTS = [
    [(Shard(0),), (Shard(0),)],
    [(Shard(1),), (Shard(1),)],
    [(Shard(0),), (Replicate(),)],
    [(Replicate(),), (Replicate(),)],
    [(Replicate(),), (Shard(1),)],
    [(Shard(1),), (Shard(0),)],
    [(Partial(),), (Partial(),)],
]
INPUTS = {
    "even": lambda: [table(6, 6), table(6, 6).flip(0)],
    "uneven": lambda: [table(5, 4), table(5, 4).flip(0)],
    "a rank has none": lambda: [table(2, 2), table(2, 2).flip(0)],
    "float64": lambda: [table(5, 4, dtype=torch.float64), table(5, 4, dtype=torch.float64).flip(0)],
    "of two dtypes": lambda: [table(5, 4), table(5, 4).flip(0).to(torch.bfloat16)],
    "strided": lambda: [table(4, 5).t(), table(4, 5).t()],
}


@pytest.mark.parametrize("operation", range(len(OPERATIONS)))
def test_layouts_sizes_dtypes_and_strides_do_not_get_mixed_up(mesh: Mesh, operation: int) -> None:
    run = OPERATIONS[operation]
    dtypes_differ = operation in (4, 5)  # products need one
    made: dict[Any, Any] = {}
    cases = [(name, k) for name in INPUTS for k in range(len(LAYOUTS)) if not (dtypes_differ and "two" in name)]
    placed = {
        (name, k): [distribute(t, mesh, list(p)) for t, p in zip(INPUTS[name](), LAYOUTS[k], strict=True)]
        for name, k in cases
    }
    for case in cases * 2:  # what is remembered of one case is there when the next one runs, and when it comes again
        made.setdefault(case, []).extend(run(*placed[case]) for _ in range(TIMES // 2))
    for (name, k), results in made.items():
        expected = run(*INPUTS[name]())
        layouts = [result.placements for result in results]
        assert layouts == layouts[:1] * TIMES, (name, LAYOUTS[k])
        first, *others = fetch_shard(results).get()
        about = f"{name}, {LAYOUTS[k]}"
        rtol, atol = (1e-2, 1e-2) if "two" in name else (1e-4, 1e-5)
        torch.testing.assert_close(
            first, expected, rtol=rtol, atol=atol, msg=lambda text, about=about: f"{about}: {text}"
        )
        for again in others:
            torch.testing.assert_close(again, first, rtol=0, atol=0, msg=lambda text, about=about: f"{about}: {text}")


def test_operations_are_remembered_by_placements_and_only_where_ranks_do_not_meet(mesh: Mesh) -> None:
    """Sizes are those of no other test: the operations are new ones to the ranks."""
    x, y = (distribute(table(9, 9), mesh, ["x"]) for _ in range(2))
    whole, terms = distribute(table(9, 9), mesh), distribute(table(9, 9), mesh, [Partial()])

    def grows(run: Callable[[], Any], times: int = TIMES) -> int:
        before = count(x)
        for _ in range(times):
            run()
        return count(x) - before

    assert grows(lambda: x + y) == 1
    assert grows(lambda: x + y) == 0
    assert grows(lambda: whole + whole) == 1  # the same program
    assert grows(lambda: x @ whole) == 1
    assert grows(lambda: whole @ x) == 0  # gathers x
    assert grows(lambda: x + whole.t()) == 0  # a part of what each rank has
    assert grows(lambda: terms + terms) == 0
    assert grows(lambda: x.t()) == grows(lambda: x[:2]) == grows(lambda: x.view(9, 9)) == 0
    assert grows(lambda: y.add_(0)) == grows(lambda: y.relu_()) == 0
    assert grows(lambda: torch.add(x, y, out=y)) == 0
    assert grows(lambda: torch.rand_like(x)) == grows(lambda: torch.bernoulli(x / 9)) - 1 == 0  # the division
    assert grows(lambda: torch.nn.functional.embedding(torch.tensor([0, 5]), x)) == 0  # the rank's rows, masked


def test_numbers_that_differ_from_call_to_call_are_those_of_the_call(mesh: Mesh) -> None:
    x = distribute(table(5, 4), mesh, ["x"])
    scales = [0.5, 2.0, -3.0, float("inf"), 1e-3, 7.0]
    got = fetch_shard([x * scale for scale in scales] + [x.clamp(min=scale) for scale in scales]).get()
    expected = [table(5, 4) * scale for scale in scales] + [table(5, 4).clamp(min=scale) for scale in scales]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_random_numbers_are_new_ones_each_time(mesh: Mesh) -> None:
    torch.manual_seed(5)
    x = distribute(torch.zeros(6, 6), mesh, ["x"])
    got = fetch_shard([torch.rand_like(x) for _ in range(TIMES)]).get()
    torch.manual_seed(5)
    assert all(torch.equal(a, torch.rand(6, 6)) for a in got)


def test_gradients_are_those_of_one_device_with_and_without_grad_in_turns(mesh: Mesh) -> None:
    def step(x: Any, w: Any) -> Any:
        return ((x @ w).relu() * x).sum()

    local_x, local_w = table(5, 4), table(4, 4) - 1
    x, w = distribute(local_x, mesh, ["x"]), distribute(local_w, mesh)
    frozen = w.detach()
    learned = local_w.clone().requires_grad_()
    w.requires_grad_()
    for _ in range(TIMES):
        step(local_x, learned).backward()
        with torch.no_grad():
            assert not step(x, w).requires_grad
        assert not step(x, frozen).requires_grad
        loss = step(x, w)
        assert loss.requires_grad
        loss.backward()
        torch.testing.assert_close(w.grad.full_tensor(), learned.grad)


def test_what_is_written_in_between_is_seen_and_results_are_memory_of_their_own(mesh: Mesh) -> None:
    x, y = distribute(table(5, 4), mesh, ["x"]), distribute(table(5, 4), mesh, ["x"])
    sums: list[Any] = []
    for _ in range(TIMES):
        sums.append(x + y)
        x.mul_(2)
        sums[-1][0].zero_()
    expected: list[torch.Tensor] = []
    for k in range(TIMES):
        expected.append(table(5, 4) * 2**k + table(5, 4))
        expected[-1][0] = 0
    torch.testing.assert_close(fetch_shard(sums).get(), expected)


def test_meshes_over_the_same_ranks_are_told_apart(mesh: Mesh) -> None:
    with Mesh((2, 2), ("a", "b")) as grid:
        line = Mesh.of(grid.procs, ("c",), (4,))
        for _ in range(TIMES):
            for where, spec in ((grid, ["a", "b"]), (line, ["c"]), (grid, ["b"]), (line, [None, "c"])):
                x = distribute(table(5, 6), where, spec)
                made = x * x + x
                assert made.placements == x.placements and made.device_mesh is where
                torch.testing.assert_close(made.full_tensor(), table(5, 6) ** 2 + table(5, 6))


def test_a_failure_among_remembered_operations_is_that_of_its_line(mesh: Mesh) -> None:
    x = distribute(table(6, 6), mesh, ["x"])
    index = distribute(torch.tensor([[0, 1], [1, 0]]), mesh)
    for _ in range(TIMES):
        (x + x).full_tensor()
    broken = torch.gather(distribute(table(2, 2), mesh), 1, index + 2)
    with pytest.raises(RemoteException, match="out of bounds") as raised:
        (broken + broken).full_tensor()
    assert "torch.gather(" in raised.value.controller_frames
    torch.testing.assert_close((x + x).full_tensor(), table(6, 6) * 2)


@pytest.mark.parametrize("options", [{}, {"backend": "aot_eager"}], ids=["as it is", "traced"])
def test_replays_are_right_for_each_layout(mesh: Mesh, options: dict[str, Any]) -> None:
    replayed = tensor.compile(lambda a, b: (a + b) * a - b, **options)
    local = [table(5, 4), table(5, 4) + 1]
    inputs = [[distribute(t, mesh, list(p)) for t, p in zip(local, layout, strict=True)] for layout in LAYOUTS[:4]]
    results = [replayed(*given) for _ in range(TIMES) for given in inputs]
    expected = (local[0] + local[1]) * local[0] - local[1]
    for got in fetch_shard(results).get():
        torch.testing.assert_close(got, expected)
