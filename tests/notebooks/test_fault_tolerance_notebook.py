"""The notebook on fault tolerance: training that goes on when ranks die."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture


@pytest.fixture(scope="module")
def trained(run: Callable[[Path], Run]) -> Run:  # noqa: F811
    """The notebook, run."""
    for needed in ("torch", "sklearn", "matplotlib"):
        pytest.importorskip(needed)
    return run(ROOT / "notebooks" / "04_fault_tolerance.ipynb")


@pytest.mark.torch
@pytest.mark.slow
def test_training_reaches_its_end_in_spite_of_all(trained: Run) -> None:
    assert trained.status == 0, trained.printed
    found = re.search(r"^steps +(\d+), loss ([\d.]+) -> ([\d.]+)$", trained.printed, re.M)
    assert found is not None, trained.printed
    assert int(found[1]) == 200
    assert float(found[3]) < 0.5 < float(found[2])
    assert re.search(r"^accuracy +9[\d.]+%, the same network on every rank$", trained.printed, re.M)


@pytest.mark.torch
@pytest.mark.slow
def test_each_failure_is_told_and_recovered_from(trained: Run) -> None:
    rows = re.findall(r"^(SIG\w+) of ([\d,]+) +at step \d+: ([\d.]+) s \(noticed \d+ ms", trained.printed, re.M)
    assert [row[:2] for row in rows] == [("SIGKILL", "3"), ("SIGKILL", "0"), ("SIGKILL", "2,5"), ("SIGSTOP", "6")]
    assert "rank 3 of 8" in trained.text("kill") and "killed by SIGKILL" in trained.text("kill")
    assert "1 healed" in trained.text("group") and "rank 3 (gpus=3)" in trained.text("group")
    assert "no answer within 3 s" in trained.text("stop")
    assert trained.text("stuck") == "stuck: (6,)"
    (image,) = trained.images("plot")
    assert len(image) > 5000
