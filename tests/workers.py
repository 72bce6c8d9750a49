"""Workers for tests: real ones, each a process of its own on this machine.

Over ``tcp`` each is a site of its own, as if on another host: nothing is shared between them. ``ipc`` workers are of
this machine's site. Use the fixture: ``from tests.workers import workers`` in a conftest, then ``workers(2, "tcp")``.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import alive, children, describe, wait_until
from tests.waiting import patience

#: How long a test waits for what must happen (seconds); never reached when things work.
PATIENCE = patience(60.0)


class Worker:
    """``monarch-kernel worker``, listening; what it logs is in a file.

    Args:
        descriptors: how many it may have open; 0: as this process.
    """

    def __init__(
        self,
        address: str,
        name: str,
        folder: Path,
        *options: str,
        env: dict[str, str] | None = None,
        descriptors: int = 0,
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        command = [sys.executable, "-m", "monarch_kernel", "worker", "--listen", address, "--name", name, *options]
        if descriptors:
            command = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *command]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        assert self.process.stdout is not None
        #: The one line that it prints.
        self.said = self.process.stdout.readline().decode()
        if not self.said:
            self.process.stdout.close()
            raise AssertionError(f"worker {name} did not start, code {self.process.wait(PATIENCE)}:\n{self.log()}")
        self.url = self.said.split()[-1]
        self.pid = self.process.pid
        self.run_dir = run_folder(self.pid)

    def log(self) -> str:
        """All that it has logged."""
        return self._log.read_text(errors="replace")

    def ranks(self) -> set[int]:
        """Its child processes, except those that it has without a controller."""
        return {pid for pid in children(self.pid) if _session(pid) not in (self.pid, 0)}

    def wait_idle(self) -> None:
        """Until nothing of any controller is left here."""
        try:
            wait_until(lambda: not self.ranks(), f"nothing is left on {self.name}")
        except AssertionError as e:
            left = "\n".join(describe(pid) for pid in self.ranks())
            raise AssertionError(f"{e}: {left}\n{self.log()}") from None

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal, and wait until it and all below it have ended. Its exit status."""
        family = {self.pid, *children(self.pid)}
        if self.process.poll() is None:
            os.kill(self.pid, number)
        status = self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        wait_until(lambda: not any(map(alive, family)), f"all processes of worker {self.name} have ended")
        wait_until(lambda: not os.path.exists(self.run_dir), f"the run folder of worker {self.name} is gone")
        return status


@functools.cache
def shared_key() -> str:
    """The key of all teams of this process: a controller has one."""
    from monarch_kernel.protocol.keys import make_key_file

    folder = tempfile.mkdtemp(prefix="mk-key-", dir="/tmp")
    atexit.register(shutil.rmtree, folder)
    make_key_file(f"{folder}/key")
    return f"{folder}/key"


class Team:
    """Some workers, and their key if they have one."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.folder = folder
        self.transport = transport
        self.key_file: str | None = None
        self.members: list[Worker] = []
        self._attached: list[Any] = []
        if transport == "tcp":
            self.key_file = shared_key()

    def start(self, address: str | None = None, env: dict[str, str] | None = None, descriptors: int = 0) -> Worker:
        """One more worker."""
        name = f"node{len(self.members)}"
        address = address or ("tcp://127.0.0.1:0" if self.transport == "tcp" else f"ipc://{self.folder}/{name}.sock")
        options = ["--key-file", self.key_file] if self.key_file else []
        worker = Worker(address, name, self.folder, *options, env=env, descriptors=descriptors)
        self.members.append(worker)
        return worker

    @property
    def urls(self) -> list[str]:
        return [worker.url for worker in self.members]

    def __getitem__(self, index: int) -> Worker:
        return self.members[index]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.members)

    def attach(self, **options: Any) -> Any:
        """A host mesh of all of them; what runs on it is stopped before they end."""
        from monarch_kernel.actor import attach_to_workers

        hosts = attach_to_workers(workers=self.urls, key_file=self.key_file, **options)
        self._attached.append(hosts)
        return hosts

    def first(self, count: int) -> Team:
        """Some of these workers as a team of their own, to be detached before the whole one is closed."""
        part = Team(self.folder, self.transport)
        part.members = self.members[:count]
        return part

    def detach(self) -> None:
        """Stop what this process has started there."""
        for hosts in self._attached:
            if not hosts._down and not hosts._system._closed:
                hosts.stop("the test is over").get(PATIENCE)
        self._attached.clear()

    def close(self) -> None:
        """Stop what this process has started there, and end the workers."""
        self.detach()
        for worker in self.members:
            worker.end()


def environ_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def run_folder(pid: int) -> str:
    """The run folder of a worker, or of a process that it has started."""
    base = os.path.realpath(tempfile.gettempdir())
    return os.path.join(base, f"monarch-{os.getuid()}-{environ_of(pid)['MONARCH_KERNEL_RUN']}")


def _session(pid: int) -> int:
    """The session of a process, which fork servers share with their worker, and ranks do not; 0: it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


Start = Callable[[int, str], Team]


@contextmanager
def team(transport: str) -> Iterator[Team]:
    """A team without workers yet; those that it gets end with the block."""
    folder = Path(tempfile.mkdtemp(prefix="mk-workers-", dir="/tmp"))
    made = Team(folder, transport)
    try:
        yield made
    except BaseException:
        for worker in made:
            sys.stderr.write(f"--- log of {worker.name}:\n{worker.log()}")
        raise
    finally:
        made.close()
        shutil.rmtree(folder)


@pytest.fixture
def workers() -> Iterator[Start]:
    """``workers(2, "tcp")``: so many workers that listen at such addresses."""
    with team("ipc") as near, team("tcp") as far:
        teams = {"ipc": near, "tcp": far}

        def start(n: int, transport: str) -> Team:
            for _ in range(n):
                teams[transport].start()
            return teams[transport]

        yield start
