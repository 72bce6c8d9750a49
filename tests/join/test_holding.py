"""A rank whose program fails waits for somebody to look, and ends as it would have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.engines.join.listener import prepare
from tests.conftest import wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import Job
from tests.kernel.harness import Kernel
from tests.waiting import patience

FAILING = Path(__file__).parent / "failing.py"
LINE = FAILING.read_text().split("\n").index('        raise ValueError(f"row {row} is no number")') + 1


def test_its_frames_can_be_looked_at_until_the_notebook_leaves(start_job: Callable[..., Job], notebook: Kernel) -> None:
    job = start_job("held", script=FAILING, options=["--hold-on-error"])
    wait_until(lambda: "held for 600 s after ValueError: row 3" in job.log, "rank 1 has failed", 60)
    joined = shown(notebook.ok("%mesh join held"))
    assert "held after ValueError: row 3 is no number: 1" in joined
    pm = shown(notebook.ok("%mesh pm"))
    assert f"failing.py:{LINE} in parse" in pm
    assert "row = 3" in shown(notebook.ok("%mesh debug print row"))
    assert "1 has failed" in (said := shown(notebook.ok("%mesh hang"))) or "ValueError" in said
    notebook.ok("%mesh leave")
    assert job.process.wait(patience(60)) == 1 and f'failing.py", line {LINE}' in job.log


def test_a_breakpoint_at_errors_stops_a_program_that_fails_while_it_is_joined(
    start_job: Callable[..., Job], notebook: Kernel, tmp_path: Path
) -> None:
    gate = tmp_path / "go"
    script = tmp_path / "later.py"
    script.write_text(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\nmissing = {{}}['key']\n"
    )
    job = start_job("later", script=script)
    notebook.ok("%mesh join later\n%mesh break --on-error KeyError")
    gate.touch()
    assert "later.py:4" in until(notebook, "%mesh debug list", r"\b0-1\b")
    notebook.ok("%mesh debug --on later continue")
    notebook.ok("%mesh clear")
    assert job.process.wait(patience(60)) == 1
    notebook.run("%mesh leave")


def test_a_wrong_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_JOIN_HOLD", "for ever")

    with pytest.raises(ValueError, match="JOIN_HOLD"):
        prepare("wrong")
