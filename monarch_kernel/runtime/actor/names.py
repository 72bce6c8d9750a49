"""Unique names that people can still read."""

from __future__ import annotations

import os
import re


def unique(name: str) -> str:
    """``name``, made safe for a file name and for a log line, with a random end."""
    return f"{re.sub(r'[^A-Za-z0-9_.]', '_', name)[:24]}-{os.urandom(3).hex()}"
