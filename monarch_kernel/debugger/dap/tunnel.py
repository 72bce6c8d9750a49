"""debugpy in one rank, reached through the actor runtime and in no other way.

`DebugpyTunnel` lives in the rank. debugpy runs in the rank's process (no adapter process of its own) and listens at a
port of the loopback interface, where it does nothing for whoever does not know a token that never leaves the process.
The tunnel connects there, shows the token, and from then on carries bytes between that connection and whoever called
`connect`.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import monarch_kernel
from monarch_kernel.actor import Actor, Port, endpoint
from monarch_kernel.debugger.dap.framing import Frames, content, frame

#: How long debugpy may take to begin (seconds).
START_TIMEOUT = 15.0
# How long debugpy may take to let go of everything (seconds).
_GOODBYE = 2.0
_CHUNK = 65536
# Our own requests have numbers that no IDE uses.
_FIRST, _LAST = 2**30, 2**30 + 1
_BYE = b'"disconnect"'
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Begun:
    """What there is to know of a rank with debugpy.

    Attributes:
        pid: its process.
        folder: its working folder.
        python: its version, such as (3, 11).
        stops: how many threads the mesh debugger holds there.
    """

    pid: int
    folder: str
    python: tuple[int, int]
    stops: int


class DebugpyTunnel(Actor):
    """Starts debugpy in a rank, and carries its bytes."""

    __tool__ = True
    __background__ = True

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._port = 0
        self._socket: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._held: Port[None] | None = None

    @endpoint
    def begin(self) -> Begun:
        """Start debugpy; user code goes on.

        Raises:
            RuntimeError: it is not installed, or did not begin.
        """
        from monarch_kernel.debugger.rank import existing_engine

        engine = existing_engine()
        stops = len(engine.stops()) if engine is not None else 0
        begun = Begun(os.getpid(), os.getcwd(), sys.version_info[:2], stops)
        if stops or self._port:
            return begun
        result: list[Any] = []
        # On a thread that ends: debugpy traces the one that starts it, which must not be ours.
        thread = threading.Thread(target=lambda: result.append(_listen(self._token)), daemon=True)
        thread.start()
        thread.join(START_TIMEOUT)
        if not result:
            raise RuntimeError(f"debugpy did not begin in {START_TIMEOUT:.0f} s")
        if isinstance(result[0], Exception):
            raise RuntimeError(f"debugpy cannot be started: {result[0]}")
        self._port = result[0]
        return begun

    @endpoint
    def connect(self, port: Port[bytes]) -> None:
        """Connect to debugpy; what it says goes to `port`, and b"" at the end. An older connection ends."""
        self._close()
        self._socket = connection = socket.create_connection((_LOOPBACK, self._port), START_TIMEOUT)
        arguments = {"debugServerAccessToken": self._token}
        connection.sendall(
            frame({"type": "request", "seq": _FIRST, "command": "pydevdAuthorize", "arguments": arguments})
        )
        connection.settimeout(None)
        self._reader = threading.Thread(target=_read, args=(connection, port), name="monarch-debugpy", daemon=True)
        _spare(self._reader)
        self._reader.start()

    @endpoint(explicit_response_port=True)
    def hold(self, port: Port[None]) -> None:
        """Never answered: the caller learns by it that this rank has ended."""
        self._held = port

    @endpoint
    def write(self, data: bytes) -> None:
        """Bytes for debugpy."""
        if self._socket is not None:
            try:
                self._socket.sendall(data)
            except OSError:
                self._close()

    @endpoint
    def hang_up(self) -> None:
        """End the connection; threads that debugpy has stopped go on."""
        self._close()

    def __cleanup__(self, error: BaseException | None) -> None:
        """End debugging: what it stopped goes on, and no code is traced any more."""
        self._close()
        if self._port:
            import pydevd  # type: ignore[import-not-found]  # debugpy has it on the path

            pydevd.stoptrace()
            self._port = 0

    def _close(self) -> None:
        if self._socket is None:
            return
        connection, self._socket = self._socket, None
        # An IDE that vanished has not said goodbye, and debugpy would keep stopped what is stopped.
        goodbye = {"type": "request", "seq": _LAST, "command": "disconnect", "arguments": {"terminateDebuggee": False}}
        try:
            connection.sendall(frame(goodbye))
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other end was faster
        if self._reader is not None:
            self._reader.join(_GOODBYE)
        connection.close()


def _listen(token: str) -> int | Exception:
    """Start debugpy at a free port; that port, or what went wrong."""
    try:
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it prints into the user's cell
        import debugpy  # type: ignore[import-not-found]
        from debugpy.server import api  # type: ignore[import-not-found]

        api.ensure_logging()
        import pydevd  # type: ignore[import-not-found]

        spare_runtime()
        pydevd.settrace(
            host=_LOOPBACK,
            port=0,
            suspend=False,
            block_until_connected=False,
            wait_for_ready_to_run=False,
            patch_multiprocessing=False,
            access_token=token,
            # A user's actor that is between two calls may be the one that polls for the whole process: whatever an
            # IDE asks for, it must not be stopped in there.
            dont_trace_start_patterns=(_folder_of(debugpy), _folder_of(monarch_kernel)),
        )
        tracer = pydevd.get_global_debugger()
        tracer.wait_for_server_socket_ready()
        return int(tracer._server_socket_name[1])
    except Exception as error:
        return error


def _folder_of(package: ModuleType) -> str:
    return os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep


def spare_runtime() -> None:
    """Have debugpy leave the runtime's threads of this process alone: with them stopped, nobody could reach it."""
    for thread in threading.enumerate():
        if thread.name.startswith("monarch-") and thread.name != "monarch-actor-driver":
            _spare(thread)


def _spare(thread: threading.Thread) -> None:
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]


def _read(connection: socket.socket, port: Port[bytes]) -> None:
    """Carry what debugpy says, but for its answers to what the tunnel itself has said; ends with its goodbye."""
    frames = Frames()
    try:
        while data := connection.recv(_CHUNK):
            for message in frames.feed(data):
                number = content(message).get("request_seq") if b"pydevdAuthorize" in message or _BYE in message else 0
                if number == _LAST:
                    return
                if number != _FIRST:
                    port.send(message)
    except (OSError, ValueError):
        pass
    finally:
        port.send(b"")
