"""Scripts written for Monarch report here what they report under torchmonarch 0.7.0."""

from __future__ import annotations

import sys

import pytest

import monarch_kernel.actor
from tests.parity.compare import SCRIPTS, expected, names, output

#: Names of ``monarch.actor`` that come with later parts of this project, and with which.
LATER = {
    "ProcId": "not decided",
    "Uid": "not decided",
    "attach": "not decided: controllers behind a firewall attach to workers as all others do",
    "get_meter": "telemetry",
    "returns_future": "not decided",
    "span": "telemetry",
    "traced": "telemetry",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_written_for_monarch(script: str) -> None:
    assert output(sys.executable, "ours", script) == expected(script)


def test_all_names_are_here_or_known_to_come_later() -> None:
    ours = set(monarch_kernel.actor.__all__)
    missing = set(names()) - ours
    assert missing <= set(LATER), f"missing, and not known to come later: {sorted(missing - set(LATER))}"
    assert all(hasattr(monarch_kernel.actor, name) for name in ours)
