"""One session at the debugger's prompt: a console executes the user's lines until nothing is left to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from monarch_kernel.kernel.debug.prompt_shell import PromptShell

if TYPE_CHECKING:
    from monarch_kernel.debugger.commands.console import Console
    from monarch_kernel.debugger.controller.hub import MeshDebugger

#: The name of this viewer, as other viewers see it while it controls the debugger.
NAME = "the notebook"

_HOLDS = (
    "This cell holds the notebook while you are at the prompt below: continue resumes the ranks, q leaves the prompt.\n"
)
_HOLDS_MORTEM = (
    "This cell holds the notebook while you are at the prompt below: q leaves the prompt, and the frames stay open.\n"
)


class PromptSession:
    """A session at the prompt, on the thread that runs the cell.

    Args:
        debugger: the debugger whose stops the session examines.
        shell: the shell that reads the user's lines.
        begin: what the console does first: report which ranks are stopped where, or execute a command.
        over: whether nothing is left to do.
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
        """Read lines and execute them until the user leaves the prompt (True) or nothing is left to do (False)."""
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
