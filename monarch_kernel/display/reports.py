"""Reports that are shown as text in terminals and as HTML in notebooks."""

from __future__ import annotations

from typing import Any

from monarch_kernel.display.tables import Printer


class AsReport:
    """Shows an object as its text, and in notebooks as its HTML."""

    __slots__ = ()

    def text(self) -> str:
        """Render the report as plain text."""
        raise NotImplementedError

    def html(self) -> str:
        """Render the report as HTML."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        printer.text(self.text())

    def _repr_html_(self) -> str:
        return self.html()

    def _repr_mimebundle_(self, **_kwargs: Any) -> dict[str, Any]:
        return {"text/plain": self.text(), "text/html": self.html()}
