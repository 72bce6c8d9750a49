"""Fixtures for tests of the actor API: meshes of real processes, faults as values, and scripts of their own."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from tests.actor.actors import PATIENCE, Basic, hook
from tests.conftest import describe, stop_all_meshes, wait_until
from tests.workers import workers as workers

Procs = Callable[..., ProcMesh]


@pytest.fixture
def procs() -> Procs:
    """``procs(4)``: so many processes; ``procs(hosts=2, gpus=2)``: with dimensions."""

    def make(n: int | None = None, /, **sizes: int) -> ProcMesh:
        return this_host().spawn_procs(per_host=sizes if n is None else {"gpus": n})

    return make


@pytest.fixture
def four(procs: Procs) -> Any:
    """Four ``Basic`` actors."""
    return procs(4).spawn("basic", Basic)


@pytest.fixture
def two(procs: Procs) -> Any:
    """Two ``Basic`` actors."""
    return procs(2).spawn("basic", Basic)


@pytest.fixture
def one(procs: Procs) -> Any:
    """One ``Basic`` actor."""
    return procs(1).spawn("basic", Basic)


@pytest.fixture(autouse=True)
def no_faults(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[None]:
    """What nobody expected did not happen; the meshes of the test end with it."""
    with _faults() as seen:
        yield
        if not request.node.get_closest_marker("own_runtime"):
            stop_all_meshes("the test is over")
    if "faults" not in request.fixturenames:
        assert seen.empty(), f"a fault that nobody expected: {seen.get().report()}"


_seen: queue.Queue[Any] = queue.Queue()


@contextmanager
def _faults() -> Iterator[queue.Queue[Any]]:
    while not _seen.empty():
        _seen.get()
    with hook(_seen.put):
        yield _seen


@pytest.fixture
def faults() -> queue.Queue[Any]:
    """Faults that reach the root, as they come; in a test without it there may be none."""
    return _seen


@dataclass
class Script:
    """A Python script in a process of its own, and everything that it starts."""

    process: subprocess.Popen[str]
    token: str
    folder: str

    def line(self) -> str:
        """The next line of its stdout."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise AssertionError(f"the script ended: {self.process.wait(PATIENCE)}, {self.stderr()}")
        return text.rstrip("\n")

    def stderr(self) -> str:
        """What is left of its stderr, when it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def finish(self) -> tuple[int, str, str]:
        """Its exit code, and the rest of its stdout and stderr."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        err = self.stderr()
        return self.process.wait(PATIENCE), out, err

    def kill(self) -> None:
        """SIGKILL for the script alone."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)

    def survivors(self) -> set[int]:
        """Living processes that the script started, whoever their parent is now."""
        mark = f"MK_TEST_SCRIPT={self.token}".encode()
        found = set()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
        return found - {self.process.pid}

    def sockets(self) -> set[str]:
        """Unix sockets in its run folder that are still open somewhere."""
        rows = Path("/proc/net/unix").read_text().splitlines()[1:]
        return {row.split()[-1] for row in rows if row.split()[-1].startswith(self.folder)}

    def check_gone(self) -> None:
        """Nothing that it started is left: no process, no run folder, no socket."""
        try:
            wait_until(lambda: not self.survivors(), "all processes of the script have ended", 10)
        except AssertionError:
            left = "\n".join(describe(pid) for pid in self.survivors())
            raise AssertionError(f"the script left processes behind:\n{left}") from None
        wait_until(lambda: not os.listdir(self.folder), "the script's run folder is gone", 5)
        assert not self.sockets()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], Script]]:
    """Start a script from its text; at the end of the test nothing of it may be left."""
    scripts: list[Script] = []

    def start(text: str) -> Script:
        path = tmp_path / f"script{len(scripts)}.py"
        path.write_text(textwrap.dedent(text))
        token = uuid.uuid4().hex
        folder = tempfile.mkdtemp(prefix="mkt")  # short: Unix socket paths have 108 bytes
        env = {**os.environ, "MK_TEST_SCRIPT": token, "TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=tmp_path,
        )
        scripts.append(Script(process, token, folder))
        return scripts[-1]

    yield start
    try:
        for each in scripts:
            if each.process.poll() is None:
                each.kill()
            for stream in (each.process.stdout, each.process.stderr):
                if stream is not None:
                    stream.close()
            each.check_gone()
    finally:
        for each in scripts:
            for pid in each.survivors():
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(each.folder, ignore_errors=True)
