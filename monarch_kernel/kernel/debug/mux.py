"""Combine ipykernel's debugger, for threads of the kernel, and the mesh debugger, for ranks, into one for front ends.

`MonarchDebugger` forwards each request of the Debug Adapter Protocol (DAP) to the debugger that it concerns, or to
both, and puts the stops of both into one queue (`monarch_kernel.debugger.dap`). Requests to ranks run on separate
threads. The control channel, which carries interrupts and the kernel's shutdown, therefore never waits for a rank.
"""

from __future__ import annotations

import asyncio
import linecache
import os
import re
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import zmq
from ipykernel.debugger import Debugger, DebugpyClient

from monarch_kernel import programs
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay
from monarch_kernel.kernel.magics.arguments import Arguments, peek
from monarch_kernel.kernel.magics.dap_magics import DapMagics, FocusAnswer, focus
from monarch_kernel.kernel.rank.sent_values import fallback_bundle

if TYPE_CHECKING:
    from monarch_kernel.debugger.dap import RankSession

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


# Handle `%mesh focus` where no cell can run it: while a cell is stopped, and in a debugger's console.

_LINE = re.compile(r"\s*%mesh\s+focus\b(.*)\s*")


def answer_typed(ranks: RankSession, text: str) -> FocusAnswer | None:
    """Answer a line typed into a debugger's console; None if it is not `%mesh focus`."""
    line = _LINE.fullmatch(text)
    if line is None:
        return None
    found = peek(DapMagics.focus, line[1])
    if found is None:
        return FocusAnswer(f"%mesh focus takes a rank, not {line[1].strip()!r}", refused=True)
    return focus(ranks, found.rank, found.on)


def answer_beside(
    kernel: Any, idents: Any, request: dict[str, Any], running: dict[str, object], ranks: RankSession
) -> bool:
    """Answer an execute request immediately if its cell is `%mesh focus`. Called on the thread that receives requests.

    Args:
        kernel: the kernel.
        idents: the sender of the request.
        request: the request, with its content.
        running: the request whose cell is running.
        ranks: the session of the front end's debugger.

    Returns:
        Whether the request was answered; if not, it waits in the queue as usual.
    """
    found = _read(str(request["content"].get("code", "")))
    if found is None:
        return False
    answer = focus(ranks, found.rank, found.on)
    session, count = kernel.session, kernel.shell.execution_count

    def publish(kind: str, content: dict[str, Any], parent: dict[str, Any] = request) -> None:
        session.send(kernel.iopub_socket, kind, content, parent, ident=kernel._topic(kind))

    publish("status", {"execution_state": "busy"})
    publish("execute_input", {"code": request["content"]["code"], "execution_count": count})
    reply: dict[str, Any] = {"status": "ok", "execution_count": count, "user_expressions": {}, "payload": []}
    if answer.refused:
        text = f"%mesh focus: {answer.text}"
        error = {"ename": "UsageError", "evalue": text, "traceback": [f"UsageError: {text}"]}
        publish("error", error)
        reply = {"status": "error", "execution_count": count, **error}
    else:
        publish("stream", {"name": "stdout", "text": f"{answer.text}\n"})
    session.send(kernel.shell_stream, "execute_reply", reply, request, idents)
    publish("status", {"execution_state": "idle"})
    publish("status", {"execution_state": "busy"}, running)  # front ends show the last status as the kernel's
    return True


def _read(code: str) -> Arguments | None:
    line = _LINE.fullmatch(code)
    return peek(DapMagics.focus, line[1]) if line is not None else None


Message = dict[str, Any]

#: The deadline of ranks for one request (seconds). The mesh debugger's own deadlines are shorter.
DEADLINE = 10.0
#: How long debugpy may take to attach to the kernel (seconds).
ATTACH_DEADLINE = 15.0
#: The reconnection delay after the adapter has ended a connection (milliseconds). In effect never: the connection is
#: closed at once.
RECONNECT = 3_600_000
#: Requests that concern both the kernel and ranks. They are handled in order, one at a time.
_BOTH = ("attach", "threads", "setBreakpoints", "setExceptionBreakpoints", "disconnect", "source")
#: Requests that determine where later cells stop.
SETTINGS = ("attach", "setBreakpoints", "setExceptionBreakpoints")
_WORKERS = 4


class _LastingClient(DebugpyClient):  # type: ignore[misc]
    """ipykernel's client of debugpy's adapter, which can be disabled and enabled repeatedly.

    The adapter accepts clients on one thread, which ends at the first exception. It raises in two cases: if a client
    disconnects during the handshake, as zmq does when it reconnects, and if the oldest client, to which it reports each
    new client, has just left. This class therefore keeps an older connection open permanently.
    """

    _oldest: socket.socket | None = None

    def connect_tcp_socket(self) -> None:
        """Connect to the adapter."""
        if self._oldest is None:
            self._oldest = socket.create_connection(self.get_host_port())
            self._oldest.setblocking(False)
        with suppress(OSError):
            while self._oldest.recv(65536):  # so that the adapter can always send
                pass
        self.debugpy_stream.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT)
        super().connect_tcp_socket()


class MonarchDebugger(Debugger):
    """ipykernel's debugger, extended to ranks, and without the injection into child processes.

    debugpy makes every Python child process wait for a debugger to attach. Jupyter front ends never attach.
    Subprocesses and the host agent's ranks would therefore hang once the user has pressed the bug button.
    """

    def __init__(
        self, log: object, debugpy_stream: object, event_callback: Callable[[Message], None], *args: Any
    ) -> None:
        super().__init__(log, debugpy_stream, self._kernel_event, *args)
        self.debugpy_client = _LastingClient(log, debugpy_stream, self._handle_event)
        self._publish = event_callback
        self.ranks: RankSession | None = None
        """The session with ranks; None unless a front end has turned the debugger on."""
        self._spare: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: ThreadPoolExecutor | None = None
        # debugpy's replies are matched to requests by their order, so only one request is pending at a time.
        self._one_request = asyncio.Lock()
        self._order = asyncio.Lock()
        #: The front end's last `setBreakpoints` for each file, restored when the debugger is turned on again.
        self._breakpoint_requests: dict[str, Message] = {}
        #: The command of the last request. If it was a single `dumpCell`, also the file that it wrote.
        self._last = ("", "")

    def start(self) -> bool:
        """Start listening. Called on the control thread by the first ``initialize`` request."""
        if not self.debugpy_initialized:
            import debugpy

            debugpy.configure(subProcess=False)
        return bool(super().start())

    async def attach(self, message: Message) -> Message:
        """Attach debugpy to the kernel, except to threads and files of this package.

        A kernel that is stopped at a breakpoint must still be able to reach its ranks.
        """
        from monarch_kernel.debugger.rank.debugpy_tunnel import spare_runtime

        self._spare = spare_runtime
        spare_runtime()
        return dict(await super().attach(message))

    # -- requests ------------------------------------------------------------------------------------

    def may_wait(self, message: Message) -> bool:
        """Return whether a request may wait for ranks. Such a request must not block the control channel."""
        if self.ranks is None:
            return False
        return message.get("command") in _BOTH or self.ranks.owns(message)

    async def process_request(self, message: Message) -> Message:
        """Answer one request of a front end. Called on the control thread."""
        command = str(message.get("command"))
        before, self._last = self._last, (command, "")
        if command == "dumpCell":
            written: Message = dict(await super().process_request(message))
            if before[0] != command:  # several: all cells before one is debugged
                self._last = (command, str((written.get("body") or {}).get("sourcePath") or ""))
            return written
        if command == "setBreakpoints":
            _name_cell(message, before[1])
        if command == "initialize":
            return await self._initialize(message)
        if command in _BOTH:
            async with self._order:
                return await self._ask_both(command, message)
        ranks = self.ranks
        if ranks is not None and command == "evaluate" and (answer := answer_typed(ranks, _typed(message))) is not None:
            if answer.refused:
                return _refusal(message, answer.text)
            return _response(message, {"result": answer.text, "variablesReference": 0})
        if ranks is not None and ranks.owns(message):
            return await self._from_ranks(ranks.answer, message)
        if command.startswith("mesh/"):
            return _refusal(message, "the debugger is off: turn it on in the front end (the bug button) first")
        if ranks is not None:
            ranks.kernel_moves(command)
        reply: Message = await super().process_request(message)
        if command == "debugInfo" and ranks is not None:
            reply["body"]["stoppedThreads"] = ranks.stopped_threads
        if command == "continue" and ranks is not None and reply.get("body"):
            reply["body"]["allThreadsContinued"] = False  # stopped ranks stay stopped
        return reply

    async def _initialize(self, message: Message) -> Message:
        message.setdefault("arguments", {}).setdefault("adapterID", "")  # without it debugpy never attaches
        reply: Message = await super().process_request(message)
        if not self.is_started:
            return reply
        from monarch_kernel.debugger import get_debugger
        from monarch_kernel.debugger.dap import ERROR_FILTERS, RankSession
        from monarch_kernel.engines import tool_runtime

        self._loop = asyncio.get_running_loop()
        if self.ranks is None:
            self._threads = ThreadPoolExecutor(_WORKERS, "monarch-dap")
            self.ranks = RankSession(
                get_debugger(), self._send, self._later, tool_runtime().list_proc_meshes, waited_for, fallback_bundle
            )
        self.ranks.initialize(message.get("arguments") or {})
        if reply.get("success", True) and isinstance(reply.get("body"), dict):
            filters = reply["body"].get("exceptionBreakpointFilters") or []
            reply["body"]["exceptionBreakpointFilters"] = [*filters, *ERROR_FILTERS]
        return reply

    async def _ask_both(self, command: str, message: Message) -> Message:
        ranks = self.ranks
        if ranks is None:
            return dict(await super().process_request(message))
        arguments: Message = message.setdefault("arguments", {})
        if command == "disconnect":
            self.ranks = None
            try:
                await self._on_thread(ranks.close)
            except Exception:  # the kernel's own debugger must end all the same
                self.log.exception("The debugger of the ranks did not end cleanly")
            if self._threads is not None:
                self._threads.shutdown(wait=False)
            kept = self.breakpoint_list
            reply = dict(await super().process_request(message))
            self.breakpoint_list = kept  # `debugInfo` reports these when the debugger is turned on again
            return reply
        if command == "setExceptionBreakpoints":
            names = arguments.get("filters") or []
            options = arguments.get("filterOptions") or []  # the same filters, where the front end has conditions
            asked = [*names, *(each.get("filterId") for each in options)]
            left = await self._on_thread(ranks.set_exception_filters, asked)
            arguments["filters"] = [each for each in names if each in left]
            if options:
                arguments["filterOptions"] = [each for each in options if each.get("filterId") in left]
            return dict(await super().process_request(message))
        reply = await self._from_kernel(message)
        if command == "attach":
            if ranks.lists_threads:  # such a front end sets its breakpoints itself each time
                self._breakpoint_requests.clear()
                self.breakpoint_list = {}
            for asked in list(self._breakpoint_requests.values()):
                again = {**message, "command": "setBreakpoints", "arguments": asked}
                await self._set_breakpoints(ranks, again, await self._from_kernel(again))
            await self._on_thread(ranks.attach)
        elif command == "threads":
            reply.setdefault("body", {}).setdefault("threads", []).extend(ranks.threads())
        elif command == "setBreakpoints":
            return await self._set_breakpoints(ranks, message, reply)
        elif command == "source" and not reply.get("success"):
            path = str((arguments.get("source") or {}).get("path") or "")
            text = "".join(linecache.getlines(path)) or await self._on_thread(ranks.source, path)
            if text:
                return _response(message, {"content": text})
        return reply

    async def _set_breakpoints(self, ranks: RankSession, message: Message, reply: Message) -> Message:
        from monarch_kernel.debugger.dap import is_in_editor

        worked = reply.get("success")
        kernel = reply["body"]["breakpoints"] if worked else None
        made = await self._on_thread(ranks.set_breakpoints, message["arguments"], kernel)
        path = message["arguments"].get("source", {}).get("path")
        if made and not is_in_editor(str(path)):
            self._breakpoint_requests[path] = message["arguments"]
            self.breakpoint_list[path] = [{"line": each["line"]} for each in made]
        else:
            self._breakpoint_requests.pop(path, None)
            self.breakpoint_list.pop(path, None)
        return _response(message, {"breakpoints": made})

    async def _from_kernel(self, message: Message) -> Message:
        try:
            return dict(await super().process_request(message) or {})
        except Exception as error:
            self.log.exception("The debug request %r failed", message.get("command"))
            return _refusal(message, f"{type(error).__name__}: {error}")

    async def _from_ranks(self, answer: Callable[[Message], Message], message: Message) -> Message:
        try:
            return dict(await self._on_thread(answer, message))
        except TimeoutError:
            return _refusal(message, f"no answer within {DEADLINE:.0f} s")

    async def _on_thread(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(self._threads, function, *args), DEADLINE)

    async def _forward_message(self, msg: Message) -> Message:
        async with self._one_request:
            if msg.get("command") == "disconnect":
                try:
                    return dict(await asyncio.wait_for(super()._forward_message(msg), DEADLINE))
                except TimeoutError:  # the front end leaves all the same
                    self.log.warning("debugpy did not answer to the end of the session within %.0f s", DEADLINE)
                    return _response(msg, {})
            if msg.get("command") != "attach":
                return dict(await super()._forward_message(msg))
            if "rules" in msg["arguments"]:  # the kernel is to leave internal frames out
                msg["arguments"]["rules"] = _spared(self.kernel_modules)
            try:
                return dict(await asyncio.wait_for(super()._forward_message(msg), ATTACH_DEADLINE))
            except TimeoutError:
                # debugpy has refused to attach; ipykernel would keep waiting for the events of a debugger that starts.
                refused: Message = {}
                while not self.debugpy_client.message_queue.message_queue.empty():
                    refused = await self.debugpy_client.message_queue.get_message()
                return _refusal(msg, str(refused.get("message") or "debugpy did not attach"))

    # -- events --------------------------------------------------------------------------------------

    def _kernel_event(self, event: Message) -> None:
        """Handle an event from debugpy, on the control thread."""
        if event.get("event") == "thread" and self._spare is not None:
            self._spare()  # the thread may be one of ours
        if self.ranks is None:
            self._publish(event)
        else:
            self.ranks.kernel_event(event)

    def _send(self, event: Message) -> None:
        """Publish an event from any thread, in order."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._publish, event)

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function on the control thread after a delay. May be called on any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.call_later, seconds, function)


def _spared(files: list[str]) -> list[Message]:
    """The rules by which debugpy leaves out our own files, and the packages that these files of the kernel belong to.

    Whenever a breakpoint changes, debugpy compares each function that runs with each rule. One for each file, which
    is ipykernel's way, takes more of a core than all else in the kernel.
    """
    known = set(files)
    modules = {name for name, module in sys.modules.copy().items() if getattr(module, "__file__", None) in known}
    modules.discard("__main__")  # cells have that name, too
    packages = {
        next(part for part in accumulate(name.split("."), "{}.{}".format) if part in modules) for name in modules
    }
    ours: Message = {"path": os.path.join(programs.PACKAGE, "**"), "include": False}
    return [ours, *({"module": name, "include": False} for name in sorted(packages))]


def waited_for() -> dict[str, list[int]]:
    """Return the ranks that `%%mesh` cells wait for, by mesh."""
    from monarch_kernel.kernel.cell_run import CellRun

    found: dict[str, list[int]] = {}
    for target in get_relay().targets:
        if isinstance(target, CellRun):
            found.setdefault(target.managed.name, []).extend(target.unanswered())
    return found


def _name_cell(message: Message, file: str) -> None:
    """Name the file of a cell in VS Code's request to clear the cell's last breakpoint.

    VS Code writes the file of the cell just before any request about its breakpoints, but only where breakpoints remain
    does it replace its own name of the cell by that file (issue 16406 of vscode-jupyter). The cell would stop again.
    """
    arguments: Message = message.get("arguments") or {}
    source: Message = arguments.get("source") or {}
    if file and not arguments.get("breakpoints") and str(source.get("path")).startswith("vscode-notebook-cell:"):
        source["path"] = file


def _typed(message: Message) -> str:
    return str((message.get("arguments") or {}).get("expression") or "").strip()


def _refusal(message: Message, why: str) -> Message:
    from monarch_kernel.debugger.dap import refusal

    return refusal(message, why)


def _response(message: Message, body: Message) -> Message:
    from monarch_kernel.debugger.dap import response

    return response(message, body)
