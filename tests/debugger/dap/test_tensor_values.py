"""Tensors in the tree of variables of a front end's debugger, over a real kernel and a real rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import needs
from tests.debugger.dap.test_front_end import FrontEnd, stopped
from tests.kernel import harness
from tests.kernel.harness import Kernel, stop_kernel

needs("torch")
pytestmark = pytest.mark.torch

CELL = """%%mesh
import numpy as np, torch
def look():
    loss = torch.tensor(0.5)
    ids = torch.arange(6).view(2, 3)
    weights = torch.nn.Parameter(torch.linspace(-1, 3, 200).view(50, 4))
    broken = torch.tensor([1.0, float('nan'), float('inf')] * 10)
    half = torch.full((20,), 0.25, dtype=torch.bfloat16)
    large = torch.arange(3.0).repeat(100_000, 1)
    elsewhere = torch.empty(3, 4, device='meta')
    table = np.arange(12.0).reshape(3, 4)
    gone = torch.ones(1000)
    gone.untyped_storage().resize_(0)
    return loss
look()"""
SHOWN = {
    "loss": "tensor(0.5, shape=(), dtype=torch.float32, device='cpu')",
    "ids": "tensor([[0, 1, 2], [3, 4, 5]], shape=(2, 3), dtype=torch.int64, device='cpu')",
    "weights": "Parameter(shape=(50, 4), dtype=torch.float32, device='cpu', min=-1.0, max=3.0, mean=1.0)",
    "broken": "tensor(shape=(30,), dtype=torch.float32, device='cpu', min=1.0, max=1.0, mean=1.0, 10 NaN, 10 infinite)",
    "half": "tensor(shape=(20,), dtype=torch.bfloat16, device='cpu', min=0.25, max=0.25, mean=0.25)",
    "large": "tensor(shape=(100000, 3), dtype=torch.float32, device='cpu', first=[0.0, 1.0, 2.0, ...])",
    "elsewhere": "tensor(shape=(3, 4), dtype=torch.float32, device='meta')",
    "table": "array(shape=(3, 4), dtype=float64, min=0.0, max=11.0, mean=5.5)",
    "gone": "tensor(shape=(1000,), dtype=torch.float32, device='cpu')",
}


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel with one rank for each client, forked from a process that has loaded torch."""
    started = harness.start_kernel()
    try:
        yield started
    finally:
        stop_kernel(started)


@pytest.mark.parametrize("client", ["jupyterlab", "vscode"])
def test_tensors_say_what_they_hold_and_open_into_rows(kernel: Kernel, client: str) -> None:
    kernel.ok("%mesh up --procs 1 --preload torch")
    try:
        front = FrontEnd(kernel, client)
        front.break_at(CELL, 14)
        cell = kernel.send(CELL)
        (thread,) = stopped(cell, 1)
        scope = front.ask("scopes", frameId=front.top(thread)["id"])["scopes"][0]
        found: dict[str, Any] = {each["name"]: each for each in children(front, scope)}
        assert {name: each["value"] for name, each in found.items()} == SHOWN
        rows = children(front, found["weights"])[:50]
        assert [row["name"] for row in rows] == [f"[{number}]" for number in range(50)]
        assert rows[0]["value"].startswith("tensor([-1.0, -0.9799, -0.9598, -0.9397], shape=(4,), dtype=torch.float32")
        (last,) = children(front, found["weights"], filter="indexed", start=49, count=1)
        assert [each["value"].partition(",")[0] for each in children(front, last)[2:4]] == ["tensor(2.98", "tensor(3.0"]
        assert {each["name"] for each in children(front, found["weights"], filter="named")} >= {
            "shape",
            "requires_grad",
        }
        assert (
            children(front, found["elsewhere"])[2]["value"] == "tensor(shape=(4,), dtype=torch.float32, device='meta')"
        )
        front.ask("continue", threadId=thread)
        cell.ok()
        front.off()
        assert kernel.ok("import sys; 'torch' in sys.modules").text == "False"
    finally:
        kernel.ok("%mesh down --force")


def children(front: FrontEnd, of: dict[str, Any], **part: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = front.ask("variables", variablesReference=of["variablesReference"], **part)[
        "variables"
    ]
    return found
