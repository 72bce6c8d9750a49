"""Imports msgspec without typing_extensions, in a process that has just begun and has no other thread.

msgspec takes from there, if it can, what ``typing`` has itself since Python 3.11, and that import takes as long as all
else of msgspec. Imports of typing_extensions after this one find it.
"""

from __future__ import annotations

import sys
from typing import Any

_modules: dict[str, Any] = sys.modules
_modules.setdefault("typing_extensions", None)  # an import fails then, as if it were not installed
try:
    import msgspec  # noqa: F401  # pyright: ignore[reportUnusedImport]
finally:
    if _modules["typing_extensions"] is None:
        del _modules["typing_extensions"]
