"""A person who runs cells and answers the prompts that open in them."""

from __future__ import annotations

import queue
import time
from typing import Any, ClassVar

from jupyter_client.blocking.client import BlockingKernelClient

from tests.kernel.harness import PATIENCE, Cell, Kernel, Outcome


class Asking(Cell):
    """A cell of a front end that can be asked for lines, and that keeps what comes for its other cells meanwhile."""

    _cells: ClassVar[dict[str, Asking]] = {}

    def __init__(
        self, client: BlockingKernelClient, code: str, stdin: bool = True, subshell: str | None = None
    ) -> None:
        self._client = client
        self.outcome = Outcome()
        self.events: list[dict[str, Any]] = []
        self._idle = False
        self._seen = 0
        self._is_asked = False
        message = client.session.msg("execute_request", {"code": code, "silent": False, "allow_stdin": stdin})
        message["header"]["subshell_id"] = subshell
        self.msg_id = message["header"]["msg_id"]
        self._cells[self.msg_id] = self
        client.shell_channel.send(message)

    def wait(self) -> Outcome:
        """Read output until the cell has ended."""
        deadline = time.monotonic() + PATIENCE
        while not (self._idle and self.outcome.status):
            while not self.outcome.status and self._client.shell_channel.msg_ready():
                reply = self._client.get_shell_msg(timeout=PATIENCE)
                cell = self._cells.get(reply["parent_header"].get("msg_id", ""))
                if cell is not None:
                    cell.replied(reply["content"])
            if not self._idle:
                self._step(deadline)
            assert time.monotonic() < deadline, f"no reply in {PATIENCE} s: {self.outcome}"
        return self.outcome

    def replied(self, content: dict[str, Any]) -> None:
        """Note the answer to the request."""
        self.outcome.status = content["status"]
        if content["status"] == "error":
            self.outcome.ename, self.outcome.evalue = content["ename"], content["evalue"]

    def _step(self, deadline: float) -> None:
        try:
            message = self._client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"nothing came for {PATIENCE} s; so far: {self.outcome}") from None
        cell = self._cells.get(message["parent_header"].get("msg_id", ""))
        if cell is not None:
            cell.take(message)

    def asked(self) -> str:
        """Wait until the cell asks for a line; what it asks with."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                message = self._client.get_stdin_msg(timeout=0.02)
            except queue.Empty:
                assert not self._idle, f"the cell ended without a question: {self.outcome}"
                while self._client.iopub_channel.msg_ready():
                    self._step(deadline)
                continue
            assert message["parent_header"]["msg_id"] == self.msg_id, "a question in another cell"
            self._is_asked = True
            return str(message["content"]["prompt"])
        raise AssertionError(f"no question came in {PATIENCE} s; so far: {self.outcome}")

    def type(self, line: str) -> None:
        """Answer the question, once there is one: a kernel drops what comes before it asks."""
        if not self._is_asked:
            self.asked()
        self._is_asked = False
        self._client.input(line)

    def printed(self, text: str) -> None:
        """Read until `text` was printed after what was read before."""
        self.until(lambda out: text in out.stdout[self._seen :])
        self._seen = self.outcome.stdout.index(text, self._seen) + len(text)

    def says(self, line: str, *texts: str) -> str:
        """Type a line, wait for these texts in this order, and for the next question, which is given."""
        self.type(line)
        for text in texts:
            self.printed(text)
        return self.asked()


def ask(kernel: Kernel, code: str) -> Asking:
    """Run a cell as a person does, who can be asked."""
    return Asking(kernel.client, code)


def run(kernel: Kernel, code: str, subshell: str | None = None) -> Outcome:
    """Run a cell to its end, as a program does, which cannot be asked; other cells hear what comes for them."""
    return Asking(kernel.client, code, False, subshell).wait()
