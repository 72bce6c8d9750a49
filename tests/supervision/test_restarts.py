"""When a mesh is restarted by itself: every short history of deaths, against a plain count."""

from __future__ import annotations

import itertools

import pytest

from monarch_kernel.runtime.supervision import TOGETHER, RestartPolicy, Restarts

#: Pauses between deaths: the same event, a little later, and after the window.
PAUSES = (0.0, TOGETHER / 2, 1.0, 5.0, 11.0)


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("backoff", [0.0, 0.5])
def test_every_short_history(limit: int, backoff: float) -> None:
    policy = RestartPolicy(limit=limit, within=10.0, backoff=backoff, backoff_max=0.8)
    for pauses in itertools.product(PAUSES, repeat=5):
        restarts = Restarts()
        restarts.add("m", policy)
        now = 100.0
        begun: list[float] = []  # when each event began that was restarted
        for pause in pauses:
            now += pause
            recent = [at for at in begun if now - at <= policy.within]
            delay = restarts.failed("m", now)
            if recent and now - recent[-1] <= TOGETHER:
                assert delay is not None, "it goes with the one before"
            elif len(recent) < limit:
                assert delay == min(backoff * 2 ** len(recent), policy.backoff_max), (pauses, recent)
                begun.append(now)
            else:
                assert delay is None, (pauses, recent)


def test_never_and_no_more() -> None:
    restarts = Restarts()
    restarts.add("m", RestartPolicy(when="never"))
    assert restarts.failed("m", 1.0) is None
    restarts.add("m", RestartPolicy())
    assert restarts.failed("m", 1.0) == 0.0
    assert restarts.failed("other", 1.0) is None
    restarts.remove("m")
    assert restarts.failed("m", 2.0) is None
    assert restarts.policy("m") is None
