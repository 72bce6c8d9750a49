"""Recordings of torch operations: what is in them, in which module and line, and which one differs first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport]  # DDP imports it: once here is quicker than in each rank
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from monarch_kernel.numerics.comparison import compare
from monarch_kernel.numerics.observer import OUTSIDE, observer
from monarch_kernel.numerics.recording import Entry, Recording, record
from tests.numerics.ranks import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Block(nn.Module):
    """A feed-forward layer that scales its input."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y = y * self.scale
        return x + self.down(y.relu())


class Net(nn.Module):
    """Two blocks, of which activations may be recomputed."""

    def __init__(self, scale: float = 2.0, checkpoints: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = Block(), Block(scale)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.one, self.two):
            if self.checkpoints:
                x = checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
            else:
                x = block(x)
        return x


def train(model: nn.Module, steps: int = 1, rows: slice = slice(0, 6)) -> list[torch.Tensor]:
    """Train with one batch; return the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    x, y = x[rows].clone().requires_grad_(), y[rows]
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Nothing is installed in torch afterwards."""
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not observer().is_installed


def recorded(folder: Path, train_it: Callable[[], object], what: str = "ops", **options: Any) -> Recording:
    """Record what a function trains."""
    with record(folder.name, folder=folder, what=what.split(","), **options) as recorder:
        train_it()
    assert recorder.reason in ("done", "stopped")
    return Recording.open(folder)


def operations(recording: Recording, phase: str, side: str = "output") -> list[Entry]:
    """Entries of operations, in program order."""
    return [
        each
        for each in recording.entries(0)
        if each.kind == "operation" and each.phase == phase and f":{side}" in each.tensor
    ]


def test_a_step_has_its_operations_with_module_and_line(tmp_path: Path) -> None:
    net = Net()
    found = recorded(tmp_path / "ops", lambda: train(net))
    forward = operations(found, "forward")
    called = [(each.name, each.tensor.partition("#")[0]) for each in forward if ".t#" not in each.tensor]
    assert called == [
        *[(f"{block}{part}", name) for block in ("one", "two") for part, name in PARTS],
        (OUTSIDE, "aten.mse_loss"),
        (OUTSIDE, "aten.ones_like"),  # with which the backward begins
    ]
    scaled = next(each for each in forward if each.name == "two" and each.tensor == "aten.mul#0:output")
    assert scaled.line == "test_operations.py:36" and scaled.shape == (6, 16)
    with torch.no_grad():
        plain = Net()
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))[0]
        expected = plain.two.up(plain.one(x)) * 2.0
    assert scaled.norm == pytest.approx(float(expected.norm()), rel=1e-5)
    inputs = [each for each in operations(found, "forward", "input") if each.tensor.startswith("aten.mul#0:")]
    assert [each.tensor for each in inputs] == ["aten.mul#0:input.self"] * 2
    up = next(each for each in forward if each.name == "two.up" and each.tensor == "aten.addmm#0:output")
    assert inputs[1].hash == up.hash and inputs[1].sequence > up.sequence


PARTS = ((".up", "aten.addmm"), ("", "aten.mul"), ("", "aten.relu"), (".down", "aten.addmm"), ("", "aten.add"))


def test_the_backward_belongs_to_the_modules_of_the_forward(tmp_path: Path) -> None:
    found = recorded(tmp_path / "ops", lambda: train(Net()))
    backward = operations(found, "backward")
    assert [each.name for each in backward if each.name != OUTSIDE] == sorted(
        (each.name for each in backward if each.name != OUTSIDE), key=lambda name: name.partition(".")[0], reverse=True
    )
    of_up = {each.tensor for each in backward if each.name == "two.up"}
    assert {"aten.addmm#0/aten.mm#0:output", "aten.addmm#0/aten.mm#1:output", "aten.addmm#0/aten.sum#0:output"} <= of_up
    relu = next(each for each in backward if each.tensor == "aten.relu#0/aten.threshold_backward#0:output")
    assert (relu.name, relu.line) == ("two", "test_operations.py:37")
    loss = backward[0]
    assert loss.name == OUTSIDE and loss.tensor.startswith("aten.mse_loss#0/")


@pytest.mark.parametrize("what", ["ops", "modules,optimizer,collectives,ops"])
def test_recording_changes_no_bit(tmp_path: Path, what: str) -> None:
    plain = train(Net(), steps=2)
    net = Net()
    first = recorded(tmp_path / "one", lambda: train(net, steps=2), what)
    assert all(torch.equal(*each) for each in zip(net.parameters(), plain, strict=True))
    again = recorded(tmp_path / "two", lambda: train(Net(), steps=2), what)
    assert [each.tensor for each in first.entries(0)] == [each.tensor for each in again.entries(0)]
    found = compare(first, again)
    assert found.equal is True and found.identical == found.compared > 100


@pytest.mark.parametrize("kind", ["reentrant", "frames"])
def test_recomputations_are_not_recorded(tmp_path: Path, kind: str) -> None:
    plain = recorded(tmp_path / "plain", lambda: train(Net()))
    again = recorded(tmp_path / kind, lambda: train(Net(checkpoints=kind)))

    def called(recording: Recording, phase: str) -> list[tuple[str, str, str]]:
        found = [(each.name, each.tensor, each.line) for each in operations(recording, phase)]
        return sorted(each for each in found if each[0] != OUTSIDE)

    assert called(plain, "forward") == called(again, "forward")
    assert called(plain, "backward") == called(again, "backward")


def test_the_first_operation_that_differs_is_named(tmp_path: Path) -> None:
    right = recorded(tmp_path / "right", lambda: train(Net()))
    wrong = recorded(tmp_path / "wrong", lambda: train(Net(scale=2.02)))
    found = compare(right, wrong)
    first = found.first
    assert found.equal is False and first is not None
    assert (first.module, first.phase, first.line) == ("two", "forward", "test_operations.py:36")
    assert first.title == "output of aten.mul in two"
    assert "1.01 times" in first.suggests
    said = "The first operation that returns other bits from the same inputs: output of aten.mul in two on rank 0"
    assert any(said in note for note in found.notes)
    assert "aten.mul in two" in found.text() and "aten.mul in two" in found.html()


class WrongBackward(torch.autograd.Function):
    """A product by two whose gradient is wrong."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * FACTOR["backward"]


FACTOR = {"backward": 2.0}


class Custom(nn.Module):
    """A layer with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WrongBackward.apply(self.inner(x))


def test_a_wrong_backward_is_named_with_the_line_of_its_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = recorded(tmp_path / "right", lambda: train(Custom()))
    monkeypatch.setitem(FACTOR, "backward", 3.0)
    wrong = recorded(tmp_path / "wrong", lambda: train(Custom()))
    first = compare(right, wrong).first
    assert first is not None
    assert (first.module, first.phase) == ("", "backward")
    assert first.title == "output of aten.mul in the backward of aten.mul in the model"
    assert first.line.startswith("test_operations.py:")
    assert "1.5 times" in first.suggests


class Cut(nn.Module):
    """A layer of which a part of the rows is used."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.rows = nn.Linear(8, 8), rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[: self.rows]).sum(0).expand(6, 8)


def test_another_shape_is_named(tmp_path: Path) -> None:
    right = recorded(tmp_path / "right", lambda: train(Cut(6)))
    wrong = recorded(tmp_path / "wrong", lambda: train(Cut(4)))
    first = compare(right, wrong).first
    assert first is not None and first.title == "output of aten.slice in the model"
    assert first.suggests == "its shape is [4, 8], and [6, 8] in the reference"


class Masked(nn.Module):
    """A mask of elements that rounding moves across its bound."""

    def __init__(self, moved: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.moved = nn.Linear(8, 8), moved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.moved
        self.above = (y > self.inner(x)).sum()
        return y


def test_integers_that_rounding_changes_are_no_difference(tmp_path: Path) -> None:
    right = recorded(tmp_path / "right", lambda: train(Masked(1.0)))
    other = recorded(tmp_path / "other", lambda: train(Masked(1.0 + 2**-23)))
    found = compare(right, other)
    assert found.equal is True and not found.differences
    assert "they are integers that rounding of floating-point numbers may change" in " ".join(found.left_out)


def test_compiled_modules_are_recorded_at_their_edges(tmp_path: Path) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func

        graphs.append(graph)
        return aot_autograd(fw_compiler=lambda inner, _: make_boxed_func(inner.forward))(graph, inputs)

    net = Net()
    net.one = torch.compile(net.one, backend=backend)  # pyright: ignore[reportAttributeAccessIssue]  # of modules, too
    found = recorded(tmp_path / "ops", lambda: train(net))
    assert graphs
    entries = found.entries(0)
    assert {each.kind for each in entries if each.name == "one"} == {"input", "output", "grad_input", "grad_output"}
    assert not [each for each in entries if each.kind == "operation" and each.name.startswith("one")]
    assert not [each for each in entries if each.kind == "output" and each.name != "one"]
    called = [each.tensor.partition("#")[0] for each in operations(found, "forward") if each.name.startswith("two")]
    assert [name for name in called if name != "aten.t"] == [name for _, name in PARTS]


def data_parallel(rank: int, folder: Path) -> None:
    rows = slice(3 * rank, 3 * rank + 3)
    model = nn.parallel.DistributedDataParallel(Net())
    with record("ranks", folder=folder, what=("modules", "optimizer", "ops"), steps=2):
        train(model, 2, rows)


def test_ranks_compare_with_ranks_and_not_with_one_process(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run_ranks(data_parallel, 2, tmp_path / name, tmp_path / name / "ranks")
    one, two = (Recording.open(tmp_path / name / "ranks") for name in ("one", "two"))
    assert {each.tensor.partition(".")[0] for each in one.entries() if each.kind == "operation"} == {"aten"}
    found = compare(one, two)
    assert found.equal is True and found.identical == found.compared
    alone = recorded(tmp_path / "alone", lambda: train(Net(), 2), "modules,optimizer,ops", steps=2)
    found = compare(alone, one)
    assert found.equal is True, str(found)
    assert "Not compared: operations, because the runs have other ranks or shards." in found.left_out


class Counts(TorchDispatchMode):
    """A mode of the program."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_program_are_left_as_they_are(tmp_path: Path) -> None:
    with Counts() as outside:
        found = recorded(tmp_path / "outside", lambda: train(Net()))
    assert outside.count > len(operations(found, "forward")) + len(operations(found, "backward")) > 50
    net = Net()
    inner = net.one.forward

    def counted(x: torch.Tensor) -> torch.Tensor:
        with inside:
            return inner(x)

    inside = Counts()
    net.one.forward = counted
    found = recorded(tmp_path / "inside", lambda: train(net))
    assert inside.count and operations(found, "backward")


def test_a_recording_that_another_thread_stops_leaves_with_the_next_module(tmp_path: Path) -> None:
    net = Net()
    recorder = record("stopped", folder=tmp_path / "stopped", what="ops")
    loss = net(torch.ones(2, 8)).sum()
    thread = threading.Thread(target=recorder.stop)
    thread.start()
    thread.join()
    assert recorder.reason == "stopped"
    written = len(Recording.open(tmp_path / "stopped").entries())
    loss.backward()
    assert len(Recording.open(tmp_path / "stopped").entries()) == written > 10
    assert torch._C._len_torch_dispatch_stack() == 1
    net(torch.ones(2, 8))
    assert torch._C._len_torch_dispatch_stack() == 0
