"""A real kernel behind a real client, and words for what a test does with it."""

from __future__ import annotations

import os
import queue
import select
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from monarch_kernel.kernel.install import KERNEL_NAME
from tests.conftest import wait_until
from tests.waiting import patience

#: No test waits longer than this for one answer (seconds).
PATIENCE = patience(60.0)


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

    def __init__(
        self,
        client: BlockingKernelClient,
        code: str,
        subshell: str | None = None,
        metadata: dict[str, Any] | None = None,
        **content: Any,
    ) -> None:
        self._client = client
        self.outcome = Outcome()
        self.events: list[dict[str, Any]] = []
        """What the debugger has published since the cell was sent."""
        self._idle = False
        content = {"code": code, "silent": False, "allow_stdin": False, **content}
        message = client.session.msg("execute_request", content, metadata=metadata)
        message["header"]["subshell_id"] = subshell
        client.shell_channel.send(message)
        self.msg_id = message["header"]["msg_id"]

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
        if message["parent_header"].get("msg_id") == self.msg_id:
            self.take(message)

    def take(self, message: dict[str, Any]) -> None:
        """Note a message that was published for this cell."""
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

    def ok(self) -> Outcome:
        """Read output until the cell has ended, which must succeed."""
        out = self.wait()
        assert out.status == "ok", f"{out.ename}: {out.evalue}\n{out.traceback}\n{out.stderr}"
        return out


class Kernel:
    """A running kernel and a client of it.

    They communicate over Unix sockets in a private folder. Over TCP, jupyter_client picks free ports and releases them
    for the kernel to bind, also at a restart, and another process may bind one in between: the kernel then dies with
    "Address already in use". JupyterLab tries other ports in that case; a plain ``KernelManager`` does not.
    """

    def __init__(self, manager: KernelManager, sockets: tempfile.TemporaryDirectory[str]) -> None:
        self.manager = manager
        self.client: BlockingKernelClient = manager.client()
        self.sockets = sockets

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def send(self, code: str, subshell: str | None = None, **options: Any) -> Cell:
        """Start a cell, and look at it while it runs; the options are those of `Cell`."""
        return Cell(self.client, code, subshell, **options)

    def run(self, code: str) -> Outcome:
        """Run a cell to its end."""
        return self.send(code).wait()

    def ok(self, code: str) -> Outcome:
        """Run a cell that must succeed."""
        return self.send(code).ok()

    def interrupt(self) -> None:
        """What the stop button does."""
        self.manager.interrupt_kernel()

    def debug(self, command: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send the debugger's front end's message, and give the reply."""
        return self.control(
            "debug_request", {"type": "request", "command": command, "seq": 1, "arguments": arguments or {}}
        )

    def control(self, kind: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a message on the control channel, and give the reply."""
        message = self.client.session.msg(kind, content or {})
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=PATIENCE)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])


def launch_kernel(name: str = KERNEL_NAME, **options: Any) -> Kernel:
    """Start a kernel, whose client is not connected yet; whoever does ends it with ``stop_kernel``."""
    sockets = tempfile.TemporaryDirectory(prefix="mk-kernel-", dir="/tmp")
    manager = KernelManager(kernel_name=name, transport="ipc", ip=f"{sockets.name}/kernel")
    manager.start_kernel(**options)
    return Kernel(manager, sockets)


def start_kernel(name: str = KERNEL_NAME, **options: Any) -> Kernel:
    """Start a kernel, and wait until it answers; whoever does ends it with ``stop_kernel``."""
    kernel = launch_kernel(name, **options)
    try:
        kernel.client.start_channels()
        kernel.client.wait_for_ready(timeout=PATIENCE)
    except BaseException:
        stop_kernel(kernel)
        raise
    return kernel


def stop_kernel(kernel: Kernel) -> None:
    """End a kernel and whatever it started; a process that outlives it is an error."""
    with kernel.sockets:
        kernel.client.stop_channels()
        if not kernel.manager.has_kernel:
            return
        running = kernel.manager.is_alive()
        children = psutil.Process(kernel.pid).children(recursive=True) if running else []
        kernel.manager.shutdown_kernel(now=not running)
        wait_gone([process.pid for process in children], 20)


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


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids: Iterable[int], seconds: float = PATIENCE) -> None:
    """Wait for processes to end; being reaped is for whoever inherits them."""
    pids = list(pids)
    wait_until(lambda: not any(alive(pid) for pid in pids), f"processes {pids} have ended", seconds)
