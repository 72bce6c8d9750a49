"""Every attack on one real worker, at small counts; ``python -m tests.attacks`` runs them by the ten thousand."""

from __future__ import annotations

from tests.attacks.__main__ import COUNTS
from tests.attacks.storm import storm
from tests.workers import Start
from tests.workers import workers as workers


def test_a_storm(workers: Start) -> None:
    team = workers(1, "tcp")
    report = storm(team, {kind: 100 if kind == "silent" else 30 for kind in COUNTS})
    assert not report.failures, report
    assert report.calls and report.arrivals
    assert report.memory < 230_000_000, report
    assert report.logged < 3_000, team[0].log()
    assert "Traceback" not in team[0].log(), team[0].log()
    assert team[0].process.poll() is None
