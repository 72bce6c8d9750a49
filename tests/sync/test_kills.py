"""Some random kills during syncs: see tests/sync/chaos, which makes as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sync.chaos.engine import chaos


@pytest.mark.timeout(170)
def test_a_kill_during_a_sync_leaves_the_old_or_the_new_tree(tmp_path: Path) -> None:
    report = chaos(seed=11, kills=6, folder=tmp_path)
    print(report)
    assert not report.violations, str(report)
    assert report.kills == 6
