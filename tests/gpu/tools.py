"""The notebook's tools on ranks that use a GPU."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.engines.test_tools import shown, until
from tests.gpu import check, device, has_gpu
from tests.kernel.harness import Kernel, start_kernel, stop_kernel


@contextmanager
def notebook() -> Generator[Kernel]:
    """A kernel of this checkout, with folders of its own."""
    from monarch_kernel.kernel.install import install

    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        root = Path(folder)
        install(prefix=str(root / "prefix"))
        os.environ.update(
            JUPYTER_PATH=str(root / "prefix" / "share" / "jupyter"),
            JUPYTER_PREFER_ENV_PATH="0",
            JUPYTER_RUNTIME_DIR=str(root / "runtime"),
            JUPYTER_DATA_DIR=str(root / "data"),
            JUPYTER_CONFIG_DIR=str(root / "config"),
            IPYTHONDIR=str(root / "ipython"),
            PYDEVD_DISABLE_FILE_VALIDATION="1",
        )
        kernel = start_kernel()
        try:
            yield kernel
        finally:
            stop_kernel(kernel)


#: Rank 1 comes to no end, in code that no signal interrupts.
STUCK = """%%mesh -a
import torch, torch.distributed as dist
def load():
    if {gpu}:
        torch.cuda._sleep(200_000_000_000)
        torch.cuda.synchronize()
    else:
        import ctypes
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
if rank == 1:
    load()
dist.all_reduce(torch.ones(4))"""


@check(deadline=90, cpu=True)
def rank_that_waits_for_the_card() -> str:
    """A rank in a kernel that does not end is named with its line by stacks and hang; it is killed and healed."""
    with notebook() as kernel:
        kernel.ok("%mesh up --procs 2 --dist gloo --preload torch")
        kernel.ok(STUCK.format(gpu=has_gpu()))
        line = "in load  torch.cuda.synchronize()" if has_gpu() else "pthread_mutex_lock(mutex)"
        until(kernel, "%mesh stacks", re.escape(line))
        hang = until(kernel, "%mesh hang", r"[Rr]ank 1 ")
        assert "all_reduce" in hang and "load" in hang, hang
        native = until(kernel, "%mesh stacks -r 1 --native", r"native: ")
        assert ("libcuda" in native) == has_gpu(), native
        interrupted = shown(kernel.run("%mesh interrupt"))
        after = shown(kernel.run("%mesh status"))
        assert line in until(kernel, "%mesh stacks", r"\[1\](.*\n)+.*in load "), "rank 1 is still there"
        kernel.ok("%mesh kill -r 1")
        until(kernel, "%mesh status", r"dead|killed|SIGKILL")
        kernel.ok("%mesh heal")
        out = kernel.ok(f"%%mesh\nimport torch\nfloat(torch.ones(3, device={device()!r}).sum())")
        assert "3.0" in shown(out), shown(out)
    return f"interrupt: {interrupted!r}, {after!r}"


@check(deadline=60, cpu=True)
def tensors_in_cells() -> str:
    """Cells with tensors of a card: values, diff by rank, NaN, the debugger at a breakpoint, and status."""
    with notebook() as kernel:
        kernel.ok("%mesh up --procs 2 --preload torch")
        value = kernel.ok(f"%%mesh\nimport torch\nx = torch.arange(6.0, device={device()!r}).view(2, 3)\nx.sum(1)")
        assert f"tensor([ 3., 12.]{', device=' + repr('cuda:0') if has_gpu() else ''})" in shown(value), shown(value)
        kernel.ok("%%mesh -r 1\nx[1, 2] = float('nan')")
        diff = shown(kernel.ok("%mesh diff x"))
        assert "float32 [2, 3]" in diff and "[1]" in diff and "nan" in diff and (", cuda" in diff) == has_gpu(), diff
        kernel.ok("%mesh pull x")
        pulled = shown(kernel.ok("[(each.device.type, int(each.isnan().sum())) for each in x.values()]")).strip()
        assert pulled == f"[('{device()}', 0), ('{device()}', 1)]", pulled
        kernel.send("%%mesh -a\ntotal = x.sum()\nbreakpoint()\ntotal = total + 1").ok()
        until(kernel, "%mesh debug list", r"0-1")
        printed = shown(kernel.ok("%mesh debug print float(total)"))
        assert "15." in printed and "nan" in printed, printed
        kernel.ok("%mesh debug continue")
        status = shown(kernel.ok("%mesh status"))
        if has_gpu():
            assert re.search(r" gpu\n(.* 0: \d+ MB, \d+ %\n){2}", status), status
            assert re.search(r"ranks 0-1 share GPU 0 of ", status), status
    return status.strip().split("\n")[-1]


@check()
def nccl_refused_on_a_shared_card() -> str:
    """`--dist nccl` for two ranks on one card is refused with their numbers; for one rank it works."""
    with notebook() as kernel:
        out = kernel.run("%mesh up --procs 2 --dist nccl")
        said = shown(out) + out.evalue
        assert "ranks 0, 1 use the same GPU" in said and "--dist gloo" in said, said
        kernel.run("%mesh down --force")
        kernel.ok("%mesh up one --procs 1 --dist nccl")
        out = kernel.ok(
            "%%mesh\nimport torch, torch.distributed as dist\n"
            "x = torch.ones(3, device='cuda')\ndist.all_reduce(x)\nfloat(x.sum())"
        )
        assert "3.0" in shown(out), shown(out)
    return ""
