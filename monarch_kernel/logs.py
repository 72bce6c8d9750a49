"""Loggers of the modules that every program loads. ``logging`` itself, a tenth of the time, is loaded with the first
message, or by ``load_reports``.

Any of our packages may import this module, and it imports none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logging import Logger


class _Logger:
    """Finds the logger of this name when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        import logging

        return getattr(logging.getLogger(self._name), attribute)


def logger(name: str) -> Logger:
    """The logger of a module, as ``logging.getLogger`` returns it."""
    found: Any = _Logger(name)
    return found


def load_reports() -> None:
    """Load what reports of failures need: a process that has no descriptor left can open no module."""
    import linecache  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import logging  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import traceback  # noqa: F401  # pyright: ignore[reportUnusedImport]
