"""The debugger's prompt: access to the shell in which it opens (a kernel or IPython in a terminal), and a session."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.debugger.commands.console import Console
    from monarch_kernel.debugger.controller.hub import MeshDebugger

#: How often an open prompt checks whether it is still needed (seconds).
LOOK = 0.05

_END_OF_INPUT = "\x04"


#: The name of this viewer, as other viewers see it while it controls the debugger.
NAME = "the notebook"


_HOLDS = (
    "This cell holds the notebook while you are at the prompt below: continue resumes the ranks, q leaves the prompt.\n"
)


_HOLDS_MORTEM = (
    "This cell holds the notebook while you are at the prompt below: q leaves the prompt, and the frames stay open.\n"
)


class PromptShell:
    """An IPython shell as the prompt sees it: its state, and how to read a line from the user.

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
        """Whether the front end that runs this cell can read a line from the user. It cannot in a subshell."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._kernel is not None:
            return bool(getattr(self._kernel, "_allow_stdin", False))
        return sys.stdin is not None and sys.stdin.isatty()

    def cells_wait(self) -> bool:
        """Whether further cells are already queued, as after "Run All"."""
        return bool(getattr(self._kernel, "cells_wait", bool)())

    @property
    def debugger_is_on(self) -> bool:
        """Whether the front end's own debugger is on. If so, it shows stops and resumes ranks."""
        return bool(getattr(getattr(self._kernel, "debugger", None), "is_started", False))

    @property
    def awaiting_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that the cell awaits in; None if the cell does not await."""
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
    """Do the same as ipykernel's `raw_input`, but stop waiting early; the protocol cannot withdraw an input request."""
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


class PromptSession:
    """One session at the prompt, on the thread that runs the cell: a console executes the user's lines.

    Args:
        debugger: the debugger whose stops the session examines.
        shell: the shell that reads the user's lines.
        begin: the first action of the console: report the stopped ranks, or execute a command.
        over: returns whether nothing is left to do.
        patient: wait for the end of a long step. The prompt of a waiting cell opens again anyway.
        heir: takes over the post-mortem frames if the user leaves the prompt without closing them.
    """

    def __init__(
        self,
        debugger: MeshDebugger,
        shell: PromptShell,
        begin: Callable[[Console], object],
        over: Callable[[], bool],
        *,
        patient: bool = False,
        heir: Console | None = None,
    ) -> None:
        from monarch_kernel.debugger.commands.console import Console

        self._debugger = debugger
        self._shell = shell
        self._begin = begin
        self._over = over
        self._patient = patient
        self._heir = heir
        self._written: list[str] = []
        self._console = Console(debugger, self._written.append, name=NAME)

    def run(self) -> bool:
        """Read and execute lines. Return True if the user left the prompt, False if nothing is left to do."""
        left = False
        try:
            left = self._talk()
        except EOFError:
            left = True
        finally:
            self._flush()
            if left and self._heir is not None:
                self._heir.take_over(self._console)
            self._console.release()
            self._console.close()
        return left

    def _talk(self) -> bool:
        on_thread(lambda: self._begin(self._console))
        if self._written and not self._over() and self._shell.in_kernel:
            self._written.insert(0, _HOLDS_MORTEM if self._heir is not None else _HOLDS)
        while not self._over():
            self._flush()
            line = self._shell.ask(self._console.prompt(), self._over)
            if line is None:
                self._shell.write("The prompt has closed, because nothing is stopped here any more.\n")
                return False
            if news := self._console.news():
                self._shell.write(f"Stopped meanwhile:\n{news}\n")
            if on_thread(partial(self._console.run, line)):
                return True
            if self._patient and self._console.is_stepping and self._over():
                self._wait_for_step()
        return False

    def _wait_for_step(self) -> None:
        self._flush()
        self._shell.write("The step has not finished yet; interrupt the cell to stop waiting for it.\n")
        on_thread(partial(self._debugger.wait, lambda _stops: not self._over()))
        self._written.append(f"{self._console.news()}\n")

    def _flush(self) -> None:
        if self._written:
            self._shell.write("".join(self._written))
            self._written.clear()


def on_thread(work: Callable[[], object]) -> bool:
    """Run `work` on another thread: this one may be in an event loop, where it must not wait for ranks."""
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(work()), name="monarch-console", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)  # with a timeout, so that an interrupt is handled
    return bool(done and done[0])
