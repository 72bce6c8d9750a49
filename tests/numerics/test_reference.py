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
