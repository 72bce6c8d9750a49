"""Create unique, readable names."""

from __future__ import annotations

import os
import re


def unique(name: str) -> str:
    """Return ``name``, made safe for file names and log lines, with a random suffix."""
    return f"{re.sub(r'[^A-Za-z0-9_.]', '_', name)[:24]}-{os.urandom(3).hex()}"
