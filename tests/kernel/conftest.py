"""A real kernel behind a real client, and words for what a test does with it."""

from __future__ import annotations

import os
import queue
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from monarch_kernel.kernel.install import KERNEL_NAME, install

#: No test waits longer than this for one answer (seconds).
PATIENCE = 60.0


@pytest.fixture(scope="session", autouse=True)
def jupyter_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Jupyter and IPython folders of our own, with this checkout's kernelspec installed in them."""
    root = tmp_path_factory.mktemp("jupyter")
    install(prefix=str(root / "prefix"))
    wanted = {
        "JUPYTER_PATH": str(root / "prefix" / "share" / "jupyter"),
        "JUPYTER_PREFER_ENV_PATH": "0",
        "JUPYTER_RUNTIME_DIR": str(root / "runtime"),
        "JUPYTER_DATA_DIR": str(root / "data"),
        "JUPYTER_CONFIG_DIR": str(root / "config"),
        "IPYTHONDIR": str(root / "ipython"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in wanted.items():
            patch.setenv(name, value)
        yield root


@dataclass
class Outcome:
    """What a cell did."""

    status: str = ""
    stdout: str = ""
    stderr: str = ""
    result: dict[str, Any] | None = None
    """The execute_result's mimebundle."""
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Everything published for the cell, in order."""

    @property
    def text(self) -> str:
        """The result's plain text."""
        return "" if self.result is None else str(self.result["text/plain"])


class Cell:
    """A cell that has been sent to the kernel; its output arrives while the test looks at it."""

    def __init__(self, client: BlockingKernelClient, code: str) -> None:
        self._client = client
        self.outcome = Outcome()
        self.events: list[dict[str, Any]] = []
        """What the debugger has published since the cell was sent."""
        self._idle = False
        self.msg_id = client.execute(code, allow_stdin=False)

    def read(self) -> None:
        """Take one message, though the cell may have ended: what runs in the background prints later."""
        self._step(time.monotonic() + PATIENCE)

    def _step(self, deadline: float) -> None:
        try:
            message = self._client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"nothing came for {PATIENCE} s; so far: {self.outcome}") from None
        if message["msg_type"] == "debug_event":
            self.events.append(message["content"])
        if message["parent_header"].get("msg_id") != self.msg_id:
            return
        out, kind, content = self.outcome, message["msg_type"], message["content"]
        out.messages.append(message)
        if kind == "stream":
            setattr(out, content["name"], getattr(out, content["name"]) + content["text"])
        elif kind == "execute_result":
            out.result = content["data"]
        elif kind == "display_data":
            out.displays.append(content["data"])
        elif kind == "update_display_data":
            out.updates.append(content["data"])
        elif kind == "error":
            out.ename, out.evalue = content["ename"], content["evalue"]
            out.traceback = "\n".join(content["traceback"])
        elif kind == "status" and content["execution_state"] == "idle":
            self._idle = True

    def event(self, name: str) -> dict[str, Any]:
        """Read output until the debugger publishes this event."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for message in self.events:
                if message["event"] == name:
                    return message
            self._step(deadline)

    def until(self, condition: Callable[[Outcome], bool]) -> Outcome:
        """Read output until ``condition`` holds of it."""
        deadline = time.monotonic() + PATIENCE
        while not condition(self.outcome):
            assert not self._idle, f"the cell ended first: {self.outcome}"
            self._step(deadline)
        return self.outcome

    def prints(self, text: str) -> Outcome:
        """Read output until the cell has printed ``text``, on either stream."""
        return self.until(lambda out: text in out.stdout or text in out.stderr)

    def wait(self) -> Outcome:
        """Read output until the cell has ended."""
        deadline = time.monotonic() + PATIENCE
        while not self._idle:
            self._step(deadline)
        while True:
            reply = self._client.get_shell_msg(timeout=PATIENCE)
            if reply["parent_header"].get("msg_id") == self.msg_id:
                break
        content = reply["content"]
        self.outcome.status = content["status"]
        if content["status"] == "error":
            self.outcome.ename, self.outcome.evalue = content["ename"], content["evalue"]
        return self.outcome


class Kernel:
    """A running kernel and a client of it."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def send(self, code: str) -> Cell:
        """Start a cell, and look at it while it runs."""
        return Cell(self.client, code)

    def run(self, code: str) -> Outcome:
        """Run a cell to its end."""
        return self.send(code).wait()

    def ok(self, code: str) -> Outcome:
        """Run a cell that must succeed."""
        out = self.run(code)
        assert out.status == "ok", f"{out.ename}: {out.evalue}\n{out.traceback}\n{out.stderr}"
        return out

    def interrupt(self) -> None:
        """What the stop button does."""
        self.manager.interrupt_kernel()

    def debug(self, command: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send the debugger's front end's message, and give the reply."""
        content = {"type": "request", "command": command, "seq": 1, "arguments": arguments or {}}
        message = self.client.session.msg("debug_request", content)
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=PATIENCE)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])


@pytest.fixture(scope="session")
def start_kernel(jupyter_folders: Path) -> Iterator[Callable[..., Kernel]]:
    """Start a kernel; all are ended after the tests, and must leave no process behind."""
    running: list[Kernel] = []

    def start(name: str = KERNEL_NAME, **options: Any) -> Kernel:
        manager = KernelManager(kernel_name=name)
        manager.start_kernel(**options)
        client = manager.client()
        client.start_channels()
        running.append(kernel := Kernel(manager, client))
        client.wait_for_ready(timeout=PATIENCE)
        return kernel

    yield start
    for kernel in running:
        stop_kernel(kernel)


def stop_kernel(kernel: Kernel) -> None:
    """End a kernel and whatever it started; a process that outlives it is an error."""
    if not kernel.manager.has_kernel:
        return
    children = []
    if psutil.pid_exists(kernel.pid):
        children = psutil.Process(kernel.pid).children(recursive=True)
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel()
    _, alive = psutil.wait_procs(children, timeout=10)
    for process in alive:
        process.kill()
    assert not alive, f"outlived their kernel: {alive}"


@pytest.fixture(scope="module")
def kernel(start_kernel: Callable[..., Kernel]) -> Iterator[Kernel]:
    """One kernel for a file's tests."""
    kernel = start_kernel()
    yield kernel
    stop_kernel(kernel)


@pytest.fixture
def fresh_kernel(start_kernel: Callable[..., Kernel]) -> Iterator[Kernel]:
    """A kernel of the test's own, for tests that end or spoil it."""
    kernel = start_kernel()
    yield kernel
    stop_kernel(kernel)


class Bell:
    """How a process of the mesh tells the test that it has come somewhere: a named pipe."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bell"
        os.mkfifo(self.path)
        # Open for both, so that it neither blocks here nor ends when a writer closes.
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def code(self, name: str = "ring") -> str:
        """Source of a function that rings, for a cell."""
        return (
            f"def {name}(text='rung'):\n"
            "    import os\n"
            f"    fd = os.open({str(self.path)!r}, os.O_WRONLY)\n"
            "    os.write(fd, f'{text}\\n'.encode())\n"
            "    os.close(fd)\n"
        )

    def wait(self, count: int = 1) -> list[str]:
        """Wait until it has rung so often; what was said."""
        said = b""
        while said.count(b"\n") < count:
            ready, _, _ = select.select([self._fd], [], [], PATIENCE)
            assert ready, f"rang {said!r}, not {count}, in {PATIENCE} s"
            said += os.read(self._fd, 4096)
        return said.decode().split()

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._fd)


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Bell]:
    """A bell for the test."""
    bell = Bell(tmp_path)
    yield bell
    bell.close()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids: list[int], seconds: float = PATIENCE) -> list[int]:
    """Wait for processes to end; those that did not."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(processes, timeout=seconds)
    return [process.pid for process in left if alive(process.pid)]
