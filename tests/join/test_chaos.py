"""Some of the chaos that ``python -m tests.join.chaos --actions 10000`` makes, in a joined job of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.join.chaos import Chaos

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_whatever_viewers_do_and_however_they_die_the_losses_are_the_same(tmp_path: Path) -> None:
    found = Chaos(tmp_path, seed=3, ranks=2).run(150)
    assert found.steps and not found.different, found.log
    assert found.actions.total() > 30 and found.deaths.total() > 2
