"""The last lines of a stream as a terminal shows them, for progress bars that overwrite earlier lines. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from monarch_kernel.display.controls import SEQUENCE

#: The number of lines that a cursor can return to. Lines above are final.
HEIGHT = 50
#: A longer line continues in the next one (characters).
WIDTH = 32_768
_LONGEST_PEN = 128
_LONGEST_SEQUENCE = 80

_TOKEN = re.compile(
    rf"(?P<control>[\n\r\x08])|\x1b\[(?P<codes>[0-9;]{{0,64}})(?P<kind>[A-HJKfm])|(?:{SEQUENCE.pattern})|"
    r"(?P<text>[^\n\r\x08\x1b]+)|\x1b"
)
_MOVES = re.compile(r"\x1b\[[0-9;]{0,64}[ABEFHf]")
_BEGUN = re.compile(r"\x1b(?:\[[0-?]*)?\Z")
#: Text that requires a screen: overwriting a line, or moving the cursor. A carriage return before a line feed requires
#: none.
STEERING = re.compile(r"\r(?!\n)|\x08|\x1b\[[0-9;]{0,64}[A-HJKf]")


@dataclass(slots=True)
class _Row:
    """A line: the colour codes and the character of each column."""

    cells: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    overwritten: bool = False

    def text(self) -> str:
        parts: list[str] = []
        pen = ""
        end = len(self.cells)
        while end and self.cells[end - 1][1] == " ":
            end -= 1
        for colours, character in self.cells[:end]:
            if colours != pen:
                parts.append(f"\x1b[0m{colours}" if pen else colours)
                pen = colours
            parts.append(character)
        return "".join(parts) + ("\x1b[0m" if pen else "")


class TerminalScreen:
    """The state of a stream that moves the cursor.

    A line that ended in a line feed is kept as long as the stream may return to it: the latest line if it was
    overwritten, like a progress bar, and each of the last `HEIGHT` lines once the cursor has moved up.
    """

    __slots__ = ("_begun", "_column", "_moves", "_pen", "_row", "_rows")

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._row = 0
        self._column = 0
        self._pen = ""
        self._moves = False
        self._begun = ""  # the beginning of a control sequence

    def write(self, text: str) -> list[str]:
        """Write text. Return the lines that are now final."""
        final: list[str] = []
        text = self._begun + text
        begun = _BEGUN.search(text, max(0, len(text) - _LONGEST_SEQUENCE))
        self._begun = "" if begun is None else begun.group()
        self._moves = self._moves or _MOVES.search(text) is not None
        for token in _TOKEN.finditer(text, 0, len(text) - len(self._begun)):
            if written := token["text"]:
                self._put(written, final)
            elif control := token["control"]:
                self._control(control, final)
            elif kind := token["kind"]:
                self._steer(kind, token["codes"])
        return final

    def lines(self) -> tuple[str, ...]:
        """Return all lines that are not final, without empty ones at the end."""
        found = [row.text() for row in self._rows]
        while found and not found[-1]:
            found.pop()
        return tuple(found)

    def take_above(self) -> Sequence[str]:
        """Remove and return the lines above the cursor: later output appears below them."""
        above, self._rows, self._row = self._rows[: self._row], self._rows[self._row :], 0
        return [row.text() for row in above]

    def plain(self) -> str | None:
        """Return the last line if nothing was overwritten and there are no other lines, so that no screen is needed."""
        row = self._rows[0]
        if self._begun or len(self._rows) > 1 or row.overwritten or self._column != len(row.cells) or self._pen:
            return None
        return row.text() if not row.cells or row.cells[-1][1] != " " else None

    def _put(self, text: str, final: list[str]) -> None:
        while text:
            if self._column >= WIDTH:
                self._control("\n", final)
            piece, text = text[: WIDTH - self._column], text[WIDTH - self._column :]
            cells = self._rows[self._row].cells
            cells.extend([("", " ")] * (self._column - len(cells)))
            cells[self._column : self._column + len(piece)] = [(self._pen, character) for character in piece]
            self._column += len(piece)

    def _control(self, control: str, final: list[str]) -> None:
        if control == "\r":
            self._column = 0
            self._rows[self._row].overwritten = True
        elif control == "\x08":
            self._column = max(0, self._column - 1)
        else:
            self._column = 0
            self._row += 1
            if self._row == len(self._rows):
                self._rows.append(_Row())
            kept = HEIGHT if self._moves else int(self._rows[self._row - 1].overwritten)
            while self._row > kept:
                final.append(self._rows.pop(0).text())
                self._row -= 1

    def _steer(self, kind: str, codes: str) -> None:
        first = codes.partition(";")[0]
        number = min(int(first or 0), WIDTH)
        row = self._rows[self._row]
        if kind == "m":
            if first in ("", "0"):
                self._pen = ""
            if codes not in ("", "0"):
                pen = f"\x1b[{codes}m"
                self._pen = pen if len(self._pen) + len(pen) > _LONGEST_PEN else self._pen + pen
        elif kind in "CD":
            step = max(1, number)
            self._column = min(WIDTH, max(0, self._column + (step if kind == "C" else -step)))
        elif kind == "G":
            self._column = max(0, number - 1)
        elif kind == "K":
            self._erase(row, number)
        elif kind == "J":
            self._erase(row, number)
            rows = range(self._row + 1, len(self._rows)) if number == 0 else range(len(self._rows) if number > 1 else 0)
            for at in rows:
                self._rows[at].cells.clear()
        else:
            up = max(1, number)
            self._row = {"A": self._row - up, "F": self._row - up, "H": 0, "f": 0}.get(kind, self._row + up)
            self._row = min(max(0, self._row), HEIGHT)
            if kind not in "AB":
                self._column = 0
            while self._row >= len(self._rows):
                self._rows.append(_Row())

    def _erase(self, row: _Row, which: int) -> None:
        """Erase a line: from the cursor on (0), up to it (1), or all of it (2)."""
        if which == 0:
            del row.cells[self._column :]
        elif which == 1:
            row.cells[: self._column] = [("", " ")] * min(self._column, len(row.cells))
        else:
            row.cells.clear()
