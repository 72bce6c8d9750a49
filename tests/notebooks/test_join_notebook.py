"""The notebook that joins a job of torchrun finds its bug, mends it while it runs, and leaves it running."""

from __future__ import annotations

from collections.abc import Callable

from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture


def test_the_rank_is_found_the_fix_holds_and_the_job_goes_on(run: Callable[..., Run]) -> None:  # noqa: F811
    done = run(ROOT / "notebooks" / "12_join.ipynb")
    assert done.status == 0, done.printed
    assert "3 ranks" in done.text("join") and "2.bias" in done.text("diff")
    assert "'2.bias'" in done.text("why")
    assert "[0-2]" in done.text("hook")  # after the same step
    assert done.text("equal") == "the same weights on all ranks: True"
    assert "left, and it goes on" in done.text("leave")
    assert "the job ended with 0" in done.text("end")
