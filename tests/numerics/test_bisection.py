"""Bisections: the first commit of a repository whose recorded step differs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from monarch_kernel.numerics.bisection import BisectionError, bisect
from monarch_kernel.numerics.recording import Recording, record

MODEL = """
import torch
from torch import nn

from parts import scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(scale(self.up(x)).relu())


def build_model():
    return Net()
"""


def git(folder: Path, *words: str) -> str:
    """Run git as a fixed user."""
    names = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *names, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder: Path, subject: str, scale: str) -> str:
    """Commit another version of a part of the model."""
    (folder / "code" / "parts.py").write_text(f"# {subject}\ndef scale(x):\n    return {scale}\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", subject)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], Recording]:
    """A repository with an error in its history, its commits by subject, and a recording of the wrong run."""
    folder = tmp_path_factory.mktemp("project")
    git(folder, "init", "-q")
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text(MODEL)
    commits = {
        subject: commit(folder, subject, scale)
        for subject, scale in (
            ("begin", "x * 2"),
            ("reorder", "x + x"),
            ("break the build", "x +"),
            ("halve", "x * 1.01 * 2"),
            ("rename", "2 * (1.01 * x)"),
            ("comment", "2 * (x * 1.01)"),
        )
    }
    torch.manual_seed(0)
    up, down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = up, down

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down((2.02 * self.up(x)).relu())

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record("job", net, optimizer, steps=1, folder=folder / "job", full=True):
        F.mse_loss(net(torch.randn(6, 8)), torch.randn(6, 4)).backward()
        optimizer.step()
    return folder, commits, Recording.open(folder / "job")


def test_the_first_commit_that_differs_is_named(job: tuple[Path, dict[str, str], Recording]) -> None:
    folder, commits, recording = job
    (folder / "code" / "parts.py").write_text("the user's own work, which is not touched")
    said: list[str] = []
    found = bisect(recording, "train.py:build_model", good=commits["begin"], project=folder / "code", say=said.append)
    assert found.commit.id == commits["halve"]
    assert [each.id for each in found.others] == [commits["break the build"]]
    first = found.comparison.first
    assert first is not None and (first.phase, first.module, first.tensor) == ("forward", "down", "input 0")
    assert "1.01 times" in first.suggests
    assert len(said) == len(found.trials) + 1
    assert any("break the build: cannot run: " in line and "SyntaxError" in line for line in said)
    for text in (str(found), found._repr_html_()):
        assert "halve" in text and "could not be judged" in text
    assert git(folder, "worktree", "list").count("\n") == 0
    assert (folder / "code" / "parts.py").read_text().startswith("the user's own work")
    git(folder, "checkout", "-q", "--", "code/parts.py")


def test_what_cannot_be_bisected_is_said(job: tuple[Path, dict[str, str], Recording], tmp_path: Path) -> None:
    folder, commits, recording = job
    project = folder / "code"
    with pytest.raises(BisectionError, match="nothing to find"):
        bisect(recording, "train.py:build_model", good=commits["begin"], bad=commits["reorder"], project=project)
    with pytest.raises(BisectionError, match="is not a commit before"):
        bisect(recording, "train.py:build_model", good=commits["rename"], bad=commits["begin"], project=project)
    with pytest.raises(BisectionError, match="there is no commit nothing"):
        bisect(recording, "train.py:build_model", good="nothing", project=project)
    with pytest.raises(BisectionError, match="not a git repository"):
        bisect(recording, "train.py:build_model", good="HEAD", project=tmp_path)
    assert git(folder, "worktree", "list").count("\n") == 0
