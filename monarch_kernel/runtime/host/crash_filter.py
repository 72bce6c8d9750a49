"""What Python's fault handler writes when a rank crashes, cut to what its user needs. Pure."""

from __future__ import annotations

import re

_BEGIN = b"Fatal Python error: "
# Lines of a dump, as CPython's traceback.c writes them.
_DUMP = re.compile(
    rb"Fatal Python error: |Stack \(|(?:Current thread|Thread) 0x|  File \"|  \.\.\.|  <|<truncated|Extension modules: "
    rb"|\s*$"
)
_FRAME = re.compile(rb'  File "(?P<file>[^"]*)", line \d+')
# How a rank gets to user code: our own frames, and the interpreter's start.
_RUNTIME = re.compile(rb"[/\\]monarch_kernel[/\\](?:runtime|protocol|kernel)[/\\]|^<string>$|^<frozen runpy>$")


class CrashFilter:
    """Passes what a rank writes to stderr; of a crash it leaves out our own frames and the list of extension modules.

    A dump is the last that a process writes, but the process may be a child of the rank's, so that other lines may
    follow.
    """

    def __init__(self) -> None:
        self._in_dump = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """What to show of the next bytes."""
        if not self._in_dump:
            at = data.find(_BEGIN)
            if at < 0:
                return data
            self._in_dump = True
            return data[:at] + self._lines(data[at:])
        return self._lines(data)

    def close(self) -> bytes:
        """What to show of an unfinished last line."""
        rest, self._rest = self._rest, b""
        return rest if self._shows(rest) else b""

    def _lines(self, data: bytes) -> bytes:
        *lines, self._rest = (self._rest + data).split(b"\n")
        shown: list[bytes] = []
        for at, line in enumerate(lines):
            if not _DUMP.match(line):
                self._in_dump = False
                rest = b"\n".join([*lines[at:], self._rest])
                self._rest = b""
                return b"".join(shown) + rest
            if self._shows(line):
                shown.append(line + b"\n")
        return b"".join(shown)

    def _shows(self, line: bytes) -> bool:
        frame = _FRAME.match(line)
        if frame is not None:
            return not _RUNTIME.search(frame["file"])
        return bool(line.strip()) and not line.startswith(b"Extension modules: ")
