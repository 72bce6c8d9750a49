"""A command at a pseudo-terminal, as a person has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

from monarch_kernel.launchers.remote_shell import _TAKE_TERMINAL
from tests.cli.conftest import Cli
from tests.waiting import patience

DEADLINE = patience(20.0)


class Terminal:
    """Runs a command at a terminal of 24 rows and 100 columns."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self._master, slave = pty.openpty()
        self.resize(24, 100)
        self.before = termios.tcgetattr(slave)
        self._slave = slave  # kept open, so that its settings can be read after the command
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, *cli.line(*words)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=cli.env,
            cwd=cli.folder,
            start_new_session=True,
        )
        self.shown = ""

    def resize(self, rows: int, columns: int) -> None:
        """Change its size."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        """Type some keys."""
        os.write(self._master, text.encode())

    def until(self, pattern: str) -> re.Match[str]:
        """Wait until a pattern is shown; what was shown up to there is not searched again."""
        end = time.monotonic() + DEADLINE
        while (found := re.search(pattern, self.shown)) is None:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._master], [], [], left)[0]:
                raise AssertionError(f"{pattern!r} was not shown, but:\n{self.shown}")
            self.shown += os.read(self._master, 65536).decode(errors="replace")
        self.shown = self.shown[found.end() :]
        return found

    @property
    def restored(self) -> bool:
        """Whether its settings are those from before the command."""
        return termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        """End what runs at it."""
        self.process.kill()
        self.process.wait()
        os.close(self._slave)
        os.close(self._master)
