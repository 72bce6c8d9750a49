"""Workers and controllers on test hosts, as the tests see them from outside."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch_kernel.protocol.keys import make_key_file
from tests.conftest import wait_until
from tests.network.hosts import Host, Network, Process
from tests.waiting import patience

PORT = 26600
#: For tests in which a host vanishes, and which do not care how soon that is seen.
IMPATIENT = {"MONARCH_KERNEL_HEARTBEAT_TIMEOUT": "1"}
#: How long a test waits for what must happen (seconds); never reached when things work.
PATIENCE = patience(40.0)


class ProgramFailed(Exception):
    """A program raised on the controller: ``kind`` names the exception, ``text`` is its message."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind} on the controller: {text}\n{trace}")
        self.kind = kind
        self.text = text


class Worker:
    """``monarch-kernel worker`` on a host; its log is a file."""

    def __init__(
        self, host: Host, key_file: Path, folder: Path, env: Mapping[str, str] | None = None, *options: str
    ) -> None:
        self.host = host
        self.url = f"tcp://{host.address}:{PORT}"
        self._log = folder / f"{host.name}.log"
        self._log.touch()
        self._seen = self._log.stat().st_size
        listen = ["--listen", self.url, "--key-file", str(key_file)]
        command = [sys.executable, "-m", "monarch_kernel", "worker", *listen, *options]
        with self._log.open("ab") as log:
            self.process: Process = host.start(command, env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def log(self) -> str:
        """What it has said."""
        return self._log.read_bytes()[self._seen :].decode(errors="replace")

    def wait_for_log(self, text: str) -> str:
        """Wait until it has said this; its whole log."""
        wait_until(lambda: text in self.log() or self.process.ended, f"{text!r} in the log of {self.host.name}")
        assert text in self.log(), f"the worker on {self.host.name} ended, and had said:\n{self.log()}"
        return self.log()

    def wait_until_listening(self) -> None:
        """Wait until connections are accepted."""
        self.wait_for_log("listens at")


class Run:
    """A program that runs on a controller."""

    def __init__(self, controller: Controller, name: str) -> None:
        self._controller = controller
        self._name = name

    def heard(self, timeout: float = PATIENCE) -> Any:
        """The next thing that the program says."""
        return self._answer("said", timeout)

    def go_on(self, word: str = "") -> None:
        """End its ``pause``, which returns the word."""
        self._controller.process.stdin.write(word + "\n")
        self._controller.process.stdin.flush()

    def result(self, timeout: float = PATIENCE) -> Any:
        """What it returns.

        Raises:
            ProgramFailed: it raised.
        """
        return self._answer("value", timeout)

    def _answer(self, kind: str, timeout: float) -> Any:
        answer = self._controller.answer(f"{self._name} has {kind!r}", timeout)
        if "error" in answer:
            trace = f"{answer['traceback']}\n{self._controller.all_logs()}"
            raise ProgramFailed(answer["error"], answer["message"], trace)
        assert kind in answer, f"{self._name} was to give {kind!r}, but it gave {answer}"
        return answer[kind]


class Controller:
    """``driver.py`` on a host. Programs are functions of test modules; see there."""

    def __init__(
        self,
        host: Host,
        workers: Sequence[str],
        key_file: Path | None,
        folder: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.workers = list(workers)
        self._log = folder / f"{host.name}.{time.monotonic_ns()}.log"
        keys = {"MONARCH_KERNEL_KEY_FILE": str(key_file)} if key_file is not None else {}
        command = [sys.executable, "-m", "tests.network.driver"]
        with self._log.open("wb") as log:
            self.process = host.start(command, {**keys, **(env or {})}, stderr=log)
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self, program: Callable[..., Any], *args: Any, workers: Sequence[str] | None = None) -> Run:
        """Start a program, with other workers than usual if any are named."""
        name = f"{program.__module__}:{program.__qualname__}"
        request = {"program": name, "workers": self.workers if workers is None else list(workers), "args": args}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Run(self, name)

    def run(self, program: Callable[..., Any], *args: Any, workers: Sequence[str] | None = None) -> Any:
        """Run a program to its end; what it returns."""
        return self.begin(program, *args, workers=workers).result()

    def answer(self, what: str, timeout: float) -> dict[str, Any]:
        """The next answer from the other end."""
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"not within {timeout} s: {what}\n{self.all_logs()}") from None
        if not line:
            raise AssertionError(f"the controller ended ({self.process.wait()}) before {what}:\n{self.all_logs()}")
        return json.loads(line)

    def log(self) -> str:
        """All that it has put out, and what its procs have printed."""
        return self._log.read_text(errors="replace")

    def all_logs(self) -> str:
        """The ends of its log and of its workers', for a failure message."""
        logs = sorted(self._log.parent.glob("*.log"), key=lambda log: log.stat().st_mtime_ns)
        return "\n".join(f"-- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs[-8:])

    def wait_for_log(self, text: str) -> None:
        """Wait until something has been put out."""
        wait_until(lambda: text in self.log(), f"{text!r} in the controller's output")

    def finish(self) -> None:
        """Its orderly end."""
        self.process.stdin.close()
        code = self.process.wait(PATIENCE)
        assert code == 0, f"the controller ended with {code}:\n{self.log()}"

    def _read(self) -> None:
        try:
            for line in self.process.stdout:
                self._answers.put(line)
        except ValueError:  # closed at the end of the test
            pass
        self._answers.put("")


class Cluster:
    """A network with workers on its hosts, but on ``controller`` and ``spare``."""

    def __init__(self, network: Network, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.network = network
        self.folder = folder
        self.env = dict(env or {})
        self.key_file = folder / "team.key"
        make_key_file(self.key_file)
        self.hosts = [host for host in network.hosts if host.name not in ("controller", "spare")]
        self.workers = {host.name: self.work(host) for host in self.hosts}
        for worker in self.workers.values():
            worker.wait_until_listening()
        self.controllers: list[Controller] = []

    @property
    def spare(self) -> Host:
        """A host without a worker."""
        return self.network["spare"]

    @property
    def urls(self) -> list[str]:
        return [worker.url for worker in self.workers.values()]

    def work(self, host: Host, key_file: Path | None = None, env: Mapping[str, str] | None = None) -> Worker:
        """Start a worker."""
        return Worker(host, key_file or self.key_file, self.folder, {**self.env, **(env or {})})

    def control(
        self,
        workers: Sequence[str] | None = None,
        key_file: Path | None = None,
        env: Mapping[str, str] | None = None,
        host: Host | None = None,
    ) -> Controller:
        """Start a controller; by default of all workers, and with the key."""
        host = host or self.network["controller"]
        urls = self.urls if workers is None else workers
        made = Controller(host, urls, key_file or self.key_file, self.folder, {**self.env, **(env or {})})
        self.controllers.append(made)
        return made

    def idle(self, *names: str) -> None:
        """Wait until workers run nothing but themselves."""
        for name in names or self.workers:
            host = self.network[name]
            wait_until(lambda host=host: not ranks(host), f"no rank is left on {name}:\n{host.shown()}")

    def close(self) -> None:
        """The orderly end of controllers, then of workers; fails if anything of them is left on their hosts."""
        for controller in self.controllers:
            if controller.process.running:
                controller.finish()
        for worker in self.workers.values():
            if worker.process.running:
                self.idle(worker.host.name)
                worker.process.signal(signal.SIGTERM)
        for worker in self.workers.values():
            worker.process.wait(PATIENCE)
        for host in self.network.hosts:
            wait_until(lambda host=host: not host.pids(), f"nothing runs on {host.name}")
            # Where everything died at once, the next start has to clean up.
            assert host.crashed or host.files() == [], f"left on {host.name}: {host.files()}"


def ranks(host: Host) -> set[int]:
    """All that runs on a host but workers, controllers, agents, and their fork servers and templates."""
    return {pid for pid in host.pids() if not _keeps_house(pid)}


def _keeps_house(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # it has just ended
    # Ranks are forked, and have the command line of what they are forked from, but a name of their own.
    if name.startswith("monarch-"):
        return not name.startswith("monarch-rank")
    return b"monarch_kernel\0worker" in command or b"network.driver" in command
