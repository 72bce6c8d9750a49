"""A minute of chaos: see tests/chaos.py, which runs for as long as one likes."""

from __future__ import annotations

import pytest

from monarch_kernel import actor as public
from tests.chaos import Chaos

pytestmark = [pytest.mark.slow, pytest.mark.own_runtime, pytest.mark.timeout(300)]


def test_a_minute_of_chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "unhandled_fault_hook", lambda _failure: None)
    report = Chaos(seed=20, minutes=1.0).run()
    print(report)
    assert not report.violations, str(report)
    # It did happen, and the load went on meanwhile.
    assert report.answered > 500 and report.failed > 20 and report.heals > 5
    assert set(report.events) >= {"kill", "kill_several", "stop", "leave", "heal", "kill_agent"}
