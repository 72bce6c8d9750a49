"""Open the debugger's prompt in the cell that waits for stopped ranks, like pdb.

The cell waits for ranks on the kernel's main thread. `call_in_wait` runs the prompt on that thread, and the wait
continues afterwards. While the prompt is open, ranks may continue, finish, or be resumed by another viewer. The prompt
then closes automatically.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_kernel.display import runs_hidden
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import call_in_wait
from monarch_kernel.kernel.debug.stop_notices import StopNotices, is_part_of, of_cell, terminal_hint

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo

    from monarch_kernel.debugger.commands.console import Console
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.events import RankStop
    from monarch_kernel.kernel.cell_run import CellRun
    from monarch_kernel.kernel.notebook import Notebook


# The debugger's prompt: access to the shell in which it opens (a kernel or IPython in a terminal), and a session.

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
            return bool(getattr(self._kernel, "_allow_stdin", False)) and not runs_hidden(self._shell)
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


#: How long a prompt may take to open before the cell shows which ranks are stopped without it (seconds).
OPENING = 0.5


@dataclass(slots=True, eq=False)
class _RunningCell:
    """The cell that runs on the main thread.

    Attributes:
        key: the cell's key; the keys of its parts begin with it.
        context: the context variables with which it runs.
        takes_input: whether its front end can read a line from the user.
        run: the `%%mesh` cell that it waits for.
        quiet: whether no further prompt opens in it: the user left the prompt, or interrupted the cell.
    """

    key: str
    context: contextvars.Context
    takes_input: bool
    run: CellRun | None = None
    quiet: bool = False

    def runs(self, cell: str) -> bool:
        """Return whether a cell is this one or a part of it."""
        return is_part_of(cell, self.key)


class StopPrompt:
    """Opens the prompt, and tracks the cell that it belongs to.

    Args:
        notebook: the notebook of the cells.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._shell = PromptShell(notebook.shell)
        self._running: _RunningCell | None = None
        self._open_in = ""
        self._opened = threading.Event()  # set while a prompt is open
        self._installed = False
        self.notices = StopNotices(notebook, self._hint, self._is_complete)
        self.notices.on_settled = self._on_settled

    def install(self) -> None:
        """Begin to track cells and stops."""
        self._installed = True
        self.notices.install()
        self._notebook.shell.events.register("pre_run_cell", self._before_cell)

    def close(self) -> None:
        """Undo `install`."""
        if self._installed:
            self._installed = False
            self._notebook.shell.events.unregister("pre_run_cell", self._before_cell)
            self.notices.close()

    # -- which cell runs --------------------------------------------------------------------------

    def _before_cell(self, _info: ExecutionInfo) -> None:
        on_main = threading.current_thread() is threading.main_thread()  # the cells of subshells run on other threads
        if on_main and not runs_hidden(self._notebook.shell):
            context = contextvars.copy_context()
            self._running = _RunningCell(self._notebook.cell_key, context, self._shell.takes_input)

    def after_cell(self) -> None:
        """Record that the cell has ended: no prompt opens for it from now on, even if some of its calls are pending."""
        if threading.current_thread() is threading.main_thread():
            self._running = None
            self.notices.refresh()

    @contextmanager
    def runs(self, run: CellRun) -> Generator[None]:
        """Return a context in which the cell waits for `run`."""
        running = self._running
        if running is not None and threading.current_thread() is threading.main_thread():
            running.run = run
        try:
            yield
        finally:
            if running is not None and running.run is run:
                running.run = None

    # -- whether a prompt may open ----------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a prompt is open anywhere in this notebook."""
        return bool(self._open_in)

    def may_ask(self) -> bool:
        """Whether the user who runs this cell can be prompted for a line."""
        return self._shell.takes_input

    def may_hold(self) -> bool:
        """Whether a prompt may block the notebook: the user can be prompted, and no further cells are queued."""
        return self._shell.takes_input and not self._shell.cells_wait()

    def _opens_for(self, cell: str) -> bool:
        """Return whether a prompt is or may be opened for a stop of this cell."""
        running = self._running
        if running is None or not running.runs(cell):
            return False
        return running.takes_input and not running.quiet and not self._shell.debugger_is_on

    def _hint(self, cell: str) -> str | None:
        """Return how to reach the stopped ranks of a cell, for its notice."""
        running = self._running
        if self._open_in and is_part_of(cell, self._open_in):
            return None  # the prompt already shows this
        if self._opens_for(cell):
            return f"A prompt opens when the cell waits for ranks. {terminal_hint()}"
        if self._shell.debugger_is_on:
            return ""
        if running is not None and running.runs(cell) and not (running.run is not None and running.run.detached):
            return f"This cell waits for them. {terminal_hint()}"
        return "%mesh debug opens a prompt."

    def _is_complete(self, stops: list[RankStop]) -> bool:
        """Return whether all ranks that the cell waits for, or else all ranks of the meshes, are stopped."""
        running = self._running
        if running is not None and running.run is not None:
            stopped = {at.rank for at in of_cell(stops, running.key) if at.mesh == running.run.managed.name}
            return stopped >= running.run.waiting
        ranks: dict[str, set[int]] = {}
        for at in stops:
            ranks.setdefault(at.mesh, set()).add(at.rank)
        sizes = {mesh.name: len(mesh) for mesh in tool_runtime().list_proc_meshes()}
        return all(len(found) == sizes.get(mesh) for mesh, found in ranks.items())

    # -- in the cell that waits -------------------------------------------------------------------

    def _on_settled(self, debugger: MeshDebugger) -> None:
        """Open a prompt if one is due, after stops were added or removed. Called on the thread of the notices."""
        running = self._running
        if running is None or self._open_in or running.quiet or self._shell.debugger_is_on:
            return
        if not running.takes_input and running.run is None:
            return  # it can neither read a line nor end before its ranks
        if not of_cell(debugger.stops(), running.key):
            return
        loop = self._shell.awaiting_loop
        if loop is not None:
            loop.call_soon_threadsafe(self._in_loop, debugger, running, context=running.context)
        else:
            call_in_wait(lambda: self._in_wait(debugger, running))
        self._opened.wait(OPENING)

    def _in_loop(self, debugger: MeshDebugger, running: _RunningCell) -> None:
        """`_in_wait` for a cell that awaits. An exception would end the event loop; an interrupt cancels the cell."""
        try:
            self._in_wait(debugger, running)
        except KeyboardInterrupt:
            running.quiet = True

    def _in_wait(self, debugger: MeshDebugger, running: _RunningCell) -> None:
        if running is not self._running or self._open_in or running.quiet:
            return  # that cell has ended
        if not of_cell(debugger.stops(), running.key):
            return
        if running.run is not None and (not running.takes_input or self._shell.cells_wait()):
            self._go_on_without(running, running.run)
            return
        try:
            left = self.talk(debugger, lambda: not of_cell(debugger.stops(), running.key), running.key)
        except BaseException:
            running.quiet = True
            raise
        if self._shell.is_cancelled:
            running.quiet = True
        elif left:
            running.quiet = True
            self._leave(running)

    def _go_on_without(self, running: _RunningCell, run: CellRun) -> None:
        """End the cell in the notebook, where no prompt can hold it; it keeps running on its mesh."""
        running.quiet = True
        why = "other cells are already waiting" if running.takes_input else "this front end takes no input"
        self._shell.write(
            f"Ranks have stopped, and {why}, so no prompt opens here and this cell ends. It keeps running on mesh "
            f"{run.managed.name}, and its output still appears here. %mesh debug in another cell opens a "
            f"prompt; {terminal_hint()}\n"
        )
        run.detach()

    def _leave(self, running: _RunningCell) -> None:
        """Handle leaving the prompt: a `%%mesh` cell keeps running in the background."""
        if running.run is None:
            self._shell.write(f"The cell keeps waiting. {terminal_hint()}\n")
            return
        self._shell.write(
            f"The cell keeps running on mesh {running.run.managed.name}, and its output still appears here. "
            "%mesh debug opens the prompt again.\n"
        )
        running.run.detach()

    # -- sessions ---------------------------------------------------------------------------------

    def talk(
        self,
        debugger: MeshDebugger,
        over: Callable[[], bool],
        key: str = "",
        first: str = "",
        *,
        patient: bool = False,
    ) -> bool:
        """Run a prompt session on stopped ranks.

        Args:
            over: returns whether nothing is left to do.
            key: the cell of the prompt.
            first: a command to run first, instead of reporting which ranks are stopped where.
            patient: see `PromptSession`.

        Returns:
            Whether the user left the prompt.
        """

        def begin(console: Console) -> None:
            console.run(first) if first else console.announce()

        return self._talk(PromptSession(debugger, self._shell, begin, over, patient=patient), key)

    def post_mortem(
        self, debugger: MeshDebugger, mesh: str, ranks: Sequence[int] | None, failure: str, heir: Console
    ) -> None:
        """Open the frames of a failure, and a prompt to examine them, if there are any.

        Args:
            failure: its name; "" for the last one.
            heir: see `PromptSession`.
        """
        heir.release()

        def over() -> bool:
            return not any(at.stop.reason == "post mortem" for at in debugger.stops())

        def begin(console: Console) -> None:
            console.post_mortem(mesh, ranks, failure)

        session = PromptSession(debugger, self._shell, begin, over, heir=heir)
        if self._talk(session, ""):
            self._shell.write(
                "The frames stay open: %mesh debug COMMAND inspects them, %mesh debug continue closes them.\n"
            )

    def _talk(self, session: PromptSession, key: str) -> bool:
        self._open_in = key or self._notebook.cell_key
        self._opened.set()
        self.notices.refresh()
        try:
            return session.run()
        finally:
            self._open_in = ""
            self._opened.clear()
            self.notices.refresh()
