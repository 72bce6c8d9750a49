"""Who tries to get in: another user of this machine."""

from __future__ import annotations

from tests.kernel.conftest import jupyter_folders, start_kernel
from tests.otheruser import other_user, shared
from tests.workers import workers

__all__ = ["jupyter_folders", "other_user", "shared", "start_kernel", "workers"]
