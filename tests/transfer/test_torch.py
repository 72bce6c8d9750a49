"""Tensors, and scripts written for Monarch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from monarch_kernel.rdma import RDMABuffer
from tests.waiting import patience

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_tensors_of_every_kind() -> None:
    weights = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    buffer = RDMABuffer(weights)
    into = torch.zeros(6, 4, dtype=torch.bfloat16).T
    buffer.read_into(into).get()
    assert torch.equal(into, weights)
    RDMABuffer(weights[:, ::2]).write_from(torch.full((12,), 3, dtype=torch.bfloat16)).get()
    assert weights[:, ::2].eq(3).all() and weights[0, 1] == 1
    parameter = torch.nn.Parameter(torch.zeros(3))
    RDMABuffer(parameter).write_from(torch.ones(3)).get()
    assert parameter.detach().eq(1).all()
    counter = torch.zeros(2, dtype=torch.int64)
    assert RDMABuffer(counter).fetch_add(-1, offset=8).get() == 0
    assert counter.tolist() == [0, -1]


def test_tensors_that_are_not_plain_memory() -> None:
    with pytest.raises(ValueError, match="on meta: only memory of the CPU and of CUDA"):
        RDMABuffer(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="dense"):
        RDMABuffer(torch.zeros(3, 3).to_sparse())
    with pytest.raises(ValueError, match="resolve_conj"):
        RDMABuffer(torch.zeros(3, dtype=torch.complex64).conj())
    with pytest.raises(ValueError, match="empty"):
        RDMABuffer(torch.zeros(0))
    with pytest.raises(ValueError, match="share memory"):
        RDMABuffer(torch.zeros(3, 1)).read_into(torch.zeros(1).expand(3))


def test_a_script_written_for_monarch_runs_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio
        import monarch_kernel
        monarch_kernel.enable_monarch_imports()

        import torch
        from monarch.actor import Actor, endpoint, this_host
        from monarch.rdma import RDMAAction, RDMABuffer, get_rdma_backend, is_rdma_available


        class ParameterServer(Actor):
            def __init__(self):
                self.params = torch.rand(10, 10)
                self.grads = torch.zeros(10, 10)

            @endpoint
            async def handles(self):
                as_bytes = lambda t: RDMABuffer(t.view(torch.uint8).flatten())
                return as_bytes(self.params), as_bytes(self.grads)

            @endpoint
            async def step(self):
                self.params -= self.grads
                return self.params.clone()


        class Worker(Actor):
            @endpoint
            async def train(self, params, grads):
                self.weights = torch.zeros(10, 10)
                await params.read_into(self.weights.view(torch.uint8).flatten())
                gradient = self.weights / 2
                await grads.write_from(gradient.view(torch.uint8).flatten())
                again = torch.zeros(400, dtype=torch.uint8)
                await RDMAAction().read_remote(again, params).submit(timeout=30)
                assert torch.equal(again.view(torch.float32).view(10, 10), self.weights)


        async def main():
            assert is_rdma_available() and get_rdma_backend() != "none"
            server = this_host().spawn_procs(per_host={"gpus": 1}).spawn("server", ParameterServer)
            worker = this_host().spawn_procs(per_host={"gpus": 1}).spawn("worker", Worker)
            params, grads = await server.handles.call_one()
            assert params.size() == 400
            before = torch.zeros(10, 10)
            await params.read_into(before.view(torch.uint8).flatten(), timeout=60)
            await worker.train.call_one(params, grads)
            after = await server.step.call_one()
            assert torch.allclose(after, before / 2)
            await params.drop()
            print("converged")


        asyncio.run(main())
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=patience(120))
    assert (done.stdout, done.stderr, done.returncode) == ("converged\n", "", 0)
