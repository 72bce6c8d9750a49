"""The notebook on TorchTitan, in an environment that has it; what needs GPUs or an account says that it is skipped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from bench.environments import EnvironmentFailed, python_above
from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture


@pytest.mark.torch
@pytest.mark.slow
def test_training_goes_on_from_the_checkpoint_with_the_same_losses(run: Callable[..., Run]) -> None:  # noqa: F811
    for needed in ("torch", "matplotlib"):
        pytest.importorskip(needed)
    try:
        python = python_above("titan")
    except EnvironmentFailed as error:
        pytest.skip(str(error))
    trained = run(ROOT / "notebooks" / "11_titan.ipynb", python)
    assert trained.status == 0, trained.printed
    assert "killed by SIGKILL" in trained.text("kill") and "1 healed" in trained.text("kill")
    assert re.search(r"Loading the checkpoint from broken/checkpoint/step-[36]", trained.text("kill"))
    assert re.search(r"^losses +equal$", trained.printed, re.M), trained.text("losses")
    assert re.search(r"^last step +9 of 9$", trained.printed, re.M), trained.text("losses")
    assert trained.images("plot")
    runs = Counter(tuple(line.split()[:2]) for line in trained.text("wandb").splitlines()[:6])
    assert runs == {(training, f"rank_{rank}"): n for training, n in (("whole", 1), ("broken", 2)) for rank in range(2)}
    assert "skipped: `wandb sync" in trained.text("wandb")
    plan = trained.text("plan")
    assert "2 x 16 x 8 = 256 ranks" in plan
    assert "70.6 billion parameters, 551 million on rank 0: 1/128" in plan
    assert trained.text("slurm").startswith("skipped: ")
