"""Represent tables as plain data, and render them: text made by rich for terminals, HTML for notebooks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Protocol

from monarch_kernel.display import styles
from monarch_kernel.display.controls import without_controls

#: No table is folded: a terminal wraps long lines, and a notebook scrolls.
_WIDTH = 1 << 20


class Printer(Protocol):
    """The part of IPython's pretty printer that `_repr_pretty_` uses."""

    def text(self, text: str, /) -> None:
        """Add text."""
        ...


@dataclass(frozen=True, slots=True)
class TableView:
    """A table to show.

    Attributes:
        headings: the names of the columns; without any, there is no line of headings.
        rows: the text of the cells.
        caption: one line above the table.
        right: the indices of right-aligned columns.
        note: lines below the table, such as how much was omitted.
        error: lines with an error, displayed as such.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    right: Collection[int] = ()
    note: str = ""
    error: str = ""

    def without_empty_columns(self) -> TableView:
        """Return the table without the columns that are empty in all rows."""
        kept = [at for at in range(len(self.headings)) if any(row[at] for row in self.rows)]
        return TableView(
            [self.headings[at] for at in kept],
            [[row[at] for at in kept] for row in self.rows],
            self.caption,
            frozenset(new for new, at in enumerate(kept) if at in self.right),
            self.note,
            self.error,
        )


class AsTable:
    """Shows an object as its table: as text in terminals, as HTML in notebooks."""

    __slots__ = ()

    def table(self) -> TableView:
        """Return the table that shows this object."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return table_text(self.table())

    def _repr_html_(self) -> str:
        return table_html(self.table())

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        printer.text(repr(self))


def table_text(view: TableView) -> str:
    """Render a table as text. Columns are two spaces apart, and as wide as a terminal displays their cells."""
    # rich takes about 30 ms to import. Only a cell that shows a table imports it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(view.headings), pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    count = len(view.headings) or max(map(len, view.rows), default=0)
    for at in range(count):
        heading = Text(without_controls(view.headings[at])) if view.headings else ""
        table.add_column(heading, justify="right" if at in view.right else "left", no_wrap=True, overflow="crop")
    if any("\n" in cell for row in view.rows for cell in row):
        for row in view.rows:
            table.add_row(*(Text(without_controls(cell)) for cell in row))
    elif view.rows:  # a column as one cell is five times as fast, which matters for a mesh of 1,000 ranks
        table.add_row(*(Text(without_controls("\n".join(column))) for column in zip(*view.rows, strict=True)))
    file = StringIO()
    # By default, rich would publish its own display in a kernel, and read colour settings from the environment.
    console = Console(file=file, width=_WIDTH, color_system=None, force_jupyter=False, _environ={})
    console.print(table, crop=False)
    body = (line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))
    return "\n".join([*_line(view.caption), *body, *_line(view.error), *_line(view.note)])


def table_html(view: TableView) -> str:
    """Render a table as HTML."""
    caption = f'<div style="{styles.CAPTION}">{escape(view.caption)}</div>' if view.caption else ""
    note = _lines_html(view.error, styles.BAD) + _lines_html(view.note, styles.DIM)
    head = f"<thead><tr>{_cells('th', view.headings, view.right)}</tr></thead>" if view.headings else ""
    body = "".join(f"<tr>{_cells('td', row, view.right)}</tr>" for row in view.rows)
    return f"{caption}<table>{head}<tbody>{body}</tbody></table>{note}"


def _lines_html(text: str, style: str) -> str:
    """Render each line as an element, because HTML treats line ends as spaces."""
    return "".join(f'<div style="{style}">{escape(line)}</div>' for line in text.split("\n") if line)


def _cells(tag: str, row: Iterable[str], right: Collection[int]) -> str:
    return "".join(
        f'<{tag} style="{styles.RIGHT if at in right else styles.LEFT}">{escape(cell)}</{tag}>'
        for at, cell in enumerate(row)
    )


def _line(text: str) -> list[str]:
    return [without_controls(text)] if text else []
