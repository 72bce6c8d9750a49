"""Run debugpy in one rank, reachable only through the actor runtime.

`DebugpyTunnel` is an actor of the rank, and debugpy runs in the rank's process (there is no adapter process). debugpy
does not listen on a port: any user of the host could connect there and thereby end the current session. Instead, its
listening socket is an object that returns one end of a socket pair for each connection. The tunnel forwards bytes
between the other end and the caller of `connect`.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from monarch_kernel import programs
from monarch_kernel.actor import Actor, Port, endpoint
from monarch_kernel.debugger.dap.messages import Frames, content, frame

#: How long debugpy may take to start (seconds).
START_TIMEOUT = 15.0
# How long debugpy may take to resume and release everything (seconds).
_GOODBYE = 2.0
_CHUNK = 65536
# Requests of this module have numbers that no IDE uses.
_LAST = 2**30 + 1
_BYE = b'"disconnect"'


@dataclass(frozen=True, slots=True)
class DebugpyProcess:
    """A rank with debugpy.

    Attributes:
        pid: its process.
        folder: its working folder.
        python: its version, such as (3, 11).
        stops: the number of threads that the mesh debugger holds there.
        capabilities: debugpy's answer to ``initialize``; empty while threads are stopped.
    """

    pid: int
    folder: str
    python: tuple[int, int]
    stops: int
    capabilities: dict[str, object]


class DebugpyTunnel(Actor):
    """Starts debugpy in a rank, and forwards its bytes."""

    __tool__ = True
    __background__ = True

    def __init__(self) -> None:
        self._listener: _Listener | None = None
        self._capabilities: dict[str, Any] = {}
        self._socket: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._held: Port[None] | None = None

    @endpoint
    def begin(self) -> DebugpyProcess:
        """Start debugpy; user code continues.

        Raises:
            RuntimeError: debugpy is not installed, or did not start.
        """
        from monarch_kernel.debugger.rank.rank_debugger import existing_tracer

        engine = existing_tracer()
        stops = sum(bool(stop.thread) for stop in engine.stops()) if engine is not None else 0
        if not stops and self._listener is None:
            result: list[Any] = []
            # Use a thread that ends: debugpy traces the thread that starts it, which must not be one of the runtime's.
            thread = threading.Thread(target=lambda: result.append(_listen()), daemon=True)
            thread.start()
            thread.join(START_TIMEOUT)
            if not result:
                raise RuntimeError(f"debugpy did not start in {START_TIMEOUT:.0f} s")
            if isinstance(result[0], Exception):
                raise RuntimeError(f"debugpy cannot be started: {result[0]}")
            self._listener = result[0]
            self._ask_capabilities()
        return DebugpyProcess(os.getpid(), os.getcwd(), sys.version_info[:2], stops, self._capabilities)

    def _ask_capabilities(self) -> None:
        """Query debugpy's capabilities, as an IDE does first: the gateway reports them before it admits an IDE."""
        said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        connection = self._open(said.put)
        arguments = {"adapterID": "debugpy", "clientID": "monarch_kernel"}
        connection.sendall(frame({"type": "request", "seq": 1, "command": "initialize", "arguments": arguments}))
        while not self._capabilities:
            try:
                message = said.get(timeout=START_TIMEOUT)
            except queue.Empty:
                message = b""
            if not message:
                raise RuntimeError("debugpy has started, but does not answer")
            reply = content(message)
            if reply.get("type") == "response" and reply.get("command") == "initialize":
                self._capabilities = reply["body"]
        self._close()

    @endpoint
    def connect(self, port: Port[bytes]) -> None:
        """Connect to debugpy. Forward its data to `port`, and b"" at the end. An older connection ends."""
        self._close()
        self._open(port.send)

    def _open(self, heard: Callable[[bytes], object]) -> socket.socket:
        assert self._listener is not None
        self._socket, theirs = socket.socketpair()
        self._listener.offer(theirs)
        self._reader = threading.Thread(target=_read, args=(self._socket, heard), name="monarch-debugpy", daemon=True)
        _spare(self._reader)
        self._reader.start()
        return self._socket

    @endpoint(explicit_response_port=True)
    def hold(self, port: Port[None]) -> None:
        """Keep the call open: its failure notifies the caller that this rank has ended."""
        self._held = port

    @endpoint
    def write(self, data: bytes) -> None:
        """Send bytes to debugpy."""
        if self._socket is not None:
            try:
                self._socket.sendall(data)
            except OSError:
                self._close()

    @endpoint
    def hang_up(self) -> None:
        """End the connection. Threads that debugpy has stopped continue."""
        self._close()

    def __cleanup__(self, error: BaseException | None) -> None:
        """End debugging: stopped threads continue, and no code is traced any more."""
        self._close()
        if self._listener is not None:
            import pydevd  # type: ignore[import-not-found]  # debugpy has it on the path

            pydevd.stoptrace()
            self._listener = None
            _hooks.give_back()

    def _close(self) -> None:
        if self._socket is None:
            return
        connection, self._socket = self._socket, None
        # An IDE that vanished has not disconnected, so debugpy would keep its threads stopped.
        goodbye = {"type": "request", "seq": _LAST, "command": "disconnect", "arguments": {"terminateDebuggee": False}}
        try:
            connection.sendall(frame(goodbye))
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other end has closed already
        if self._reader is not None:
            self._reader.join(_GOODBYE)
        connection.close()


class _Hooks:
    """Manages the hook of `breakpoint()`. pydevd installs its own hook permanently when it is imported."""

    def __init__(self) -> None:
        self._before: Callable[..., Any] | None = None

    def note(self) -> None:
        """Save the current hook, before pydevd may be imported."""
        self._before = sys.breakpointhook

    def take(self, pydevd: ModuleType) -> None:
        """Make `breakpoint()` stop for the IDE, even if pydevd was already imported and its hook removed."""
        pydevd.install_breakpointhook()

    def give_back(self) -> None:
        """Restore the previous behaviour of `breakpoint()`."""
        if self._before is not None:
            sys.breakpointhook, self._before = self._before, None


_hooks = _Hooks()


class _Listener:
    """The object that debugpy uses as its listening socket; all connections come from this process."""

    def __init__(self) -> None:
        self._offered: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()

    def offer(self, sock: socket.socket) -> None:
        """Let debugpy accept this socket."""
        self._offered.put(sock)

    # The methods that debugpy calls.

    def getsockname(self) -> tuple[str, int]:
        return "", 0

    def listen(self, _backlog: int) -> None:
        pass

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        sock = self._offered.get()
        if sock is None:
            raise OSError("debugpy has ended")
        return sock, self.getsockname()

    def close(self) -> None:
        self._offered.put(None)


def _listen() -> _Listener | Exception:
    """Start debugpy. Return its listening socket, or the error."""
    try:
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # otherwise debugpy prints into the cell
        _hooks.note()
        import debugpy  # type: ignore[import-not-found]
        from debugpy.server import api  # type: ignore[import-not-found]

        api.ensure_logging()
        import pydevd  # type: ignore[import-not-found]

        _hooks.take(pydevd)
        spare_runtime()
        listener = _Listener()
        create = pydevd.create_server_socket
        pydevd.create_server_socket = lambda host, port: listener
        try:
            pydevd.settrace(
                host="127.0.0.1",
                port=0,
                suspend=False,
                block_until_connected=False,
                wait_for_ready_to_run=False,
                patch_multiprocessing=False,
                # A user's actor between two calls may be polling for the whole process. An IDE must not be able to stop
                # it there.
                dont_trace_start_patterns=(_folder_of(debugpy), programs.PACKAGE + os.sep),
            )
            pydevd.get_global_debugger().wait_for_server_socket_ready()
        finally:
            pydevd.create_server_socket = create
        return listener
    except Exception as error:
        return error


def _folder_of(package: ModuleType) -> str:
    return os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep


def spare_runtime() -> None:
    """Exclude the runtime's threads from debugpy. If they were stopped, this process could not be reached."""
    for thread in threading.enumerate():
        if thread.name.startswith("monarch-") and thread.name != "monarch-actor-driver":
            _spare(thread)


def _spare(thread: threading.Thread) -> None:
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]


def _read(connection: socket.socket, heard: Callable[[bytes], object]) -> None:
    """Forward debugpy's data, up to its answer to the tunnel's own disconnect request."""
    frames = Frames()
    try:
        while data := connection.recv(_CHUNK):
            for message in frames.feed(data):
                if _BYE in message and content(message).get("request_seq") == _LAST:
                    return
                heard(message)
    except (OSError, ValueError):
        pass
    finally:
        heard(b"")
