"""Jobs that torchrun starts on a GPU, joined by a notebook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.engines.test_tools import shown, until
from tests.gpu import check, has_gpu
from tests.gpu import until as until_true
from tests.gpu.tools import notebook

TRAIN = Path(__file__).parent / "ddp_train.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LINE = TRAIN.read_text().split("\n").index("    optimizer.zero_grad()") + 1


@check(deadline=90, cpu=True)
def torchrun_joined() -> str:
    """A DDP training of torchrun with two ranks on one card: joined, compared, stopped, stepped, left."""
    with tempfile.TemporaryDirectory() as folder, notebook() as kernel:
        gate, log = Path(folder) / "ends", Path(folder) / "log"
        job = subprocess.Popen(
            [sys.executable, *TORCHRUN, "-m", "monarch_kernel.join", str(TRAIN), str(gate)],
            env={**os.environ, "MONARCH_KERNEL_JOIN": "gpujob", "OMP_NUM_THREADS": "1"},
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        try:
            until(kernel, "%mesh jobs", r"gpujob +.*2")
            kernel.ok("%mesh join gpujob")
            trains = "%%mesh\nassert len(losses) > 1"
            until_true(lambda: kernel.run(trains).status == "ok", "it trains", 60)
            place = "cuda:0" if has_gpu() else "cpu"
            assert place in shown(kernel.ok("%%mesh\nstr(next(model.parameters()).device)"))
            same = until(kernel, "%mesh diff model.module.weight", r"float32 \[4, 16\]")
            kernel.ok(f"%mesh break {TRAIN}:{LINE}")
            until(kernel, "%mesh debug list", r"0-1")
            printed = shown(kernel.ok("%mesh debug print batch.sum()"))
            assert re.search(r"tensor\(", printed), printed
            assert f"ddp_train.py:{LINE + 1}" in shown(kernel.ok("%mesh debug next"))
            kernel.ok("%mesh clear all\n%mesh debug continue")
            assert "goes on" in shown(kernel.ok("%mesh leave"))
            gate.touch()
            assert job.wait(60) == 0, log.read_text()
            equal_ends = re.findall(rf"ends after \d+ steps on {place}", log.read_text())
            assert len(equal_ends) == 2, log.read_text()
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
    return same.strip().split("\n")[0]
