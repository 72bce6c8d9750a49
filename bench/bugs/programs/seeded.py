"""The rank with the bug, and its first step; the driver writes both numbers into its copy of this file."""

from __future__ import annotations

from pathlib import Path

GUILTY = 0
STEP = 0


def happened() -> None:
    """Tell the driver that the bug is about to show."""
    Path(__file__).with_name("happened").touch()
