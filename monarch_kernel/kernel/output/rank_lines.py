"""Split the output of one rank into whole lines, and admit only as many as its limits allow. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from monarch_kernel.display.tables import SEQUENCE

# The last lines of a stream as a terminal shows them, for progress bars that overwrite earlier lines. Pure.

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


#: A longer line is split into several.
LONGEST_LINE = WIDTH
_TAIL_BYTES = 8_192
_LONGEST_IN_TAIL = 1_000
# A shorter piece without a newline is only buffered: programs print progress bars and dots in many such pieces.
_SHORT = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of one rank's output one cell shows."""

    lines: int = 2_000
    bytes: int = 1_000_000
    rich: int = 200
    rich_bytes: int = 20_000_000
    tail: int = 20


class RankLines:
    """The lines of one rank: those that may be shown, the unfinished ones, and the tail of those that were cut.

    Args:
        limits: the limits on what may be shown.
    """

    __slots__ = ("_goes_on", "_limits", "_rich_size", "_screens", "_size", "_tail_size", "cut", "cut_rich", "cut_size",
                 "lines", "rich", "tail", "unfinished")  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        #: The number of admitted lines; `cut` lines with `cut_size` characters were not admitted.
        self.lines = 0
        self._size = 0
        self.cut = 0
        self.cut_size = 0
        self._goes_on = False  # whether the last cut line is still unfinished
        #: The number of admitted rich results; `cut_rich` were not admitted.
        self.rich = 0
        self._rich_size = 0
        self.cut_rich = 0
        #: The last lines that were cut.
        self.tail: deque[str] = deque()
        self._tail_size = 0
        #: The unfinished line of each stream that does not move the cursor.
        self.unfinished: dict[str, str] = {}
        self._screens: dict[str, TerminalScreen] = {}

    def feed(self, stream: str, text: str) -> Sequence[str]:
        """Return the lines that `text` completes and that may be shown. `text` may end in the middle of a line."""
        if stream in self._screens or STEERING.search(text):
            return [line for line in self._steered(stream, text) if self._admit(line)]
        if "\n" not in text and len(text) < _SHORT:
            unfinished = self.unfinished.get(stream, "") + text
            if len(unfinished) < LONGEST_LINE:
                self.unfinished[stream] = unfinished
                return ()
        if self.lines >= self._limits.lines:
            text = self._skip(stream, text)
        *complete, unfinished = (self.unfinished.get(stream, "") + text).split("\n")
        shown: list[str] = []
        for line in complete:
            line = self._begun(line.removesuffix("\r"), shown)
            if self._admit(line):
                shown.append(line)
        self.unfinished[stream] = self._begun(unfinished, shown)
        return shown

    def _begun(self, line: str, shown: list[str]) -> str:
        """Append the first pieces of a line that is too long to `shown`, and return the last piece."""
        at = 0
        while len(line) - at >= LONGEST_LINE:
            piece = line[at : at + LONGEST_LINE]
            at += LONGEST_LINE
            if self._admit(piece, goes_on=True):
                shown.append(piece)
        return line[at:] if at else line

    def _steered(self, stream: str, text: str) -> list[str]:
        """Return the lines completed by a text that moves the cursor, or follows a text that did."""
        screen = self._screens.get(stream)
        if screen is None:
            screen = self._screens[stream] = TerminalScreen()
            text = self.unfinished.pop(stream, "") + text
        final = screen.write(text)
        plain = screen.plain()
        if plain is not None:
            del self._screens[stream]
            self.unfinished[stream] = plain
        return final

    def settle(self, without: str = "") -> Iterator[tuple[str, str]]:
        """Yield the lines above the cursors that may be shown, each with its stream: later output appears below them.

        Args:
            without: a stream to leave unchanged.
        """
        for stream, screen in list(self._screens.items()):
            if stream != without:
                for line in screen.take_above():
                    if self._admit(line):
                        yield stream, line

    @property
    def steers(self) -> bool:
        """Return whether a stream has moved its cursor."""
        return bool(self._screens)

    def live(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the lines that may still change, by stream."""
        for stream, unfinished in self.unfinished.items():
            if line := unfinished.rstrip("\r"):
                yield stream, (line,)
        for stream, screen in self._screens.items():
            if lines := screen.lines():
                yield stream, lines

    def finish(self) -> Iterator[tuple[str, str]]:
        """Yield the unfinished lines that may be shown, each with its stream."""
        for stream, lines in list(self.live()):
            for line in lines:
                if self._admit(line):
                    yield stream, line
        self.unfinished.clear()
        self._screens.clear()

    def admit_result(self, text: str) -> Sequence[str]:
        """Return the part of a multi-line result that may be shown: all of it in one piece, or as many lines as fit."""
        lines = text.split("\n")
        size = len(text) + 1
        if self.lines + len(lines) > self._limits.lines or self._size + size > self._limits.bytes:
            return [line for line in lines if self._admit(line)]
        self.lines += len(lines)
        self._size += size
        return (text,)

    def admit_rich(self, size: int) -> bool:
        """Return whether a rich result of this size may be shown."""
        if self.rich >= self._limits.rich or self._rich_size + size > self._limits.rich_bytes:
            self.cut_rich += 1
            return False
        self.rich += 1
        self._rich_size += size
        return True

    def release_rich(self, size: int) -> None:
        """Allow another rich result, because one of this size is no longer shown."""
        self.rich -= 1
        self._rich_size -= size

    def close(self) -> None:
        """Admit no more lines."""
        self._limits = replace(self._limits, lines=min(self.lines, self._limits.lines))

    def _admit(self, line: str, goes_on: bool = False) -> bool:
        """Return whether a line, or an unfinished piece of one (`goes_on`), may be shown."""
        size = len(line) + (not goes_on)
        if self.lines >= self._limits.lines or self._size + size > self._limits.bytes:
            self._cut(line, goes_on)
            return False
        self.lines += 1
        self._size += size
        return True

    def _cut(self, line: str, goes_on: bool) -> None:
        self.cut += not goes_on
        self.cut_size += len(line) + (not goes_on)
        line = line if len(line) <= _LONGEST_IN_TAIL else f"…{line[-_LONGEST_IN_TAIL:]}"
        if self._goes_on and self.tail:  # the rest of a line whose beginning was cut
            self._tail_size -= len(self.tail.pop())
        self._goes_on = goes_on
        self.tail.append(line)
        self._tail_size += len(line)
        while self.tail and (len(self.tail) > self._limits.tail or self._tail_size > _TAIL_BYTES):
            self._tail_size -= len(self.tail.popleft())

    def _skip(self, stream: str, text: str) -> str:
        """Count the lines of `text` without splitting it. Return the last few lines."""
        end = len(text)
        for _ in range(self._limits.tail + 1):
            end = text.rfind("\n", 0, end)
            if end < 0:
                return text
        before = self.unfinished.get(stream, "")
        self.unfinished[stream] = ""
        self.cut += text.count("\n", 0, end + 1)
        self.cut_size += len(before) + end + 1
        return text[end + 1 :]
