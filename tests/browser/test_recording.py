"""The session that the first page of the documentation shows, recorded as a picture that moves.

``TEST_PICTURES=docs/pictures python -m pytest tests/browser/test_recording.py`` writes ``docs/pictures/session.webp``;
otherwise the picture lies among the files of the test.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab
from tests.browser.panel import Panel
from tests.conftest import needs
from tests.waiting import patience

pytestmark = pytest.mark.slow

CELLS = (
    "%mesh up --procs 4 --dist gloo",
    """%%mesh
import time, torch, torch.distributed as dist
for step in range(150):
    loss = torch.rand(1) / (step + 1)
    if rank == 2 and step == 90:
        break  # the bug: this rank leaves early
    dist.all_reduce(loss)
    time.sleep(0.02)""",
    "%mesh diff loss",
    "%mesh heal",
)
#: The size of the page (CSS pixels), and of the picture at most (bytes).
SIZE = {"width": 1200, "height": 720}
LARGEST = 1_500_000
#: The time between two frames; how long the picture shows a frame, one with the end of a step, the last (seconds).
PERIOD, SHOWN, STEP, LAST = 0.3, 0.3, 1.5, 3.0


class Film:
    """Frames of a page with their times.

    Args:
        page: playwright's.
    """

    def __init__(self, page: Any) -> None:
        self._page = page
        self.frames: list[bytes] = []
        self.steps: set[bytes] = set()

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Record until something is there, and a moment more; the picture shows that longer."""
        deadline = time.monotonic() + patience(60.0)
        while not done():
            assert time.monotonic() < deadline, f"not within a minute: {what}"
            self.take()
        for _ in range(3):
            self.take()
        self.steps.add(self.frames[-1])

    def take(self) -> None:
        """Record a frame, and wait for the time of the next."""
        self.frames.append(self._page.screenshot())
        self._page.wait_for_timeout(PERIOD * 1000)

    def save(self, path: Path) -> int:
        """Write the frames that differ as an animated WebP; return their number."""
        image = pytest.importorskip("PIL.Image")
        scenes = [frame for frame, before in pairwise([*reversed(self.frames), b""]) if frame != before][::-1]
        times = [STEP if frame in self.steps else SHOWN for frame in scenes[:-1]]
        pictures = [image.open(io.BytesIO(frame)).convert("RGB") for frame in scenes]
        pictures[0].save(
            path,
            save_all=True,
            append_images=pictures[1:],
            duration=[int(1000 * each) for each in (*times, LAST)],
            loop=0,
            quality=60,
            method=4,
            minimize_size=True,
        )
        return len(scenes)


@pytest.fixture
def small(lab: Lab) -> Iterator[Lab]:
    """The page in the size of the picture."""
    before = lab.page.viewport_size
    lab.page.set_viewport_size(SIZE)
    yield lab
    lab.page.set_viewport_size(before)


def test_a_hang_is_explained_and_a_dead_rank_is_healed(small: Lab, tmp_path: Path) -> None:
    needs("torch")
    lab = small
    lab.open(*CELLS)
    panel = Panel(lab)
    panel.open()
    film = Film(lab.page)

    def cards(state: str, count: int) -> bool:
        return bool(panel.node.locator(f".mk-Card[data-state={state}]").count() == count)

    def printed(at: int, pattern: str) -> bool:
        return bool(re.search(pattern, lab.output(at)))

    lab.start(0)
    film.until(lambda: cards("idle", 4), "four ranks are up")
    lab.start(1)
    film.until(lambda: printed(1, r"rank 2 never entered it"), "the verdict of the hang")
    panel.rank(2).click()
    film.until(lambda: panel.details().count() == 1, "the details of the rank")
    panel.press("interrupt")
    film.until(lambda: cards("running", 0), "the cell has ended")
    lab.done()
    lab.start(2)
    film.until(lambda: printed(2, r"distinct values"), "the difference between ranks")
    lab.done()
    panel.details().locator("[data-deed=kill]").click()
    panel.details().get_by_role("button", name="Kill", exact=True).last.click()
    film.until(lambda: cards("dead", 1), "the rank is dead")
    lab.start(3)
    film.until(lambda: cards("idle", 4) and printed(3, "1 healed"), "the mesh is healed")
    lab.cell(3).evaluate("cell => cell.scrollIntoView({block: 'end'})")
    film.take()
    lab.done()

    target = Path(os.environ.get("TEST_PICTURES") or tmp_path) / "session.webp"
    assert film.save(target) >= 10
    assert target.stat().st_size < LARGEST
