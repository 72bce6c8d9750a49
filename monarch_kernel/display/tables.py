"""Represent tables as plain data, and render them: text made by rich for terminals, HTML for notebooks."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any, Final, Protocol, TextIO, cast

# Define the styles of all HTML of this package, in one place.
#
# They are inline, because a saved notebook, an e-mail and a plain front end have no style sheet. Text inherits its
# colour from the page, and JupyterLab's variables have fallbacks, so everything is readable on light and dark pages.

FONT: Final = "font-family:var(--jp-code-font-family,ui-monospace,monospace)"
#: The box around text in the font of code.
BOX: Final = f"{FONT};font-size:var(--jp-code-font-size,13px);line-height:1.35"
#: The same box around lines that are not wrapped.
SCROLLED: Final = f"{BOX};overflow-x:auto"
#: Each front end styles `<pre>` differently; a bare one inherits everything from the box around it.
BARE_PRE: Final = "all:unset;display:block"
WRAPPED: Final = f"{BARE_PRE};white-space:pre-wrap;overflow-wrap:anywhere;{FONT}"
UNWRAPPED: Final = f"{BARE_PRE};white-space:pre;{FONT}"
#: Lines beside a label, which is not copied with them.
LABELLED: Final = "display:flex;gap:1ch"
LABEL: Final = f"{BARE_PRE};flex:none;user-select:none;opacity:.7"

DIM: Final = "opacity:.7"
BOLD: Final = "font-weight:600"
# No single red or blue has enough contrast on both light and dark pages, so front ends choose.
BAD: Final = "color:var(--jp-error-color1,var(--vscode-errorForeground,#c62828))"
#: Sets of ranks in a tree, where they guide the reader.
RANKS: Final = f"color:var(--jp-brand-color1,var(--vscode-textLink-foreground,#1a6fc4));{BOLD}"
#: The part of a source line that is running.
RUNS_NOW: Final = "background:rgba(255,176,32,.30);border-radius:2px"
#: A small label where ranks diverge.
FORK_CHIP: Final = "background:#d9912b;color:#000;border-radius:8px;padding:0 6px;font-size:85%"
#: Lines of a tree. A line that can be opened begins with a triangle; other lines have the same indentation.
TREE_LINE: Final = "white-space:pre;cursor:default;padding-left:1.05em"
TREE_NOTE: Final = "white-space:pre-wrap;padding-left:1.05em"
TREE_OPENS: Final = (
    "white-space:pre;cursor:pointer;line-height:24px"  # lines below each other, each large enough to hit
)
TREE_INSIDE: Final = "margin:0 0 2px 0.6ch;padding-left:1.4ch;border-left:1px solid rgba(128,128,128,.45)"
TREE_FORK: Final = "margin:2px 0 2px 0.6ch;padding-left:1.4ch;border-left:3px solid #d9912b"
WARNING_LINE: Final = "border-left:3px solid var(--jp-warn-color1,#ef6c00);padding-left:.6em"

#: Cells of tables, which front ends align in different ways.
LEFT: Final = "text-align:left;vertical-align:top;white-space:pre-wrap"
RIGHT: Final = "text-align:right;vertical-align:top;white-space:pre-wrap"
#: A cell with a set of ranks stays on one line.
NAME: Final = "text-align:left;vertical-align:top;white-space:nowrap"
CAPTION: Final = f"{DIM};margin-bottom:2px"
HEADLINE: Final = f"{BOLD};margin-bottom:4px"

#: Numbers in charts, and outliers, which are also marked by shape.
CHART_LINE: Final = "#2b7fd9"
CHART_OUTLIER: Final = "#d9362b"

#: The states of ranks, for light and dark pages. Their shapes also distinguish them.
STATE_COLOURS: Final = {
    "dead": "#d9362b", "unresponsive": "#9a6ae0", "stopped": "#b07d12", "healing": "#17937f",
    "starting": "#7d8792", "running": "#3b82f6", "idle": "#8c959f", "ended": "#8c959f",
}  # fmt: skip
#: The box around a view of a mesh, and a line about a problem in it.
VIEW: Final = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:13px;line-height:1.45"
VIEW_TITLE: Final = f"{BOLD};font-size:14px"
NEWS: Final = "border-left:3px solid #d9362b;padding-left:.6em;margin:3px 0;white-space:pre-wrap;overflow-wrap:anywhere"

#: A line that can be opened.
OPENS: Final = "cursor:pointer;opacity:.75;margin-top:4px"

#: The sixteen colours of terminals, readable on light and dark pages.
ANSI_COLOURS: Final = (
    "#6e7681", "#e75c58", "#00a250", "#b8860b", "#208ffb", "#d160c4", "#2aa1b3", "#a1a6b2",
    "#8b949e", "#f0706c", "#16b45f", "#d29922", "#4aa3ff", "#e07ed5", "#56c2d1", "#c5c1b4",
)  # fmt: skip


# Remove terminal control sequences from text of other programs: names of hosts, reports, errors, output of ranks.

#: A control sequence of a terminal.
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
#: The C0 and C1 control characters except tabs and line ends.
UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_ALL = re.compile(rf"(?P<colour>\x1b\[[0-9;]{{0,64}}m)|{SEQUENCE.pattern}|{UNSEEN.pattern}|\r")
_MAY_STEER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_controls(text: str) -> str:
    """Remove control sequences and control characters from text. Tabs and line feeds stay."""
    return _ALL.sub("", text) if _MAY_STEER.search(text) else text


def only_colours(text: str) -> str:
    """Do the same, but keep colours and weights."""
    return _ALL.sub(lambda found: found["colour"] or "", text) if _MAY_STEER.search(text) else text


class _ColoursOnly:
    """A text stream that removes control sequences, except colours. Its ``buffer`` is unchanged."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text."""
        self._stream.write(only_colours(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write some pieces of text."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def only_colours_printed() -> Generator[None]:
    """Remove control sequences, except colours, from everything that this process prints in the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", _ColoursOnly(each)) for each in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


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
    caption = f'<div style="{CAPTION}">{escape(view.caption)}</div>' if view.caption else ""
    note = _lines_html(view.error, BAD) + _lines_html(view.note, DIM)
    head = f"<thead><tr>{_cells('th', view.headings, view.right)}</tr></thead>" if view.headings else ""
    body = "".join(f"<tr>{_cells('td', row, view.right)}</tr>" for row in view.rows)
    return f"{caption}<table>{head}<tbody>{body}</tbody></table>{note}"


def _lines_html(text: str, style: str) -> str:
    """Render each line as an element, because HTML treats line ends as spaces."""
    return "".join(f'<div style="{style}">{escape(line)}</div>' for line in text.split("\n") if line)


def _cells(tag: str, row: Iterable[str], right: Collection[int]) -> str:
    return "".join(
        f'<{tag} style="{RIGHT if at in right else LEFT}">{escape(cell)}</{tag}>' for at, cell in enumerate(row)
    )


def _line(text: str) -> list[str]:
    return [without_controls(text)] if text else []


# Reports that are shown as text in terminals and as HTML in notebooks.


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

    def _repr_mimebundle_(self, **_kwargs: object) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}
