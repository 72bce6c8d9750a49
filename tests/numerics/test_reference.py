"""References: a recorded step of a job, run again in one process with the job's weights, batch and generators."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from monarch_kernel import programs
from monarch_kernel.numerics.recording import Recording, record
from monarch_kernel.numerics.reference import Builder, ReferenceRunError, compare_with_reference
from tests.numerics.ranks import run_module, run_ranks

TRAIN = '''
"""A training program."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens, scale=None):
        x = self.embed(tokens)
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(x if scale is None else x * scale)


def build_model():
    print("building")
    return Net()


def build_other():
    net = Net()
    net.extra = nn.Linear(2, 2)
    return net


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def build_nothing(model):
    return model


class OwnAdam(torch.optim.AdamW):
    pass


def build_random():
    net = Net()
    right = net.head.forward
    net.head.forward = lambda x: right(x) + torch.rand(32) * next(NOISE)
    return net


NOISE = iter([0.0, 1e-3, 0.0, 0.0])


class Stage(nn.Module):
    """A stage of a pipeline; by default, the whole model."""

    def __init__(self, stage=0, of=1):
        super().__init__()
        self.embed = nn.Embedding(32, 16) if stage == 0 else None
        layers = {str(at): nn.Linear(16, 16) for at in range(4)}
        self.layers = nn.ModuleDict({at: layer for at, layer in layers.items() if int(at) * of // 4 == stage})
        self.head = nn.Linear(16, 32) if stage == of - 1 else None

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = x + layer(x).relu()
        return x if self.head is None else self.head(x)


def build_stages():
    return Stage()
'''

#: Of a test whose references are started as users do.
started = pytest.mark.parametrize("forked", [False], indirect=True, ids=["started"])


@pytest.fixture(autouse=True)
def forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """References are forked from this process, as loading torch takes most of their time; unless a test says False."""
    if getattr(request, "param", True):
        monkeypatch.setattr(programs, "run", run_module)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A training program."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def load(path: Path) -> Any:
    """Import the program."""
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module
    spec.loader.exec_module(module)
    return module


def train(rank: int, path: Path, folder: Path, ranks: int, bug: str, full: bool = True) -> None:
    """Train data-parallel for two steps, and record them."""
    torch.manual_seed(0)
    net = model = load(path).Net()
    if ranks > 1 and bug != "unreduced":
        model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(32, (8, 5), generator=torch.Generator().manual_seed(3))
    mine, targets = tokens[:, :-1].chunk(ranks)[rank], tokens[:, 1:].chunk(ranks)[rank]
    with record(folder.name, model, optimizer, steps=2, folder=folder, full=full):
        for _ in range(2):
            optimizer.zero_grad()
            outputs = model(mine, scale=torch.full((16,), 0.5))
            F.cross_entropy(outputs.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()


def train_on(rank: int, path: Path, folder: Path, ranks: int, bug: str) -> None:
    """Train data-parallel for three steps, and record the third, whose optimizer has a state."""
    torch.manual_seed(0)
    module = load(path)
    net = model = module.Net()
    if ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(net)
    kind = {"own class": module.OwnAdam, "momentum": torch.optim.SGD}.get(bug, torch.optim.AdamW)
    momentum: dict[str, Any] = {"momentum": 0.9} if bug == "momentum" else {}
    held = [each for name, each in net.named_parameters() if bug != "forgotten" or name != "head.bias"]
    groups = [{"params": held[:3], "lr": 0.01}, {"params": held[3:], "lr": 0.01, "weight_decay": 0.1}]
    optimizer = kind(groups, **momentum)
    if bug == "decay":
        optimizer.register_step_post_hook(lambda *_: net.head.weight.data.mul_(0.99))
    tokens = torch.randint(32, (8, 5), generator=torch.Generator().manual_seed(3))
    mine, targets = tokens[:, :-1].chunk(ranks)[rank], tokens[:, 1:].chunk(ranks)[rank]

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(mine).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 100.0)
        optimizer.step()

    step()
    step()
    if bug == "rate" and rank == 1:
        optimizer.param_groups[0]["lr"] = 0.02
    with record(folder.name, model, optimizer, steps=1, folder=folder, full=True):
        step()


@pytest.mark.parametrize(
    ("bug", "ranks", "wrong", "module"),
    [("", 1, (), ""), ("momentum", 2, (), ""), ("rate", 2, (1,), "embed"), ("decay", 2, (0, 1), "head")],
)
def test_the_update_of_a_reference_has_the_jobs_optimizer(
    program: Path, tmp_path: Path, bug: str, ranks: int, wrong: tuple[int, ...], module: str
) -> None:
    folder = tmp_path / "job"
    run_ranks(train_on, ranks, tmp_path, program, folder, ranks, bug)
    job = Recording.open(folder)
    found = compare_with_reference(job, f"{program}:build_model")
    updates = {entry.name for entry in job.entries() if entry.kind == "update"}
    assert len(updates) == 9 and not [note for note in found.notes if "Not compared" in note]
    if not wrong:
        assert found.equal is True, str(found)
        return
    first = found.first
    assert found.equal is False and first is not None, str(found)
    assert (first.phase, first.kind, first.module, first.ranks) == ("optimizer", "update", module, wrong)
    if bug == "rate":
        assert "For embed.weight, the optimizer has lr=0.02 on rank 1, and 0.01 on rank 0" in " ".join(found.notes)


def test_an_optimizer_of_the_programs_own_is_made_by_its_function(program: Path, tmp_path: Path) -> None:
    train_on(0, program, tmp_path / "own", 1, "own class")
    own = Recording.open(tmp_path / "own")
    found = compare_with_reference(own, f"{program}:build_model")
    assert found.equal is True
    said = "Not compared: updates, because the optimizer train.OwnAdam cannot be built again"
    assert any(note.startswith(said) for note in found.notes)
    train_on(0, program, tmp_path / "momentum", 1, "momentum")
    found = compare_with_reference(
        Recording.open(tmp_path / "momentum"), f"{program}:build_model", f"{program}:build_optimizer"
    )
    first = found.first
    assert first is not None and (first.phase, first.kind) == ("optimizer", "update"), str(found)
    with pytest.raises(ReferenceRunError, match=r"build_nothing\(\) returned Net, not an optimizer"):
        compare_with_reference(own, f"{program}:build_model", f"{program}:build_nothing")


def test_a_parameter_without_optimizer_has_no_update_in_the_reference_either(program: Path, tmp_path: Path) -> None:
    train_on(0, program, tmp_path / "job", 1, "forgotten")
    found = compare_with_reference(Recording.open(tmp_path / "job"), f"{program}:build_model")
    assert found.equal is True, str(found)


@pytest.mark.parametrize(
    ("bug", "phase", "module", "guess"),
    [
        ("", "", "", ""),
        ("unreduced", "reduction", "embed", "the mean over ranks 0-1 is the reference's"),
    ],
)
def test_a_data_parallel_job_compares_with_one_process(
    program: Path, tmp_path: Path, bug: str, phase: str, module: str, guess: str
) -> None:
    folder = tmp_path / "job"
    run_ranks(train, 2, tmp_path, program, folder, 2, bug)
    found = compare_with_reference(Recording.open(folder), f"{program}:build_model")
    assert not found.is_estimate
    if not bug:
        assert found.equal is True, str(found)
        assert found.compared > 30 and found.identical < found.compared
        return
    first = found.first
    assert found.equal is False and first is not None, str(found)
    assert (first.step, first.phase, first.module) == (0, phase, module)
    assert guess in first.suggests
    assert "run again" not in str(found)


def train_in_two_dimensions(rank: int, path: Path, folders: dict[str, Path]) -> None:
    """Train with tensor parallelism of 2 under data parallelism of 2, by hand, and record a step in each folder.

    In the module that is named, one rank of each pair of tensor parallelism is wrong.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    embed = RowwiseParallel(input_layouts=Replicate())
    tokens = torch.randint(32, (8, 5), generator=torch.Generator().manual_seed(3))
    mine, targets = tokens[:, :-1].chunk(2)[rank // 2], tokens[:, 1:].chunk(2)[rank // 2]
    for wrong, folder in folders.items():
        torch.manual_seed(0)
        net = load(path).Net()
        parallelize_module(net, mesh["tensor"], {"embed": embed, "up": ColwiseParallel(), "down": RowwiseParallel()})
        if wrong and rank % 2:
            module = net.get_submodule(wrong)
            module.forward = partial(scaled, module.forward)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
        with record(folder.name, net, optimizer, steps=1, folder=folder, full=True):
            F.cross_entropy(net(mine).flatten(0, 1), targets.flatten()).backward()
            for each in net.parameters():
                assert each.grad is not None
                gradient = each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
                dist.all_reduce(gradient, group=mesh["data"].get_group())
                gradient /= 2
            optimizer.step()


def scaled(forward: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """Return what a module returns, but not quite."""
    return forward(given) * 1.05


def test_a_wrong_rank_of_tensor_parallelism_under_data_parallelism_is_named_where_it_is_wrong(
    program: Path, tmp_path: Path
) -> None:
    importlib.import_module("torch.distributed.tensor.parallel")  # once, before ranks are forked
    folders = {wrong: tmp_path / f"job{wrong}" for wrong in ("", "up", "down")}
    run_ranks(train_in_two_dimensions, 4, tmp_path, program, folders)
    right, up, down = (
        compare_with_reference(Recording.open(folder), f"{program}:build_model") for folder in folders.values()
    )
    assert right.equal is True, str(right)
    assert right.unaligned == 1 and "masked only while they are summed: output of embed." in str(right)
    assert up.first is not None and down.first is not None
    assert (up.first.phase, up.first.module, up.first.tensor) == ("forward", "up", "output"), str(up)
    assert up.first.ranks == (1, 3)  # which have the columns that are wrong
    assert (down.first.phase, down.first.module, down.first.tensor) == ("forward", "down", "output"), str(down)
    assert up.equal is down.equal is False


@started
def test_one_process_is_its_own_reference_in_every_bit(program: Path, tmp_path: Path) -> None:
    train(0, program, tmp_path / "job", 1, "")
    found = compare_with_reference(Recording.open(tmp_path / "job"), f"{program}:build_model")
    assert found.equal is True
    assert found.identical == found.compared > 30
    assert not list(tmp_path.glob("job.reference*/*.pkl"))


@started
def test_a_model_that_is_not_the_jobs_is_refused_with_names(program: Path, tmp_path: Path) -> None:
    train(0, program, tmp_path / "job", 1, "")
    job = Recording.open(tmp_path / "job")
    with pytest.raises(ReferenceRunError, match=r"only the reference has extra\.bias, extra\.weight"):
        compare_with_reference(job, f"{program}:build_other")
    with pytest.raises(ValueError, match="FILE:FUNCTION"):
        Builder.of("train")


def test_a_recording_of_summaries_is_refused(program: Path, tmp_path: Path) -> None:
    train(0, program, tmp_path / "job", 1, "", full=False)
    with pytest.raises(ReferenceRunError, match="full=True"):
        compare_with_reference(Recording.open(tmp_path / "job"), f"{program}:build_model")


def test_a_reference_that_differs_when_run_again_is_said(program: Path, tmp_path: Path) -> None:
    train(0, program, tmp_path / "job", 1, "")
    found = compare_with_reference(Recording.open(tmp_path / "job"), f"{program}:build_random")
    assert "differs when it is run again, first in output of head" in str(found)
    assert "use_deterministic_algorithms" in str(found)


# -- pipelines ---------------------------------------------------------------------------------------

MICRO_BATCHES = 4


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of a micro-batch."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def train_stages(rank: int, path: Path, folder: Path, schedule: str, bug: str) -> None:
    """Train two stages for a step; with four ranks, two replicas of each, which average their gradients by hand."""
    size = dist.get_world_size()
    stage, replica, replicas = rank % 2, rank // 2, size // 2
    pipes: list[Any] = [dist.new_group([2 * each, 2 * each + 1]) for each in range(replicas)]
    copies = [dist.new_group(list(range(each, size, 2))) for each in range(2)]
    torch.manual_seed(stage)
    net = load(path).Stage(stage, 2)
    if bug == "layer" and stage == 1:
        right = net.layers["3"].forward
        net.layers["3"].forward = lambda x: right(x) * 1.01
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    tokens = torch.randint(32, (16, 5), generator=torch.Generator().manual_seed(3)).chunk(replicas)[replica]
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    with record(folder.name, net, optimizer, steps=1, folder=folder, full=True):
        if schedule == "hand":
            _by_hand(net, stage, inputs, targets)
        else:
            from torch.distributed import pipelining

            made = pipelining.PipelineStage(net, stage, 2, torch.device("cpu"), group=pipes[replica])
            plan = getattr(pipelining, schedule)(made, MICRO_BATCHES, loss_fn=loss_of)
            plan.step(*((inputs,) if stage == 0 else ()), **({} if stage == 0 else {"target": targets, "losses": []}))
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            if replicas > 1 and not (bug == "unreduced" and name == "layers.2.weight"):
                dist.all_reduce(parameter.grad, group=copies[stage])
                parameter.grad /= replicas
        optimizer.step()


def _by_hand(net: torch.nn.Module, stage: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """One micro-batch after the other, with losses that are divided by their number."""
    for part, target in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
        if stage == 0:
            outputs = net(part)
            dist.send(outputs.detach(), 1)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, 1)
            outputs.backward(gradient)
        else:
            received = torch.empty(*part.shape, 16, requires_grad=True)
            dist.recv(received.data, 0)
            (loss_of(net(received), target) / MICRO_BATCHES).backward()
            assert received.grad is not None
            dist.send(received.grad, 0)


@pytest.mark.parametrize(
    ("ranks", "schedule", "bug", "found"),
    [
        (2, "Schedule1F1B", "", None),
        (2, "ScheduleGPipe", "layer", ("forward", "layers.3")),
        (2, "hand", "", None),
        (2, "hand", "layer", ("forward", "layers.3")),
        (4, "Schedule1F1B", "", None),
        (4, "Schedule1F1B", "unreduced", ("reduction", "layers.2")),
    ],
)
def test_a_pipeline_compares_with_one_process(
    program: Path, tmp_path: Path, ranks: int, schedule: str, bug: str, found: tuple[str, str] | None
) -> None:
    run_ranks(train_stages, ranks, tmp_path, program, tmp_path / "job", schedule, bug)
    comparison = compare_with_reference(Recording.open(tmp_path / "job"), f"{program}:build_stages")
    assert not comparison.is_estimate
    if found is None:
        assert comparison.equal is True, str(comparison)
        # Inputs, outputs and gradients of all layers in all micro-batches, and parameters.
        assert comparison.compared > MICRO_BATCHES * 6 * 3, str(comparison)
        assert schedule == "hand" or not comparison.left_out, str(comparison)
        return
    first = comparison.first
    assert comparison.equal is False and first is not None, str(comparison)
    assert (first.phase, first.module) == found, str(comparison)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_the_job_clips_are_clipped_in_the_reference(program: Path, tmp_path: Path, ranks: int) -> None:
    def clipped(rank: int, path: Path, folder: Path) -> None:
        torch.manual_seed(0)
        net = model = load(path).Net()
        if ranks > 1:
            model = torch.nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tokens = torch.randint(32, (8, 5), generator=torch.Generator().manual_seed(3)).chunk(ranks)[rank]
        with record(folder.name, model, optimizer, steps=1, folder=folder, full=True):
            loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.07)
            optimizer.step()

    if ranks > 1:
        run_ranks(clipped, ranks, tmp_path, program, tmp_path / "job")
    else:
        clipped(0, program, tmp_path / "job")
    found = compare_with_reference(Recording.open(tmp_path / "job"), f"{program}:build_model")
    assert found.equal is True, str(found)
    assert "The job multiplies all gradients by 0." in str(found)


@pytest.mark.parametrize(
    ("share", "sums", "phase", "guess"),
    [
        (True, True, "", ""),
        (False, True, "reduction", "2 times that of the reference: summed instead of averaged"),
        (True, False, "backward", "1/2 times that of the reference: averaged instead of summed, or divided once too"),
    ],
)
def test_whether_gradients_must_be_summed_or_averaged_follows_from_the_loss(
    program: Path, tmp_path: Path, share: bool, sums: bool, phase: str, guess: str
) -> None:
    """A loss that is divided by all tokens is a share; one that is the mean over a rank's part must be averaged."""

    def summed(rank: int, path: Path, folder: Path) -> None:
        torch.manual_seed(0)
        net = load(path).Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        tokens = torch.randint(32, (8, 5), generator=torch.Generator().manual_seed(3)).chunk(2)[rank]
        with record(folder.name, net, optimizer, steps=1, folder=folder, full=True):
            loss = loss_of(net(tokens[:, :-1]), tokens[:, 1:])
            (loss / 2 if share else loss).backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= 1 if sums else 2
            optimizer.step()

    run_ranks(summed, 2, tmp_path, program, tmp_path / "job")
    found = compare_with_reference(Recording.open(tmp_path / "job"), f"{program}:build_model")
    if not phase:
        assert found.equal is True, str(found)
        return
    first = found.first
    assert found.equal is False and first is not None
    assert first.phase == phase, str(found)
    assert guess in first.suggests
