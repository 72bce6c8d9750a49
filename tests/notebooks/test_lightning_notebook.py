"""The notebook for Studios of Lightning: its first part runs on any machine, and the second says that it is skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture


def test_the_machine_is_used_and_what_needs_the_platform_is_skipped(run: Callable[[Path], Run]) -> None:  # noqa: F811
    done = run(ROOT / "notebooks" / "10_lightning_studio.ipynb")
    assert done.status == 0, done.printed
    assert "rank 3" in done.text("ranks") and "pi is about 3.1" in done.text("work")
    assert done.text("machines") == "skipped: this is no Studio of Lightning"
    assert done.text("end").startswith("skipped")
