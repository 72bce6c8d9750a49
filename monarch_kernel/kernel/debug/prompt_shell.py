"""The shell that a prompt opens in: our kernel, another ipykernel, or IPython in a terminal."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

#: How often an open prompt checks whether it is still needed (seconds).
LOOK = 0.05

_END_OF_INPUT = "\x04"


class PromptShell:
    """What the prompt needs to know about an IPython shell, and how it reads a line from the user there.

    Args:
        shell: the IPython shell. Only our own kernel has `cells_wait` and a SIGINT handler with an event loop.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    @property
    def in_kernel(self) -> bool:
        """Whether the shell belongs to a kernel, rather than to a terminal."""
        return self._kernel is not None

    @property
    def takes_input(self) -> bool:
        """Whether the front end that runs this cell can read a line from the user. In a subshell, it cannot."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._kernel is not None:
            return bool(getattr(self._kernel, "_allow_stdin", False))
        return sys.stdin is not None and sys.stdin.isatty()

    @property
    def cells_wait(self) -> bool:
        """Whether further cells are already queued, as after "Run All"."""
        return bool(getattr(self._kernel, "cells_wait", False))

    @property
    def debugger_is_on(self) -> bool:
        """Whether the front end's own debugger is on. If so, it shows stops and resumes ranks."""
        return bool(getattr(getattr(self._kernel, "debugger", None), "is_started", False))

    @property
    def awaiting_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which the cell is awaiting; None if it is not."""
        return getattr(getattr(self._shell, "sigint", None), "awaiting_loop", None)

    @property
    def is_cancelled(self) -> bool:
        """Whether an interrupt has cancelled the awaiting cell."""
        return self.awaiting_loop is not None and bool(self._shell.sigint.cancelled)

    def ask(self, prompt: str, over: Callable[[], bool]) -> str | None:
        """Read a line; None if `over()` became true meanwhile, or the cell was cancelled.

        Raises:
            EOFError, KeyboardInterrupt: the user ended the input or interrupted it.
        """
        if self._kernel is None:
            return input(prompt)
        return _ask_front_end(self._kernel, prompt, lambda: self.is_cancelled or over())

    @staticmethod
    def write(text: str) -> None:
        """Show text in the cell."""
        sys.stdout.write(text)
        sys.stdout.flush()

    @property
    def _kernel(self) -> Any:
        return getattr(self._shell, "kernel", None)


def _ask_front_end(kernel: Any, prompt: str, over: Callable[[], bool]) -> str | None:
    """ipykernel's `raw_input`, which can end early: the protocol cannot withdraw a request, but we can stop waiting."""
    import zmq

    sys.stdout.flush()
    sys.stderr.flush()
    stdin = kernel.stdin_socket
    while stdin.poll(0, zmq.POLLIN):  # replies to abandoned requests
        stdin.recv_multipart(zmq.NOBLOCK)
    ident = kernel._get_shell_context_var(kernel._shell_parent_ident)
    content = {"prompt": prompt, "password": False}
    kernel.session.send(stdin, "input_request", content, kernel.get_parent("shell"), ident=ident)
    looked = time.monotonic()
    while True:
        if stdin.poll(int(LOOK * 1000), zmq.POLLIN):
            _, reply = kernel.session.recv(stdin, zmq.NOBLOCK)
            if reply is not None:
                break
        now = time.monotonic()
        if now - looked >= LOOK:
            looked = now
            if over():
                return None
    value = str(reply["content"].get("value", ""))
    if value == _END_OF_INPUT:
        raise EOFError
    return value
