"""A minute of chaos: see tests/chaos, which runs for as long as one likes."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from monarch_kernel import actor as public
from tests.chaos.engine import Chaos
from tests.chaos.events import PAUSE, sequence
from tests.chaos.hosts import HostsChaos, several_hosts


@pytest.fixture(autouse=True)
def no_end_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "unhandled_fault_hook", lambda _failure: None)


@pytest.mark.slow
@pytest.mark.own_runtime
@pytest.mark.timeout(300)
def test_half_a_minute_of_chaos_on_this_host() -> None:
    report = Chaos(seed=20, minutes=0.5).run()
    print(report)
    assert not report.violations, str(report)
    # It did happen, and the load went on meanwhile.
    assert report.answered > 250 and report.failed > 10 and report.heals > 3 and report.relayed > 50
    assert set(report.events) == set(Chaos.weights)


@pytest.mark.slow
@pytest.mark.own_runtime
@pytest.mark.timeout(300)
def test_half_a_minute_of_chaos_on_several_hosts() -> None:
    with several_hosts(seed=20, minutes=0.5, hosts=3) as chaos:
        report = chaos.run()
    print(report)
    assert not report.violations, str(report)
    assert report.answered > 100 and report.failed > 10 and report.heals > 3 and report.relayed > 20
    assert {"lose", "stall", "repair", "heal"} <= set(report.events)


@pytest.mark.parametrize("kind", [Chaos, HostsChaos])
def test_a_seed_has_its_sequence(kind: type[Chaos]) -> None:
    """Whatever comes of the events; and all kinds of them come."""
    events = list(islice(sequence(7, kind.weights), 500))
    assert events == list(islice(sequence(7, kind.weights), 500))
    assert events != list(islice(sequence(8, kind.weights), 500))
    counts = Counter(event.name for event in events)
    assert set(counts) == set(kind.weights)
    assert all(hasattr(kind, name) for name in counts)
    assert all(0 <= event.pause <= PAUSE for event in events)
