"""The notebook about a training run that learns wrongly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture

pytestmark = pytest.mark.torch


def test_the_gradient_that_is_not_reduced_is_named_replayed_and_mended(
    run: Callable[[Path], Run],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    done = run(ROOT / "notebooks" / "13_silent_errors.ipynb")
    assert done.status == 0, done.printed
    wrong = done.text("compare")
    assert wrong.startswith("Different from step 0, reduction: gradient of norm.weight on ranks 0-1 at train.py:61: ")
    assert "the sum over ranks 0-1 is the reference's: a reduction is missing (a guess)" in wrong
    assert done.text("replay").startswith("rank 1 of 2, capture 'step': bit-equal\n")
    assert done.text("mended").startswith("Equal within rounding: 34 tensors compared, ")
