"""The notebook on torchft, where that is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture


@pytest.mark.torch
@pytest.mark.slow
def test_survivors_go_on_and_the_new_one_catches_up(run: Callable[[Path], Run]) -> None:  # noqa: F811
    for needed in ("torch", "sklearn", "matplotlib", "torchft"):
        pytest.importorskip(needed)
    trained = run(ROOT / "notebooks" / "06_torchft.ipynb")
    assert trained.status == 0, trained.printed
    assert re.search(r"^next step of the survivors +[\d.]+ s after the kill$", trained.printed, re.M)
    back = re.search(r"^first step of the new one +[\d.]+ s after the kill, at step (\d+)$", trained.printed, re.M)
    assert back is not None and int(back[1]) > 150, trained.printed
    assert re.search(r"^steps +300, the same network on every replica$", trained.printed, re.M)
    assert "killed by SIGKILL" in trained.text("train") and "1 healed" in trained.text("train")
