"""Remove terminal control sequences from text of other programs: names of hosts, reports, errors, output of ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TextIO, cast

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
