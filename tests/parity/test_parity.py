"""Scripts written for Monarch report here what they report under torchmonarch 0.7.0."""

from __future__ import annotations

import sys

import pytest

import monarch_kernel.actor
from tests.parity.compare import SCRIPTS, expected, names, output


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_written_for_monarch(script: str) -> None:
    assert output(sys.executable, "ours", script) == expected(script)


def test_all_names_are_here() -> None:
    ours = set(monarch_kernel.actor.__all__)
    assert not set(names()) - ours
    assert all(hasattr(monarch_kernel.actor, name) for name in ours)
