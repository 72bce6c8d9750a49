"""Programs that a user would run in a terminal, with their output."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


class Running:
    """A running program with its input and output."""

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        self._log = folder / f"output-{time.monotonic_ns()}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "PATH": path_with(Path(command[0])), "OMP_NUM_THREADS": "1", **environ},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        """Return the output so far."""
        return self._log.read_text(errors="replace")

    def until(self, enough: Callable[[str], bool], seconds: float) -> str:
        """Return the output once it is sufficient, the program has ended, or the time is over."""
        end = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            text = self.output()
            if enough(text) or ended or time.monotonic() > end:
                return text
            time.sleep(0.02)

    def write(self, line: str) -> None:
        """Type a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """End the program and its descendants."""
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            family = [*top.children(recursive=True), top]
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, 10)
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()


@contextmanager
def running(command: Sequence[str], folder: Path, **environ: str) -> Generator[Running]:
    """Run a program for the duration of the context."""
    program = Running(command, folder, environ)
    try:
        yield program
    finally:
        program.end()


def path_with(program: Path) -> str:
    """Return the search path with a program's folder first, as in its activated environment."""
    return f"{program.parent}:{os.environ['PATH']}"


def shell(command: str, folder: Path, python: Path) -> str:
    """Execute a command line in the environment of an interpreter; return its output."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path_with(python)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    return done.stdout.decode(errors="replace").replace("\0", "\n")


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
