"""Hosts that receive trees: workers of this machine, or its network namespaces."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Protocol

from bench.environments import ROOT

#: The time limit to start or end a program (seconds).
PATIENCE = 60.0
#: The interval of measurements of processes' memory (seconds).
LOOK = 0.02


class Program(Protocol):
    """A process of the bench, wherever it runs."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[str]: ...

    @property
    def stdout(self) -> IO[str]: ...

    def wait(self, timeout: float = ...) -> int: ...

    def signal(self, number: int) -> None: ...


class LocalProgram:
    """A process of this machine, in a separate session."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: IO[str]) -> None:
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **env},
            cwd=ROOT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def stdin(self) -> IO[str]:
        assert self._popen.stdin is not None
        return self._popen.stdin

    @property
    def stdout(self) -> IO[str]:
        assert self._popen.stdout is not None
        return self._popen.stdout

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait for its end; return its exit status."""
        return self._popen.wait(timeout)

    def signal(self, number: int) -> None:
        """Send it a signal if it is still running."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)


class Place:
    """Some hosts and a client beside them. In this class, all are processes of this machine.

    Attributes:
        count: the number of hosts.
        folder: a folder on disk with a subfolder for each host.
    """

    kind = "workers of this machine"

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self.folder = folder
        self._log = (folder / "log").open("a")

    def address(self, host: int | None) -> str:
        """Return the address of a host; None: of the client."""
        del host
        return "127.0.0.1"

    def disk(self, host: int) -> Path:
        """Return the folder of a host."""
        path = self.folder / f"host{host}"
        path.mkdir(exist_ok=True)
        return path

    def start(self, host: int | None, command: Sequence[str], env: Mapping[str, str] | None = None) -> Program:
        """Start a program on a host; None: on the client."""
        del host
        return LocalProgram(command, {"PYTHONUNBUFFERED": "1", **(env or {})}, self._log)

    def log(self) -> str:
        """Return the end of the output of all programs."""
        self._log.flush()
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the hosts; their files stay."""
        self._log.close()


class NamespacePlace(Place):
    """The same with network namespaces: the hosts are connected only by the network, but share one disk."""

    kind = "network namespaces"

    def __init__(self, count: int, folder: Path, rate: float | None = None) -> None:
        from tests.network.hosts import make_network

        self._network = make_network(["client", *(f"host{n}" for n in range(count))])
        try:
            if rate is not None:
                for host in self._network.hosts:
                    self._network.limit(host, rate)
        except BaseException:
            self._network.close()
            raise
        super().__init__(count, folder)

    def address(self, host: int | None) -> str:
        return self._network["client" if host is None else f"host{host}"].address

    def start(self, host: int | None, command: Sequence[str], env: Mapping[str, str] | None = None) -> Program:
        where = self._network["client" if host is None else f"host{host}"]
        return where.start(command, env, cwd=ROOT, stderr=self._log)

    def close(self) -> None:
        self._network.close()
        super().close()


@contextmanager
def place(count: int, folder: Path, namespaces: bool = True, rate: float | None = None) -> Generator[Place]:
    """Create this many hosts: namespaces if possible and wanted, else workers of this machine.

    Args:
        rate: the bandwidth of the cable of each host, and of the client, in each direction (bits/s); None: unlimited.

    Raises:
        CannotMakeHosts: namespaces with limited cables cannot be created.
    """
    from tests.network.hosts import CannotMakeHosts

    folder.mkdir(parents=True)
    try:
        made = NamespacePlace(count, folder, rate) if namespaces else Place(count, folder)
    except CannotMakeHosts as why:
        if rate is not None:
            raise
        print(f"hosts are workers of this machine: {why}", file=sys.stderr)
        made = Place(count, folder)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def running(
    where: Place, host: int | None, command: Sequence[str], env: Mapping[str, str] | None = None
) -> Generator[Program]:
    """Run a program for the duration of the block."""
    program = where.start(host, command, env)
    try:
        yield program
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            program.signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(PATIENCE)
                break
        program.stdin.close()
        program.stdout.close()


@contextmanager
def workers(where: Place, stores: Sequence[Path], key: Path) -> Generator[tuple[list[str], list[Program]]]:
    """Start a worker of ours for each store, on hosts in turn; yield their URLs, and the workers."""
    with ExitStack() as all_of_them:
        started: list[Program] = []
        for number, store in enumerate(stores):
            host = number % where.count
            url = f"tcp://{where.address(host)}:0"
            command = [sys.executable, "-m", "monarch_kernel", "worker", "--listen", url, "--key-file", str(key)]
            env = {"MONARCH_KERNEL_SYNC_FOLDER": str(store)}
            started.append(all_of_them.enter_context(running(where, host, [*command, "--name", f"host{number}"], env)))
        urls = [program.stdout.readline().split() for program in started]
        if not all(urls):
            raise RuntimeError(f"a worker did not start:\n{where.log()}")
        yield [url[-1] for url in urls], started


class PeakMemory:
    """The largest resident size of any descendant of some processes over a period (MB).

    A process that begins and ends between two measurements is missed.
    """

    def __init__(self, *roots: int) -> None:
        self._roots = roots
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._peaks: dict[int, float] = {}

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def most(self) -> float:
        """The size of the largest process (MB)."""
        return max(self._peaks.values(), default=0.0)

    def _watch(self) -> None:
        while True:
            for pid in family(*self._roots):
                with contextlib.suppress(OSError, StopIteration):
                    status = Path(f"/proc/{pid}/status").read_text().splitlines()
                    line = next(line for line in status if line.startswith("VmHWM:"))
                    self._peaks[pid] = max(self._peaks.get(pid, 0.0), int(line.split()[1]) / 1024)
            if self._end.wait(LOOK):
                return


def family(*roots: int) -> list[int]:
    """Return processes and all their descendants."""
    found = list(roots)
    for pid in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found
