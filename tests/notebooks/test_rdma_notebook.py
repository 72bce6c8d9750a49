"""The data plane's notebook: a parameter server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture


@pytest.fixture(scope="module")
def rdma(run: Callable[[Path], Run]) -> Run:  # noqa: F811
    """The notebook, run."""
    needs("torch")
    return run(ROOT / "notebooks" / "03_rdma.ipynb")


@pytest.mark.torch
def test_the_training_converges(rdma: Run) -> None:
    assert rdma.status == 0, rdma.printed
    losses = re.search(r"^loss +([\d.]+) -> ([\d.]+)$", rdma.printed, re.M)
    assert losses is not None, rdma.printed
    assert float(losses[2]) < 0.1 < float(losses[1])
    accuracy = re.search(r"^accuracy +([\d.]+)% ", rdma.printed, re.M)
    assert accuracy is not None and float(accuracy[1]) > 97
    assert rdma.text("train").startswith("300 steps of 2 workers")
    assert rdma.text("batch").startswith("steps: 300")


@pytest.mark.torch
def test_rates_are_shown_beside_those_of_messages(rdma: Run) -> None:
    rates = dict(re.findall(r"^(\S.*\S) +([\d.]+) GB/s$", rdma.printed, re.M))
    assert rates.keys() == {"read_into", "result of a call", "write_from", "argument of a call", "memcpy"}
    assert all(float(rate) > 0 for rate in rates.values())


@pytest.mark.torch
def test_errors_are_clear(rdma: Run) -> None:
    assert rdma.error("overlap") == "ValueError"
    assert "overlap, and at least one of them is written" in rdma.text("overlap")
    assert "the buffer was dropped" in rdma.text("drop")
    assert "cma" in rdma.text("server")
