"""References: a recorded step of a job, run again in one process with the job's weights, batch and generators."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from monarch_kernel.numerics.recording import Recording, record
from monarch_kernel.numerics.reference import Builder, ReferenceRunError, compare_with_reference
from tests.numerics.ranks import run_ranks

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
'''


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


def test_one_process_is_its_own_reference_in_every_bit(program: Path, tmp_path: Path) -> None:
    train(0, program, tmp_path / "job", 1, "")
    found = compare_with_reference(Recording.open(tmp_path / "job"), f"{program}:build_model")
    assert found.equal is True
    assert found.identical == found.compared > 30
    assert not list(tmp_path.glob("job.reference*/*.pkl"))


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
