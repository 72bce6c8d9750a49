"""Functions that are recorded once and replayed, beside the same calls without a replay, and beside one process."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from monarch_kernel.tensor import RemoteException, compile, fetch_shard, no_mesh, remote  # noqa: A004  # Monarch's name

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def active(four: Any) -> Iterator[Any]:
    """All tests work on one mesh of four ranks."""
    with four.activate():
        yield four


@remote(propagate=lambda seed: torch.zeros(()))
def seed_ranks(seed: int) -> Any:
    """The generators of the ranks begin anew."""
    torch.manual_seed(seed)
    return torch.zeros(())


def value(x: Any, **rank: Any) -> Any:
    return fetch_shard(x.detach(), **rank).result().tolist()


def counts(function: Any) -> tuple[int, int]:
    return function.recorded, function.replayed


def test_a_function_is_recorded_once_and_replayed_for_other_tensors_of_the_kind() -> None:
    @compile
    def double_and_add(x: Any, y: Any) -> Any:
        z = x * 2
        return {"sum": z + y, "both": [z, x]}

    for k in range(4):
        x = torch.full((2,), float(k))
        found = double_and_add(x, torch.ones(2))
        assert value(found["sum"]) == [2 * k + 1] * 2 and value(found["both"][0]) == [2 * k] * 2
        assert found["both"][1] is x
    assert counts(double_and_add) == (1, 3)


def test_a_changed_shape_dtype_constant_or_mode_is_recorded_anew() -> None:
    @compile
    def scaled(x: Any, by: Any = 2) -> Any:
        return x * by

    calls = [
        lambda: scaled(torch.ones(2)),
        lambda: scaled(torch.ones(3)),
        lambda: scaled(torch.ones(2, dtype=torch.int64)),
        lambda: scaled(torch.ones(2), 3),
        lambda: scaled(torch.ones(2), 3.0),
        lambda: scaled(torch.ones(2), by=True),
    ]
    for _ in range(2):
        found = [call() for call in calls]
        assert [value(x) for x in found] == [[2, 2], [2, 2, 2], [2, 2], [3, 3], [3, 3], [1, 1]]
    assert counts(scaled) == (6, 6)
    assert scaled(torch.ones(2, requires_grad=True)).requires_grad
    assert counts(scaled) == (7, 6)


class Scale:
    """What a function reaches through an object."""

    factor = 2
    shift: Any = None

    def __init__(self) -> None:
        self.offset = 1.0
        self.table = {"weights": [torch.ones(2), torch.zeros(2)]}

    def apply(self, x: Any) -> Any:
        return x * self.factor * SETTINGS["gain"] + self.offset + sum(self.table["weights"])


SETTINGS = {"gain": 1.0}


def test_a_constant_that_the_function_reaches_guards_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = Scale()
    scaled = compile(lambda x: scale.apply(x))
    x = torch.ones(2)
    assert [value(scaled(x)) for _ in range(2)] == [[4, 4]] * 2
    scale.offset = 5.0
    assert [value(scaled(x)) for _ in range(2)] == [[8, 8]] * 2
    assert "offset is 5.0 and was 1.0" in scaled.reason
    monkeypatch.setitem(SETTINGS, "gain", 10.0)
    assert [value(scaled(x)) for _ in range(2)] == [[26, 26]] * 2
    monkeypatch.setattr(Scale, "factor", 3)
    assert [value(scaled(x)) for _ in range(2)] == [[36, 36]] * 2
    scale.table["weights"].append(torch.ones(2))
    assert [value(scaled(x)) for _ in range(2)] == [[37, 37]] * 2
    assert counts(scaled) == (5, 5)


def test_a_captured_tensor_is_followed_when_it_is_another_one() -> None:
    scale = Scale()
    scaled = compile(lambda x: scale.apply(x))
    x = torch.ones(2)
    assert [value(scaled(x)) for _ in range(2)] == [[4, 4]] * 2
    scale.table["weights"][0] = torch.full((2,), 7.0)
    assert value(scaled(x)) == [10, 10]
    scale.table["weights"][0].add_(1)
    assert value(scaled(x)) == [11, 11]
    assert counts(scaled) == (1, 3)
    scale.table["weights"][0] = torch.ones(1)  # of another shape
    assert value(scaled(x)) == [4, 4]
    scale.table["weights"][1] = scale.table["weights"][0]  # two that were different are one
    assert value(scaled(x)) == [5, 5]
    assert scaled.recorded == 3


def test_a_mutation_of_captured_tensors_and_arguments_happens_at_each_call() -> None:
    total, steps = torch.zeros(2), []

    @compile
    def accumulate(x: Any) -> Any:
        total.add_(x)
        x.mul_(2)
        view = total[0]
        view.add_(100)
        return total * 1

    x = torch.ones(2)
    for _ in range(3):
        steps.append(value(accumulate(x)))
    assert steps == [[101, 1], [203, 3], [307, 7]]
    assert value(x) == [8, 8] and value(total) == [307, 7]
    assert counts(accumulate) == (1, 2)


def test_a_tensor_made_of_data_here_begins_anew_at_each_call() -> None:
    @compile
    def counted(x: Any) -> Any:
        start = torch.tensor([1.0, 2.0])
        start.add_(x)
        return start

    assert [value(counted(torch.ones(2))) for _ in range(3)] == [[2, 3]] * 3


def test_a_backward_notices_that_a_replay_has_written_what_it_saved() -> None:
    weight = torch.ones(2)

    @compile
    def write() -> None:
        weight.add_(1)

    write()
    x = torch.ones(2, requires_grad=True)
    y = (x * weight).sum()
    write()
    assert counts(write) == (1, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_random_numbers_are_drawn_anew_and_equal_those_of_calls_without_a_replay() -> None:
    def noisy() -> Any:
        return torch.nn.functional.dropout(torch.rand(4) + torch.randn(4), 0.5)

    replayed = compile(noisy)
    seed_ranks(3)
    expected = [value(noisy()) for _ in range(4)]
    seed_ranks(3)
    found = [value(replayed()) for _ in range(4)]
    assert found == expected and len(set(map(tuple, found))) == 4
    assert counts(replayed) == (1, 3)


def trained(
    optimizer: Any, options: dict[str, Any], wrap: Any, steps: int = 6, schedule: float = 1.0
) -> tuple[list[float], list[Any], Any]:
    """Losses, parameters and gradients after some steps, on the active mesh or on none."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    x, y = torch.sin(torch.arange(24) * 1.7).reshape(4, 6), torch.cos(torch.arange(8)).reshape(4, 2)
    opt = optimizer(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, schedule)

    def step(x: Any) -> Any:
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        return loss.detach()

    step = wrap(step)
    losses: list[float] = []
    for _ in range(steps):
        losses.append(step(x).item())
        scheduler.step()
    grads: list[Any] = [p.grad for p in model.parameters()]
    return losses, [*(t.tolist() for t in model.state_dict().values()), *(g.tolist() for g in grads)], step


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 0.05}),
    (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    (torch.optim.NAdam, {"lr": 0.01}),
]


@pytest.mark.parametrize("optimizer, options", OPTIMIZERS, ids=lambda x: getattr(x, "__name__", None))
def test_a_whole_step_is_replayed_exactly(optimizer: Any, options: dict[str, Any], active: Any) -> None:
    plain = trained(optimizer, options, lambda f: f, schedule=0.9)
    replayed = trained(optimizer, options, compile, schedule=0.9)
    assert replayed[:2] == plain[:2]
    # the first steps make gradients and the optimizer's state: the third is a replay, as is any later one
    assert counts(replayed[2]) == (2, 4)
    with no_mesh.activate():
        alone = trained(optimizer, options, lambda f: f, schedule=0.9)
    torch.testing.assert_close(replayed[:2], alone[:2], rtol=1e-5, atol=1e-6)


def test_gradients_go_through_a_replay() -> None:
    weight = torch.nn.Parameter(torch.arange(4.0).reshape(2, 2))

    def layer(x: Any) -> Any:
        return torch.tanh(x @ weight), x.detach()

    replayed = compile(layer)
    for k in range(3):
        found = []
        for function in (layer, replayed):
            x = torch.full((3, 2), 0.1 * k).requires_grad_()
            weight.grad = None
            out, same = function(x)
            assert out.requires_grad and not same.requires_grad
            (out.sum() * 2 + (x * x).sum()).backward()
            found.append((value(out), value(x.grad), value(weight.grad)))
        assert found[0] == found[1]
    assert replayed.recorded == 1 and replayed.replayed == 2
    with torch.no_grad():
        assert not replayed(torch.ones(3, 2))[0].requires_grad


def test_gradients_accumulate_over_replays_without_zero_grad() -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    @compile
    def backward(x: Any) -> None:
        (x * weight).sum().backward()

    for k in range(1, 5):
        backward(torch.ones(2))
        assert value(weight.grad) == [k, k]
    assert counts(backward) == (2, 2)


def test_a_recording_within_a_recording_is_a_part_of_it() -> None:
    total = torch.zeros(2)

    @compile
    def inner(x: Any) -> Any:
        total.add_(x)
        return x + 1

    @compile
    def outer(x: Any) -> Any:
        return inner(inner(x)) * 2

    x = torch.ones(2)
    assert [value(outer(x)) for _ in range(3)] == [[6, 6]] * 3
    assert value(total) == [9, 9]
    assert counts(outer) == (1, 2) and counts(inner) == (0, 0)
    assert [value(inner(x)) for _ in range(2)] == [[2, 2]] * 2
    assert value(total) == [11, 11]


def test_what_a_function_assigns_is_assigned_by_a_replay() -> None:
    scale = Scale()
    last: list[Any] = [None]

    @compile
    def remember(x: Any) -> None:
        scale.shift = x + 1
        last[0] = scale.shift * 2

    for k in range(3):
        remember(torch.full((2,), float(k)))
        assert value(scale.shift) == [k + 1] * 2 and value(last[0]) == [2 * k + 2] * 2
    assert remember.replayed >= 1


def test_a_function_that_a_replay_would_not_repeat_runs_as_it_is_and_says_why() -> None:
    losses: list[Any] = []

    @compile
    def step(x: Any) -> Any:
        losses.append(x + len(losses))
        return losses[-1]

    with pytest.warns(UserWarning, match="never replayed .*another length"):
        found = [value(step(torch.zeros(1))) for _ in range(8)]
    assert found == [[k] for k in range(8)] and len(losses) == 8
    assert step.replayed == 0

    @compile
    def branch(x: Any) -> Any:
        return x + 1 if x.sum().item() > 2 else x - 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [value(branch(torch.full((2,), k))) for k in (1.0, 2.0)] == [[0, 0], [3, 3]]
    assert "fetches a value" in branch.explain() and "test_replay.py" in branch.reason


def test_an_error_while_recording_is_the_functions_own() -> None:
    @compile
    def wrong(x: Any) -> Any:
        x.add_(1)
        return x @ torch.ones(5)

    x = torch.ones(3)
    for k in range(2):
        with pytest.raises(RuntimeError, match="size mismatch|inconsistent"):
            wrong(x)
        assert value(x) == [k + 2] * 3  # what came before it has happened


@remote(propagate=lambda x, limit: x * 1)
def below(x: Any, limit: int) -> Any:
    """Fails on a rank whose values are too large."""
    if x.max() >= limit:
        raise ArithmeticError(f"{x.max().item()} is not below {limit}")
    return x * 1


def test_a_failure_in_a_replay_tells_the_line_that_was_recorded(active: Any) -> None:
    ranks = active.rank_tensor("gpus").float()
    kept = torch.zeros(())

    def checked(x: Any) -> Any:
        before = x + 1
        found = below(before, 6)  # the line
        kept.add_(1)
        return before, found + 1, before * 2

    replayed = compile(checked)
    for function in (checked, replayed, replayed):
        before, found, after = function(ranks)
        assert [value(found, gpus=k) for k in range(4)] == [k + 2 for k in range(4)]
        before, found, after = function(ranks + 2)
        # what does not depend on the failure is there, and what the rest of the function wrote
        assert value(before, gpus=3) == 6 and value(after, gpus=3) == 12
        with pytest.raises(RemoteException, match="6.0 is not below 6") as raised:
            value(found, gpus=3)
        assert raised.value.rank == 3
        frames = raised.value.controller_frames
        assert "# the line" in frames
        assert "found + 1" not in frames
    assert value(kept, gpus=3) == 6
    assert counts(replayed) == (1, 3)
    assert "replayed at" in frames and "function(ranks + 2)" in frames


def test_a_failure_among_operations_that_run_as_one_is_that_of_its_line() -> None:
    table, counter = torch.ones(4, 2), torch.zeros(2)

    @compile
    def looked_up(t: Any, index: Any) -> Any:
        doubled = (t * 2).relu() + 1
        found = torch.nn.functional.embedding(index, doubled)
        counter.add_(found.sum(0)).mul_(2)
        return doubled, found * 2

    looked_up(table, torch.tensor([1, 3]))
    _, found = looked_up(table, torch.tensor([1, 3]))
    assert counts(looked_up) == (1, 1) and value(found) == [[6.0, 6.0]] * 2
    assert value(counter) == [36.0, 36.0]  # (0 + 6) * 2, (12 + 6) * 2
    doubled, found = looked_up(table, torch.tensor([1, 4]))
    assert counts(looked_up) == (1, 2)
    with pytest.raises(RemoteException, match="index out of range") as told:
        value(found)
    assert "found = torch.nn.functional.embedding(index, doubled)" in told.value.controller_frames
    assert value(doubled) == [[3.0, 3.0]] * 4
    with pytest.raises(RemoteException, match="index out of range"):  # what was to be written is not what it should be
        value(counter)
    with pytest.raises(RemoteException, match="index out of range"):  # of an input: no operation has run
        value(looked_up(found, torch.tensor([0]))[0])


def test_collectives_in_a_replay_meet_even_where_a_rank_has_failed(active: Any) -> None:
    ranks = active.rank_tensor("gpus").float()

    @compile
    def summed(x: Any) -> Any:
        return below(x, 6).reduce("gpus"), x.reduce("gpus")

    for _ in range(3):
        assert [value(t, gpus=1) for t in summed(ranks)] == [6, 6]
        failed, total = summed(ranks + 3)
        assert value(total, gpus=0) == 18
        for k in (0, 3):
            with pytest.raises(RemoteException, match="6.0 is not below 6") as raised:
                value(failed, gpus=k)
            assert raised.value.rank == 3 and "below(x, 6)" in raised.value.controller_frames
    assert counts(summed) == (1, 5)


def test_torch_compile_makes_one_of_the_recording_on_the_ranks() -> None:
    total = torch.zeros(4)

    def work(x: Any) -> Any:
        y = torch.sin(x) * 2 + 1
        total.add_(y)
        return (y * y).sum()

    replayed = compile(work, backend="aot_eager")
    expected = value(work(torch.arange(4) / 4))
    for _ in range(3):
        assert value(replayed(torch.arange(4) / 4)) == pytest.approx(expected)
    assert counts(replayed) == (1, 2)
    assert value(total)[0] == 4
    broken = compile(work, backend="no_such_backend")
    broken(torch.ones(4))
    with pytest.raises(RemoteException, match="no_such_backend"):
        value(broken(torch.ones(4)))


def test_nothing_is_left_on_the_ranks(active: Any) -> None:
    workers = active._shared["tensors"]

    def held() -> set[int]:
        fetch_shard(torch.ones(())).result()
        mesh = next(iter(workers.meshes.values()))
        workers.flush()
        return set(mesh.workers.held.call().get().values())

    def run() -> None:
        weight = torch.nn.Parameter(torch.ones(2))

        @compile
        def step(x: Any) -> Any:
            weight.grad = None
            loss = (x * weight).sum()
            loss.backward()
            return loss

        for _ in range(5):
            step(torch.ones(2))
        assert step.replayed == 3
        gc.collect()
        # the parameter and its gradient; no recording keeps what its run has made
        assert held() == {count + 2 for count in before}

    gc.collect()
    before = held()
    run()
    gc.collect()
    assert held() == before


def test_a_compiled_method_has_recordings_for_each_instance() -> None:
    class Counter:
        def __init__(self, start: float) -> None:
            self.total = torch.full((1,), start)

        @compile
        def add(self, x: Any) -> Any:
            self.total = self.total + x
            return self.total

    one, two = Counter(0.0), Counter(10.0)
    for k in range(1, 4):
        assert value(one.add(torch.ones(1))) == [k]
        assert value(two.add(torch.ones(1))) == [10 + k]
    assert counts(one.add) == counts(two.add) == (1, 2)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a function"):
        compile(3)  # pyright: ignore[reportArgumentType]  # on purpose
