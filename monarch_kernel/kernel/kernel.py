"""The kernel and its shell, based on ipykernel: interrupts reach ranks, faults wait for cells, shutdown is clean."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from traceback import walk_tb
from types import TracebackType
from typing import Any

import zmq
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult
from traitlets import Bool, Type

from monarch_kernel import environment
from monarch_kernel._version import __version__
from monarch_kernel.aliases import enable_monarch_imports
from monarch_kernel.display import is_hidden
from monarch_kernel.introspection import child_processes
from monarch_kernel.kernel.debug.mux import DEADLINE, SETTINGS, MonarchDebugger, answer_beside
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay
from monarch_kernel.kernel.interrupts.sigint_handler import SigintHandler, SigintMonitor, running_meshes
from monarch_kernel.kernel.output.cell_errors import FaultNotices
from monarch_kernel.kernel.rank.user_code import cut

#: The time limit for meshes to stop at shutdown (seconds). jupyter_client kills the kernel after five seconds; the host
#: agent then notices that its controller is gone, and ends the remaining processes.
SHUTDOWN_DEADLINE = 3.0
#: The time for further cells of the same front-end action to arrive after the first has begun (seconds).
ARRIVAL = 0.1


class MonarchShell(ZMQInteractiveShell):
    """A ``ZMQInteractiveShell`` in which an interrupt of user code always ends in KeyboardInterrupt."""

    sigint: SigintHandler

    def __init__(self, **kwargs: object) -> None:
        self.breakpoints_set = threading.Event()
        """Cleared while a debug request of the front end's sets breakpoints on ranks, which takes them up to seconds.

        A cell that is run meanwhile waits, so that it does not run past a breakpoint that its user sees.
        """
        self.breakpoints_set.set()
        super().__init__(**kwargs)

    def run_cell(self, *args: Any, **kwargs: Any) -> ExecutionResult:
        """Run a cell that does not await."""
        with self.sigint.interruptible():
            self.breakpoints_set.wait(DEADLINE)
            return super().run_cell(*args, **kwargs)

    async def run_cell_async(self, raw_cell: str, *args: Any, **kwargs: Any) -> ExecutionResult:
        """Run a cell that may await. No exception leaves this method, since it would lose the reply."""
        try:
            with self.sigint.interruptible():
                self.breakpoints_set.wait(DEADLINE)
                result = await super().run_cell_async(raw_cell, *args, **kwargs)
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            # The exception occurred in IPython's own code, around user code.
            self.showtraceback()
            result = ExecutionResult(ExecutionInfo(raw_cell, False, False, True, None))
            result.error_in_exec = error
        if self._is_interrupt(result.error_in_exec):
            result.error_in_exec = KeyboardInterrupt()
        return result

    def user_expressions(self, expressions: dict[str, str]) -> Any:
        """Evaluate the expressions that the front end sent with the cell; they are user code as well."""
        with self.sigint.interruptible():
            return super().user_expressions(expressions)

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: object) -> None:
        """Show an error. A cell that Ctrl-C cancelled while it awaited shows KeyboardInterrupt."""
        _, value, tb = exc_tuple or sys.exc_info()
        if self._is_interrupt(value) or type(value) is KeyboardInterrupt:
            if not self._has_user_code(tb):  # it occurred in IPython's own code, between two lines of the cell
                self._showtraceback(KeyboardInterrupt, KeyboardInterrupt(), ["KeyboardInterrupt"])
                return
            exc_tuple = (KeyboardInterrupt, KeyboardInterrupt(), cut(tb, interrupt=True))
        super().showtraceback(exc_tuple, *args, **kwargs)

    def _has_user_code(self, tb: TracebackType | None) -> bool:
        cells = self.compile._filename_map
        return any(frame.f_code.co_filename in cells for frame, _line in walk_tb(tb))

    def _is_interrupt(self, error: BaseException | None) -> bool:
        return isinstance(error, asyncio.CancelledError) and self.sigint.cancelled


class MonarchKernel(IPythonKernel):
    """The Jupyter kernel: a complete Python kernel that also runs meshes."""

    implementation = "monarch_kernel"
    implementation_version = __version__

    shell_class = Type(MonarchShell)
    debugger_class = Type(MonarchDebugger)

    shell: MonarchShell

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        relay = get_relay()
        relay.notify = self._notify_cell
        relay.default_targets = running_meshes
        self.interrupts = relay
        self._sigint = SigintHandler(relay)
        self._watch = SigintMonitor(self._sigint)
        self.shell.sigint = self._sigint
        self.faults = FaultNotices(self.shell)
        self._running: dict[str, Any] | None = None  # the execute request that is running
        self._status_lock = threading.Lock()
        self._arrived: set[str] = set()  # ids of execute requests that have not begun
        self._arrival = threading.Condition()  # notified when one is added
        self._debug_requests: set[asyncio.Task[None]] = set()
        self._settings: set[asyncio.Task[None]] = set()  # the requests among them that set breakpoints

    @property
    def banner(self) -> str:
        """The text that a console shows when it starts."""
        return f"monarch_kernel {__version__}\n{super().banner}"

    def start(self) -> None:
        """Begin to handle messages."""
        self._install_sigint()
        self.interrupts.connected = True
        self.interrupts.start()
        self.faults.install()
        child_processes.install()
        super().start()

    # -- interrupts -----------------------------------------------------------------------------------

    def _install_sigint(self) -> None:
        # Repeated before and after each request, since user code may have installed its own handler.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._sigint)
            self._watch.install()

    def pre_handler_hook(self) -> None:
        """Called before the shell handles a message, on the same thread."""
        if threading.current_thread() is threading.main_thread():
            self._install_sigint()
            self._sigint.begin()

    def post_handler_hook(self) -> None:
        """Called after the shell has handled a message."""
        if threading.current_thread() is threading.main_thread():
            self._sigint.end()
            self._install_sigint()

    async def shell_channel_thread_main(self, msg: Any) -> None:
        """Forward a message to the thread that handles it. Called on the thread that receives messages."""
        session: Any = self.session
        with suppress(Exception):  # an invalid message is reported where it is handled
            idents, frames = session.feed_identities(msg, copy=False)
            request = session.deserialize(frames, content=False, copy=False)
            header = request["header"]
            if header["msg_type"] == "execute_request" and header.get("subshell_id") is None:
                request["content"] = session.unpack(request["content"])
                ranks, running = getattr(getattr(self, "debugger", None), "ranks", None), self._running
                if ranks is not None and running is not None and answer_beside(self, idents, request, running, ranks):
                    return
                if not is_hidden(request["content"]):
                    with self._arrival:
                        self._arrived.add(header["msg_id"])
                        self._arrival.notify_all()
        await super().shell_channel_thread_main(msg)

    def set_parent(self, ident: object, parent: dict[str, Any], channel: str = "shell") -> None:
        """Called when a message is handled or discarded."""
        super().set_parent(ident, parent, channel)
        if channel == "shell":
            self._arrived.discard(parent.get("header", {}).get("msg_id", ""))

    def cells_wait(self) -> bool:
        """Return whether further cells are queued, as after "Run All". Waits a moment for one."""
        with self._arrival:
            return self._arrival.wait_for(lambda: bool(self._arrived), ARRIVAL)

    async def execute_request(self, stream: object, ident: object, parent: Any) -> None:
        """Run a cell."""
        on_main = threading.current_thread() is threading.main_thread()
        if on_main:
            self._running = parent
        try:
            with self._sigint.request(parent):
                await super().execute_request(stream, ident, parent)
        except zmq.ZMQError:
            if not self.interrupts.ending.is_set():  # else the shutdown has ended the cell, and closed the sockets
                raise
        finally:
            if on_main:
                with self._status_lock:
                    self._running = None

    def _publish_status(self, status: str, channel: str, parent: dict[str, object] | None = None) -> None:
        """Publish that a message is being handled, or no longer is.

        Front ends take the last status as the status of the kernel. After a message on a subshell, such as a click in a
        view of the meshes, this therefore publishes busy again if a cell is running.
        """
        super()._publish_status(status, channel, parent)
        if status == "idle" and channel == "shell" and threading.current_thread() is not threading.main_thread():
            with self._status_lock:
                if self._running is not None:
                    super()._publish_status("busy", channel, self._running)

    def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Any:
        # ipykernel's own version does not wake the event loop, so an idle await would last until another event wakes
        # it.
        return self._sigint.awaiting(future)

    def _notify_cell(self, cell: object, text: str) -> None:
        """Print a sentence below the cell that it concerns. Called on the relay's thread."""
        tokens = self.shell.set_thread_parent(cell) if isinstance(cell, dict) else ()
        try:
            print(text, file=sys.stderr, flush=True)
        finally:
            self.shell.reset_thread_parent(tokens)

    # -- history ------------------------------------------------------------------------------------

    def do_history(self, hist_access_type: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Answer a request for input history."""
        reply: dict[str, Any] = super().do_history(hist_access_type, *args, **kwargs)
        manager = self.shell.history_manager
        if hist_access_type == "range" and manager is not None:
            # In ranges, IPython numbers the current session 0; everywhere else it uses the session's real number.
            current = manager.session_number
            reply["history"] = [(entry[0] or current, *entry[1:]) for entry in reply["history"]]
        return reply

    # -- debugger -------------------------------------------------------------------------------------

    async def debug_request(self, stream: object, ident: object, parent: Any) -> None:
        """Answer a debug request, without blocking the channel if it may wait for ranks."""
        answered = super().debug_request(stream, ident, parent)
        debugger = getattr(self, "debugger", None)  # None where debugpy cannot be imported
        if debugger is None or not debugger.may_wait(parent["content"]):
            await answered
            return
        task = asyncio.get_running_loop().create_task(answered)
        self._debug_requests.add(task)
        task.add_done_callback(self._debug_requests.discard)
        if parent["content"].get("command") in SETTINGS:
            self._settings.add(task)
            self.shell.breakpoints_set.clear()
            task.add_done_callback(self._is_set)

    def _is_set(self, task: asyncio.Task[None]) -> None:
        self._settings.discard(task)
        if not self._settings:
            self.shell.breakpoints_set.set()

    async def do_debug_request(self, msg: dict[str, object]) -> dict[str, object]:
        """Answer the front end's debugger, even after an exception: it would wait forever for a missing reply."""
        from monarch_kernel.debugger.dap import refusal

        try:
            return await super().do_debug_request(msg) or refusal(msg, "the debugger is off")
        except Exception as error:
            self.log.exception("The debug request %r failed", msg.get("command"))
            return refusal(msg, f"{type(error).__name__}: {error}")

    # -- shutdown ------------------------------------------------------------------------------------------

    async def shutdown_request(self, stream: object, ident: object, parent: object) -> None:
        """Shut the kernel down."""
        self.interrupts.ending.set()
        await super().shutdown_request(stream, ident, parent)

    async def _at_shutdown(self) -> None:
        """Called on the control thread when a front end shuts the kernel down or restarts it."""
        extension = sys.modules.get("monarch_kernel.kernel.extension")
        if extension is not None:
            extension.kernel_ends(self.shell)
        await stop_runtime(self.log)
        await super()._at_shutdown()


async def stop_runtime(log: logging.Logger, deadline: float = SHUTDOWN_DEADLINE) -> None:
    """Stop the meshes and host agents of this process, if there are any, within ``deadline`` seconds."""
    engines = sys.modules.get("monarch_kernel.engines")
    if engines is None:
        return
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def stop() -> None:
        try:
            engines.tool_runtime().shut_down(deadline)
        except Exception:
            log.exception("The meshes of this kernel could not be stopped")
        finally:
            with suppress(RuntimeError):  # the wait has timed out, and the loop is closed
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=stop, name="monarch-shutdown", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), deadline)
    except TimeoutError:
        log.warning("The meshes of this kernel did not stop within %.0f s; they end with its process", deadline)


# The application class of the kernel, started by ``python -m monarch_kernel -f FILE``.


class MonarchKernelApp(IPKernelApp):
    """``IPKernelApp`` for ``MonarchKernel``. It keeps the name, so that users' IPython configuration applies."""

    kernel_class = Type(
        MonarchKernel,
        klass="ipykernel.kernelbase.Kernel",
        help="The kernel class to run.",
    ).tag(config=True)

    classes = [*IPKernelApp.classes, MonarchKernel]  # noqa: RUF012 - traitlets reads it from the class

    prefer_installed_monarch = Bool(
        False, help="Let `import monarch` find an installed torchmonarch, if there is one."
    ).tag(config=True)

    def init_kernel(self) -> None:
        """Create the kernel object and alias ``monarch`` to this package."""
        if environment.ENGINE.get() != "torchmonarch":  # with torchmonarch, user code must import the real Monarch
            enable_monarch_imports(prefer_installed=self.prefer_installed_monarch)
        super().init_kernel()

    def init_extensions(self) -> None:
        """Load the magics as an IPython extension, so that ``%load_ext`` and ``%reload_ext`` recognise them."""
        # IPython would continue after an extension fails to load, but a kernel without its magics must not start.
        assert self.shell is not None
        self.shell.extension_manager.load_extension("monarch_kernel")
        gc.freeze()  # what was loaded stays until the end: no collection looks at it again
        gc.enable()
        super().init_extensions()


def launch(argv: Sequence[str] | None = None) -> None:
    """Run the kernel until it receives a shutdown request.

    Args:
        argv: ipykernel's arguments, such as ``-f CONNECTION_FILE``; defaults to those of the process.
    """
    options: dict[str, list[str]] = {} if argv is None else {"argv": list(argv)}
    MonarchKernelApp.launch_instance(**options)
