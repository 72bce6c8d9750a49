"""Lazy loggers for the modules that every program loads.

``logging`` takes a tenth of the loading time. It is imported at the first message, or by ``load_reports``.

Any package of this project may import this module; it imports none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logging import Logger


class _Logger:
    """A proxy that looks up the logger of this name on first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        import logging

        return getattr(logging.getLogger(self._name), attribute)


def logger(name: str) -> Logger:
    """Return the logger of a module, like ``logging.getLogger``."""
    found: Any = _Logger(name)
    return found


def load_reports() -> None:
    """Import ``logging`` and the modules that failure reports need. A process without free descriptors cannot import
    them.
    """
    import linecache  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import logging  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import traceback  # noqa: F401  # pyright: ignore[reportUnusedImport]
