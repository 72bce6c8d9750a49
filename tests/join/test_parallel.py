"""Why a joined job makes no progress, in each way to train in parallel: its collectives are PyTorch's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.test_tools import until
from tests.join.conftest import Job
from tests.kernel.harness import Kernel

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "parallel_train.py"
LINES = SCRIPT.read_text().split("\n")
LOADS = LINES.index("            time.sleep(0.02)") + 1
#: What rank 0 waits in, and in which line, of each way.
WAITS = {
    "ddp": ("all_reduce #\\d+ of the default group", "    model(batch).sum().backward()"),
    "fsdp": ("all_gather\\w* #\\d+ of the default group", "    model(batch).sum().backward()"),
    "dtensor": ("all_gather\\w* #\\d+ of the default group", "    cut.redistribute(mesh, [Replicate()])"),
    "pipeline": ("send to rank 1", "        schedule.step(batch)"),
}


def test_the_late_rank_and_the_lines_of_both_are_named(start_job: Callable[..., Job], notebook: Kernel) -> None:
    job = start_job("ways", script=SCRIPT)
    notebook.ok("%mesh join ways")
    for way, (collective, text) in WAITS.items():
        line = LINES.index(text, LINES.index(f"def {way}() -> None:")) + 1
        said = until(notebook, "%mesh hang", rf"Rank 0 waits in {collective} at parallel_train.py:{line}; rank 1 ")
        assert re.search(r"rank 1 .*(makes no progress|is running) at parallel_train.py:\d+ in load", said), said
        Path(f"{job.gate}.{way}").touch()
    notebook.ok("%mesh leave")
