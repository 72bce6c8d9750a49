"""The debugger's prompt in a cell: opens in the very cell that waits for ranks which have stopped, as pdb's would.

The cell's thread is the kernel's main thread, and it waits for ranks; `call_in_wait` has it run the prompt there, and
the wait goes on afterwards. While the prompt is open nothing else is waited for, so that ranks may go on, finish, or be
driven by somebody else: then the prompt closes by itself.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_kernel.kernel.debug.stop_notices import StopNotices, of_cell, terminal_hint
from monarch_kernel.meshes import list_proc_meshes
from monarch_kernel.tools import call_in_wait

if TYPE_CHECKING:
    from monarch_kernel.debugger.commands.console import Console
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.events import RankStop
    from monarch_kernel.kernel.cell_run import CellRun
    from monarch_kernel.kernel.notebook import Notebook

#: Who drives, as other consoles are told.
NAME = "the notebook"
#: How long a prompt may take to open before the cell shows who is stopped without it (seconds).
OPENING = 0.5
#: How often an open prompt looks whether it is still wanted (seconds).
LOOK = 0.05

_HOLDS = "This cell holds the notebook: it waits for you at the prompt below. continue moves the ranks on, q leaves.\n"
_HOLDS_MORTEM = (
    "This cell holds the notebook: it waits for you at the prompt below. q leaves, and the frames stay open.\n"
)


@dataclass(slots=True, eq=False)
class _Running:
    """The cell that runs on the main thread."""

    key: str
    context: contextvars.Context
    stdin: bool
    run: CellRun | None = None
    quiet: bool = False  # no prompt opens any more: it was left, or the cell was interrupted


class StopPrompt:
    """Opens the prompt, and knows for which cell.

    Args:
        notebook: whose cells.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._running: _Running | None = None
        self._open_in = ""
        self._opened = threading.Event()  # whether that is so
        self._installed = False
        self.notices = StopNotices(notebook, self._hint, self._is_complete)
        self.notices.on_settled = self._on_settled

    def install(self) -> None:
        """Begin to hear of cells and stops."""
        self._installed = True
        self.notices.install()
        events = self._notebook.shell.events
        events.register("pre_run_cell", self._before_cell)

    def close(self) -> None:
        """Undo `install`."""
        if self._installed:
            self._installed = False
            events = self._notebook.shell.events
            events.unregister("pre_run_cell", self._before_cell)
            self.notices.close()

    # -- which cell runs --------------------------------------------------------------------------

    def _before_cell(self, _info: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # a subshell's cells have other threads
            context = contextvars.copy_context()
            self._running = _Running(self._notebook.cell_key, context, self.may_ask())

    def after_cell(self) -> None:
        """The cell has ended: from now on no prompt opens for it, whatever is still waited for on its behalf."""
        if threading.current_thread() is threading.main_thread():
            self._running = None
            self.notices.refresh()

    @contextmanager
    def runs(self, run: CellRun) -> Generator[None]:
        """The cell waits for this."""
        running = self._running
        if running is not None and threading.current_thread() is threading.main_thread():
            running.run = run
        try:
            yield
        finally:
            if running is not None and running.run is run:
                running.run = None

    def may_ask(self) -> bool:
        """Whether whoever runs this cell can be asked for a line."""
        if threading.current_thread() is not threading.main_thread():
            return False
        kernel = getattr(self._notebook.shell, "kernel", None)
        if kernel is not None:
            return bool(getattr(kernel, "_allow_stdin", False))
        return sys.stdin is not None and sys.stdin.isatty()

    def may_hold(self) -> bool:
        """Whether a prompt may hold up the notebook: there is a person to ask, who has not sent further cells yet."""
        return self.may_ask() and not self._cells_wait()

    def _cells_wait(self) -> bool:
        return bool(getattr(getattr(self._notebook.shell, "kernel", None), "cells_wait", False))

    def _others_show(self) -> bool:
        """Whether the front end's own debugger is on, which then shows stops, and moves ranks."""
        kernel = getattr(self._notebook.shell, "kernel", None)
        return bool(getattr(getattr(kernel, "debugger", None), "is_started", False))

    def _opens_for(self, cell: str) -> bool:
        """Whether a prompt is open, or may open, for a stop of this cell."""
        running = self._running
        if running is None or not (cell == running.key or cell.startswith(f"{running.key}.")):
            return False
        return running.stdin and not running.quiet and not self._others_show()

    def _hint(self, cell: str) -> str | None:
        running = self._running
        if self._open_in and (cell == self._open_in or cell.startswith(f"{self._open_in}.")):
            return None  # the prompt says it
        if self._opens_for(cell):
            return f"A prompt opens when the cell waits for ranks. {terminal_hint()}"
        if self._others_show():
            return ""
        waits = running is not None and (cell == running.key or cell.startswith(f"{running.key}."))
        if waits and not (running is not None and running.run is not None and running.run.detached):
            return f"This cell waits for them. {terminal_hint()}"
        return "%mesh debug opens a prompt."

    def _is_complete(self, stops: list[RankStop]) -> bool:
        """Whether all ranks are stopped that the cell waits for; where that is not known, all of their meshes."""
        running = self._running
        if running is not None and running.run is not None:
            stopped = {at.rank for at in of_cell(stops, running.key) if at.mesh == running.run.managed.name}
            return stopped >= running.run.waiting
        ranks: dict[str, set[int]] = {}
        for at in stops:
            ranks.setdefault(at.mesh, set()).add(at.rank)
        sizes = {mesh.name: len(mesh) for mesh in list_proc_meshes()}
        return all(len(found) == sizes.get(mesh) for mesh, found in ranks.items())

    # -- in the cell ------------------------------------------------------------------------------

    def _on_settled(self, debugger: MeshDebugger) -> None:
        """Stops have come or gone (on the notices' thread)."""
        running = self._running
        if running is None or self._open_in or running.quiet or self._others_show():
            return
        if not running.stdin and running.run is None:
            return  # it can neither ask nor go on without its ranks
        if not of_cell(debugger.stops(), running.key):
            return
        sigint = getattr(self._notebook.shell, "sigint", None)
        loop = sigint.awaiting_loop if sigint is not None else None
        if loop is not None:
            loop.call_soon_threadsafe(self._in_loop, debugger, running, context=running.context)
        else:
            call_in_wait(lambda: self._in_wait(debugger, running))
        self._opened.wait(OPENING)

    def _in_loop(self, debugger: MeshDebugger, running: _Running) -> None:
        """The cell awaits; an exception here would end the event loop, and an interrupt cancels the cell anyway."""
        try:
            self._in_wait(debugger, running)
        except KeyboardInterrupt:
            running.quiet = True

    def _in_wait(self, debugger: MeshDebugger, running: _Running) -> None:
        if running is not self._running or self._open_in or running.quiet:
            return  # this was for a cell that has ended
        if not of_cell(debugger.stops(), running.key):
            return
        if running.run is not None and (not running.stdin or self._cells_wait()):
            running.quiet = True
            why = "other cells wait already" if running.stdin else "this front end takes no input"
            self._say(
                f"Ranks have stopped, and {why}: no prompt opens here, and this cell ends. It goes on on mesh "
                f"{running.run.managed.name}, and its output comes here. %mesh debug in a cell of its own opens a "
                f"prompt; {terminal_hint()}\n"
            )
            running.run.detach()
            return
        try:
            left = self.talk(debugger, lambda: not of_cell(debugger.stops(), running.key), running.key)
        except BaseException:
            running.quiet = True
            raise
        if self._is_cancelled():
            running.quiet = True
        elif left:
            running.quiet = True
            self._say(self._farewell(running))
            if running.run is not None:
                running.run.detach()

    @staticmethod
    def _farewell(running: _Running) -> str:
        if running.run is not None:
            mesh = running.run.managed.name
            return f"The cell goes on on mesh {mesh}; its output comes here. %mesh debug opens the prompt again.\n"
        return f"The cell goes on waiting. {terminal_hint()}\n"

    def talk(
        self,
        debugger: MeshDebugger,
        over: Callable[[], bool],
        key: str = "",
        first: str = "",
        *,
        patient: bool = False,
    ) -> bool:
        """Ask for lines and execute them, until the person wants to leave (True), or nothing is left to do (False).

        Args:
            over: whether that is so.
            key: the cell that this is in.
            first: a line to begin with, instead of saying who is stopped where.
            patient: after a step that takes long, wait for its end. The prompt of a cell that waits opens again anyway.
        """

        def begin(console: Console) -> None:
            console.run(first) if first else console.announce()

        return self._talk(debugger, begin, over, key, patient)

    def post_mortem(self, debugger: MeshDebugger, mesh: str, ranks: Sequence[int] | None, heir: Console) -> None:
        """Open the last exceptions of ranks, and talk about them, if there are any.

        Args:
            heir: has the frames when the person leaves the prompt and has not closed them.
        """
        heir.release()

        def over() -> bool:
            return not any(at.stop.reason == "post mortem" for at in debugger.stops())

        if self._talk(debugger, lambda console: console.post_mortem(mesh, ranks), over, heir=heir):
            self._say("The frames stay open: %mesh debug COMMAND looks into them, %mesh debug continue closes them.\n")

    def _talk(
        self,
        debugger: MeshDebugger,
        begin: Callable[[Console], object],
        over: Callable[[], bool],
        key: str = "",
        patient: bool = False,
        heir: Console | None = None,
    ) -> bool:
        from monarch_kernel.debugger.commands.console import Console

        said: list[str] = []
        console = Console(debugger, said.append, name=NAME)
        left = False
        self._open_in = key or self._notebook.cell_key
        self._opened.set()
        self.notices.refresh()
        try:
            self._apart(lambda: begin(console))
            if said and not over() and getattr(self._notebook.shell, "kernel", None) is not None:
                said.insert(0, _HOLDS_MORTEM if heir is not None else _HOLDS)
            while not over():
                self._flush(said)
                line = self.ask(console.prompt(), over)
                if line is None:
                    self._say("The prompt has closed: nothing is stopped here any more.\n")
                    return False
                news = console.news()
                if news:
                    self._say(f"Stopped meanwhile:\n{news}\n")
                if self._apart(lambda line=line: console.run(line)):
                    left = True
                    return True
                if patient and console.is_stepping and over():
                    self._flush(said)
                    self._say("The step takes its time; an interrupt stops waiting for it.\n")
                    self._apart(partial(debugger.wait, lambda _stops: not over()))
                    said.append(f"{console.news()}\n")
            return False
        except EOFError:
            left = True
            return True
        finally:
            self._flush(said)
            if left and heir is not None:
                heir.take_over(console)
            console.release()
            console.close()
            self._open_in = ""
            self._opened.clear()
            self.notices.refresh()

    @property
    def is_open(self) -> bool:
        """Whether a prompt waits for a line somewhere in this notebook."""
        return bool(self._open_in)

    @staticmethod
    def _apart(work: Callable[[], object]) -> bool:
        """Do something on another thread: this one may be in an event loop, where it must not wait for ranks."""
        done: list[object] = []
        thread = threading.Thread(target=lambda: done.append(work()), name="monarch-console", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)  # in steps, so that an interrupt is heard
        return bool(done and done[0])

    def _flush(self, said: list[str]) -> None:
        if said:
            self._say("".join(said))
            said.clear()

    @staticmethod
    def _say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    # -- asking -----------------------------------------------------------------------------------

    def ask(self, prompt: str, over: Callable[[], bool]) -> str | None:
        """Ask the front end for a line. None: `over()` became true meanwhile, or the cell was cancelled.

        Raises:
            EOFError, KeyboardInterrupt: the person's answer.
        """
        kernel = getattr(self._notebook.shell, "kernel", None)
        if kernel is None:
            return input(prompt)
        return _ask_front_end(kernel, prompt, lambda: self._is_cancelled() or over())

    def _is_cancelled(self) -> bool:
        sigint = getattr(self._notebook.shell, "sigint", None)
        return bool(sigint is not None and sigint.awaiting_loop is not None and sigint.cancelled)


def _ask_front_end(kernel: Any, prompt: str, over: Callable[[], bool]) -> str | None:
    """ipykernel's `raw_input`, with an end: nothing in the protocol takes a question back, but we need not wait."""
    import zmq

    sys.stdout.flush()
    sys.stderr.flush()
    stdin = kernel.stdin_socket
    while stdin.poll(0, zmq.POLLIN):  # answers to questions that were given up
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
    if value == "\x04":
        raise EOFError
    return value


__all__ = ["NAME", "StopPrompt"]
