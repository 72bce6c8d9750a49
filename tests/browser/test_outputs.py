"""Outputs of cells as JupyterLab shows them: figures of ranks, and progress when the page is loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import READY, Lab

FIGURES = """%%mesh
import os, time
import matplotlib.pyplot as plt
while rank < 2 and not os.path.exists(f'shown{rank + 1}'):
    time.sleep(0.02)
plt.figure(figsize=(6, 4)); plt.title(f'rank {rank}'); plt.plot([rank]); plt.show()
open(f'shown{rank}', 'w').close()"""


@pytest.mark.slow
def test_figures_of_ranks_stand_side_by_side_in_rank_order(lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    lab.open("%mesh up --procs 3", FIGURES, FIGURES.replace("%%mesh", "%%mesh -r 0").replace("rank < 2", "False"))
    lab.run(0)
    lab.run(1)
    lab.page.wait_for_function("() => document.querySelectorAll('.mk-RankFigure img').length === 3")
    figures = side_by_side(lab)
    lab.page.screenshot(path=str(tmp_path / "figures.png"))
    # One alone has the room of the cell, and a notebook that is opened again shows the same.
    lab.run(2)
    alone = lab.cell(2).locator(".mk-RankFigure img")
    alone.wait_for()
    assert alone.bounding_box()["width"] > figures[0]["width"]
    lab.save()
    lab.reload()
    lab.page.wait_for_function("() => document.querySelectorAll('.mk-RankFigure img').length === 4")
    side_by_side(lab)


@pytest.mark.slow
def test_a_reload_in_mid_cell_leaves_no_progress_behind(lab: Lab) -> None:
    lab.open(
        "%mesh up --procs 2",
        "%%mesh\nimport os, time\nprint('begun')\nwhile not os.path.exists('go'):\n    time.sleep(0.02)\nprint('over')",
    )
    lab.run(0)
    lab.start(1)
    lab.prints(1, "0 of 2 ranks done")
    lab.save()
    lab.page.reload()
    lab.prints(1, "begun")
    lab.page.wait_for_function("() => !document.querySelector('.jp-Notebook').textContent.includes('ranks done')")
    assert lab.output(1).split() == ["[0-1]", "begun"]
    (lab.folder / "work" / "go").touch()
    lab.page.wait_for_function(READY)
    assert "begun" in lab.output(1) and "ranks done" not in lab.output(1)


def side_by_side(lab: Lab) -> list[dict[str, Any]]:
    """Check where the three figures of a cell stand; their boxes."""
    shown = lab.cell(1).locator(".mk-RankFigure")
    labels = lab.cell(1).locator(".mk-OnlyLabels").filter(visible=True)
    assert labels.count() == 0  # each figure has its own
    assert [text.strip() for text in shown.all_inner_texts()] == ["[0]", "[1]", "[2]"]
    images = shown.locator("img")
    boxes = [images.nth(at).bounding_box() for at in range(3)]
    assert abs(boxes[0]["y"] - boxes[1]["y"]) < 2 and boxes[1]["x"] > boxes[0]["x"] + boxes[0]["width"]
    assert boxes[2]["y"] > boxes[0]["y"] + boxes[0]["height"] and abs(boxes[2]["x"] - boxes[0]["x"]) < 2
    area = lab.cell(1).locator(".jp-OutputArea").bounding_box()
    assert all(box["x"] + box["width"] <= area["x"] + area["width"] + 1 for box in boxes)
    return boxes
