"""Who tries to get in: another user of this machine."""

from __future__ import annotations

from tests.otheruser import other_user, shared
from tests.workers import workers

__all__ = ["other_user", "shared", "workers"]
