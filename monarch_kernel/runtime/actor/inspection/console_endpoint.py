"""The console endpoint of a controller, through which other programs of the same user reach its debugger.

Such a program finds the controller's socket in the run folder and requests a console. The controller does not load the
debugger before that. The request arrives like any message: in a wait, or through the background thread while user code
computes or sleeps.
"""

from __future__ import annotations

import os
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from monarch_kernel import logs
from monarch_kernel._version import __version__
from monarch_kernel.protocol.messages import ERROR, OK, OLDEST_WIRE, WIRE_VERSION, AskConsole, Reply, can_meet, encode
from monarch_kernel.protocol.private_files import PrivateFolder, temporary_folders
from monarch_kernel.protocol.socket_peers import peer_of
from monarch_kernel.runtime.actor import extensions
from monarch_kernel.runtime.node.link import Link, connect, request

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.process import System
    from monarch_kernel.runtime.actor.wire_types import Body, MessageLink

log = logs.logger(__name__)

#: The path of a Unix socket has at most 107 bytes.
_LONGEST = 107


class Controller(msgspec.Struct, frozen=True):
    """A controller process on this machine.

    Attributes:
        pid: its process id.
        program: its command line.
        address: the Unix socket that it listens on.
    """

    pid: int
    program: str
    address: str


def controllers() -> list[Controller]:
    """Return the running controllers of this user on this machine, oldest first. Does not start the runtime."""
    found: list[tuple[float, Controller]] = []
    for base in temporary_folders(_LONGEST):
        start = f"monarch-{os.getuid()}-"
        try:
            folders = [entry for entry in os.scandir(base) if entry.name.startswith(start)]
        except OSError:
            continue
        for folder in folders:
            for address in _sockets(folder.path):
                controller = _at(address)
                if controller is not None:
                    found.append((os.stat(folder.path).st_mtime, controller))
    return [controller for _, controller in sorted(found, key=lambda one: (one[0], one[1].pid))]


def _sockets(folder: str) -> list[str]:
    """Return the sockets of controllers in a run folder, if only this user can access it."""
    try:
        with PrivateFolder.open(folder) as own:
            names = own.names()
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names if name.startswith("controller-") and name.endswith(".sock")]


def _at(address: str) -> Controller | None:
    try:
        with connect(address, 1.0) as sock:
            pid = peer_of(sock)[0]
    except OSError:
        return None  # its process has ended, or its folder belongs to another user
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            program = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        program = ""
    return Controller(pid, program, address)


def ask_console(controller: Controller, timeout: float = 10.0) -> socket.socket:
    """Ask a controller to open its debugger's console, and connect to it.

    Raises:
        ConnectionError: the controller does not answer, refuses, or fails; the message says why.
    """
    who = f"process {controller.pid}"
    try:
        reply, answer = request(controller.address, AskConsole(1, WIRE_VERSION, __version__, OLDEST_WIRE), timeout)
    except TimeoutError:
        raise ConnectionError(
            f"{who} does not answer within {timeout:g} s: it is stopped, or native code holds the interpreter lock; "
            f"py-spy dump --pid {controller.pid} --native shows where it is"
        ) from None
    except OSError as error:
        raise ConnectionError(f"{who} cannot be reached: {error.strerror or error}") from None
    if reply.status != OK:
        raise ConnectionError(f"{who}: {answer.decode()}")
    try:
        return connect(answer.decode(), timeout)
    except OSError as error:
        raise ConnectionError(f"the console of {who} cannot be reached: {error.strerror or error}") from None


def install(system: System) -> None:
    """Let a controller answer requests for its console."""
    system.node.handlers[AskConsole] = partial(_on_ask_console, system)


def _on_ask_console(system: System, link: MessageLink, message: AskConsole, _body: Body) -> None:
    """Load the console on a separate thread, and answer with its address."""
    if not isinstance(link, Link):
        return  # only for programs on this machine

    def answer(status: int, text: str) -> None:
        link.send(encode(Reply(message.call, 0, status)), text.encode())

    def work() -> None:
        if not can_meet(message.version, message.oldest):
            answer(ERROR, f"it runs monarch_kernel {__version__}, but this is {message.release}: use the same version")
            return
        try:
            server = extensions.console_server()
            path = server.listen(system.node.run_dir)
        except Exception as error:
            log.exception("the debugger's console could not be opened")
            answer(ERROR, f"its console could not be opened: {type(error).__name__}: {error}")
            return
        if server.close not in system.node.on_close:
            system.node.on_close.append(server.close)
        answer(OK, path)

    threading.Thread(target=work, name="monarch-console", daemon=True).start()
