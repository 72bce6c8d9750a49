"""Reduces what Python's fault handler writes when a rank crashes to what the user needs; has no side effects."""

from __future__ import annotations

import re

_BEGIN = b"Fatal Python error: "
# Patterns, compiled with the first dump, as every agent loads this module when it starts.
# Lines of a dump, as CPython's traceback.c writes them.
_DUMP = (
    rb"Fatal Python error: |Stack \(|(?:Current thread|Thread) 0x|  File \"|  \.\.\.|  <|<truncated|Extension modules: "
    rb"|\s*$"
)
_FRAME = rb'  File "(?P<file>[^"]*)", line \d+'
# Frames between the start of a rank and user code: the runtime's, and those of the interpreter's start.
_RUNTIME = rb"[/\\]monarch_kernel[/\\](?:runtime|protocol|kernel)[/\\]|^<string>$|^<frozen runpy>$"


class CrashFilter:
    """Passes a rank's stderr through, but drops runtime frames and the list of extension modules from crash dumps.

    A dump is the last output of a process, but that process may be a child of the rank, so other lines may follow.
    """

    def __init__(self) -> None:
        self._in_dump = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The part of the next bytes to show."""
        if not self._in_dump:
            at = data.find(_BEGIN)
            if at < 0:
                return data
            self._in_dump = True
            return data[:at] + self._lines(data[at:])
        return self._lines(data)

    def close(self) -> bytes:
        """The part of an unfinished last line to show."""
        rest, self._rest = self._rest, b""
        return rest if self._shows(rest) else b""

    def _lines(self, data: bytes) -> bytes:
        *lines, self._rest = (self._rest + data).split(b"\n")
        shown: list[bytes] = []
        for at, line in enumerate(lines):
            if not re.match(_DUMP, line):
                self._in_dump = False
                rest = b"\n".join([*lines[at:], self._rest])
                self._rest = b""
                return b"".join(shown) + rest
            if self._shows(line):
                shown.append(line + b"\n")
        return b"".join(shown)

    def _shows(self, line: bytes) -> bool:
        frame = re.match(_FRAME, line)
        if frame is not None:
            return not re.search(_RUNTIME, frame["file"])
        return bool(line.strip()) and not line.startswith(b"Extension modules: ")
