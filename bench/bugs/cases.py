"""The six bugs, folders with one of them to debug, and the sessions of tools."""

from __future__ import annotations

import random
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"

#: name -> what a user sees first.
BUGS = {
    "early": "a rank leaves the training loop early: hang",
    "order": "a rank issues its collectives in another order: hang",
    "loader": "the data loader of a rank retries for ever: hang",
    "wedged": "native code of a rank keeps the interpreter lock: hang",
    "crash": "a rank raises an exception",
    "gradient": "a rank does not divide one gradient: wrong results",
}
#: The bugs that end in a hang.
HANGS = ("early", "order", "loader", "wedged")
#: Ends the lines of a program at which the guilty rank can be.
MARK = "  # guilty"
#: The time that other ranks need to enter their collectives after the bug (seconds).
SETTLE = 1.0
#: The time limit for a program to reach its bug (seconds).
PATIENCE = 120.0


@dataclass
class Case:
    """A folder with a buggy program, `train.py`, ready to run."""

    bug: str
    folder: Path
    ranks: int
    guilty: int
    step: int
    lines: list[int]
    """Where the guilty rank stands once the bug has happened: in the training loop, and in what that calls."""

    @property
    def program(self) -> Path:
        """The file with the bug."""
        return self.folder / "train.py"

    def line_of(self, text: str) -> int:
        """Return the number of the line that begins with this text."""
        found = self.program.read_text().splitlines()
        return next(n for n, line in enumerate(found, 1) if line.strip().startswith(text))

    def edit(self, before: str, *lines: str) -> None:
        """Insert lines before the one that begins with ``before``, with the same indentation."""
        found = self.program.read_text().splitlines()
        at = self.line_of(before) - 1
        indent = re.match(r" *", found[at])
        assert indent is not None
        found[at:at] = [indent.group() + line for line in lines]
        added = range(at + 1, at + 1 + len(lines))
        same = [*added] if at + 1 in self.lines else []  # the inserted line is at the same place
        self.lines = same + [line + len(lines) if line > at else line for line in self.lines]
        self.program.write_text("\n".join(found) + "\n")

    def again(self) -> None:
        """Forget that the bug has happened, before another run."""
        (self.folder / "happened").unlink(missing_ok=True)

    def has_happened(self) -> bool:
        """Return whether the guilty rank has reached its bug."""
        return (self.folder / "happened").exists()

    def since(self) -> float:
        """Return the seconds since the bug."""
        return time.time() - (self.folder / "happened").stat().st_mtime

    def wait(self, settle: float = SETTLE) -> None:
        """Wait until the bug has happened and all ranks have reached their final places.

        Raises:
            TimeoutError: the bug does not happen.
        """
        end = time.monotonic() + PATIENCE
        while not self.has_happened():
            if time.monotonic() > end:
                raise TimeoutError(f"the bug {self.bug!r} did not happen within {PATIENCE:.0f} s; see {self.folder}")
            time.sleep(0.02)
        time.sleep(settle)


def prepare(bug: str, folder: Path, ranks: int, seed: int) -> Case:
    """Write a program with a bug on a seeded rank, from a seeded step on, into a folder."""
    dice = random.Random(f"{seed} {bug}")
    guilty, step = dice.randrange(ranks), dice.randrange(2, 6)
    folder.mkdir(parents=True)
    shutil.copy(PROGRAMS / "parts.py", folder)
    program = (PROGRAMS / f"{bug}.py").read_text()
    lines = [n for n, line in enumerate(program.splitlines(), 1) if line.endswith(MARK)]
    # The copy does not contain what would reveal the bug to a reader.
    (folder / "train.py").write_text(re.sub(r"  # (guilty|the bug.*)$", "", program, flags=re.MULTILINE))
    text = (PROGRAMS / "seeded.py").read_text()
    text = text.replace("GUILTY = 0", f"GUILTY = {guilty}").replace("STEP = 0", f"STEP = {step}")
    (folder / "seeded.py").write_text(text)
    return Case(bug, folder, ranks, guilty, step, lines)


@dataclass
class Session:
    """Commands of a session and their output; the clock starts with the first command."""

    tool: str
    case: Case
    spoken: list[tuple[str, str]] = field(default_factory=list)
    """Each command, and what came back; the first command is empty where something is shown before any."""
    seconds: float = 0.0
    found: str = ""
    """'named': the tool singles out the guilty rank, with its line; 'by eye': both stand there, among all the other
    ranks; '': neither does."""
    note: str = ""
    _begin: float = 0.0

    def type(self, command: str) -> None:
        """Record that the user types a command or makes an edit."""
        self.start()
        self.spoken.append((command, ""))

    def start(self, ago: float = 0.0) -> None:
        """Start the clock unless it runs, now or this many seconds ago."""
        self._begin = self._begin or time.perf_counter() - ago

    def shows(self, text: str) -> str:
        """Record output, and return it."""
        command, before = self.spoken.pop() if self.spoken else ("", "")
        self.spoken.append((command, f"{before}\n{text}".strip("\n")))
        self.seconds = time.perf_counter() - self._begin
        return text

    @property
    def commands(self) -> list[str]:
        """The typed commands."""
        return [command for command, _ in self.spoken if command]

    @property
    def output(self) -> str:
        """All output."""
        return "\n".join(answer for _, answer in self.spoken)

    @property
    def output_lines(self) -> int:
        """The number of lines of the output."""
        return sum(1 for line in self.output.splitlines() if line.strip())

    def transcript(self, most: int) -> str:
        """Render commands and output; long output is cut."""
        parts = [(f"> {command}" if command else "", cut(answer, most)) for command, answer in self.spoken]
        return "\n".join(text for part in parts for text in part if text)


def cut(text: str, most: int) -> str:
    """Cut a text to a number of lines of at most 160 characters each, and paths to their last two components."""
    text = re.sub(r"(?<![\w.:/$])/(?:[\w.+-]+/)+(?=[\w.+-]+/[\w.+-]+)", ".../", text)
    lines = [line if len(line) <= 160 else line[:157] + "..." for line in text.splitlines() if line.strip()]
    if len(lines) > most:
        lines = [*lines[:most], f"... {len(lines) - most} more lines"]
    return "\n".join(lines)
