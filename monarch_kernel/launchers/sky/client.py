"""Run SkyPilot's SDK in a separate process (``sky.calls``), and find an interpreter that has it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import threading
import time
from importlib import metadata
from typing import Any

from monarch_kernel import programs
from monarch_kernel.launchers.base import LaunchError

_CALLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "calls.py")
#: Runs that text without this package's folder, or the working folder, on the path of modules.
_RUN = "import sys; sys.path[:1] = []; exec(compile(open(sys.argv[1]).read(), sys.argv[1], 'exec'))"
#: The additional time limit for the first answer: SkyPilot is imported, and may start its server (seconds).
_FIRST_TIME = 90.0
_HOW = (
    "pip install 'monarch_kernel[sky]'; or install SkyPilot in a separate environment, such as by 'uv tool install "
    "skypilot', and have its command in PATH, or name it with sky="
)
#: The pattern by which the first lines of a program name its interpreter.
_NAMED = re.compile(rb"\A#!\s*(/\S*python\S*)\s*\n|'''exec' \"?(/[^\"\n]*?python[^\"\s]*)\"? ")
#: The length up to which a message is shown completely (characters).
_LONG = 600
#: The colors in SkyPilot's messages.
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class SkyError(Exception):
    """SkyPilot has raised an error.

    Args:
        kind: the name of its class.
        said: its message.
    """

    def __init__(self, kind: str, said: str) -> None:
        self.kind = kind
        self.said = _short(" ".join(_COLOR.sub("", said).split())) or kind
        super().__init__(f"{kind}: {self.said}")


def _short(words: str) -> str:
    """Shorten a message to a clause. It may contain the output of a failed command, whose end has the reason."""
    return words if len(words) <= _LONG else f"{words[: _LONG // 2]} ... {words[-_LONG // 2 :]}"


class SkyClient:
    """Sends requests to SkyPilot. The first request starts the process, which ends when idle, or with this process.

    Args:
        command: SkyPilot's command, or its interpreter; "": this interpreter if it has SkyPilot, else ``sky``.
        patience: the time limit for one request (seconds).
    """

    def __init__(self, command: str, patience: float) -> None:
        self._command = command
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._count = 0
        self._read = b""

    def ask(self, call: str, **arguments: Any) -> Any:
        """Call a method of ``calls.SkyCalls``.

        Raises:
            SkyError: SkyPilot raised an error.
            LaunchError: SkyPilot is not installed here.
            ConnectionError: SkyPilot does not answer.
        """
        with self._lock:
            limit = self._patience
            if self._process is None or self._process.poll() is not None:
                self._start()
                limit += _FIRST_TIME
            assert self._process is not None and self._process.stdin is not None
            self._count += 1
            line = json.dumps({"id": self._count, "call": call, "with": arguments}).encode() + b"\n"
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
                told = self._answer(time.monotonic() + limit)
            except (OSError, ValueError) as e:
                self._end()  # its remaining work is not waited for
                raise ConnectionError(f"SkyPilot did not answer ({call}): {e}; try 'sky api info'") from e
        if "error" not in told:
            return told["value"]
        if told["error"] in ("ApiServerConnectionError", "ConnectionError", "ConnectTimeout", "ReadTimeout"):
            raise ConnectionError(f"SkyPilot's API server cannot be reached: {SkyError('', told['said']).said}")
        if told["error"] in ("ModuleNotFoundError", "ImportError") and call != "aliases":
            raise LaunchError(f"SkyPilot cannot be loaded: {told['said']}; {_HOW}")
        raise SkyError(told["error"], told["said"])

    def _start(self) -> None:
        self._end()
        python = interpreter(self._command)
        self._process = programs.start(
            [python, "-c", _RUN, _CALLS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the program
        )
        self._read = b""

    def _answer(self, end: float) -> dict[str, Any]:
        """Return the answer to the last request. Answers to abandoned requests are skipped."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" in self._read:
                    line, _, self._read = self._read.partition(b"\n")
                    told = json.loads(line)
                    if told["id"] == self._count:
                        return told
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError("it takes too long")
                found = os.read(self._process.stdout.fileno(), 1 << 16)
                if not found:
                    raise ConnectionError(f"its process has ended (exit code {self._process.wait()})")
                self._read += found

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # unwritten data is lost with the process
                    stream.close()


_clients: dict[Any, SkyClient] = {}
_clients_lock = threading.Lock()


def client(command: str, patience: float) -> SkyClient:
    """Return the shared client of this process, because importing SkyPilot takes seconds."""
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("SKYPILOT_"))
    with _clients_lock:
        key = command, patience, os.environ.get("HOME"), tuple(settings)
        return _clients.setdefault(key, SkyClient(command, patience))


@atexit.register
def close_clients() -> None:
    """End the processes of all clients. The next request starts a new one."""
    with _clients_lock:
        for each in _clients.values():
            each.close()
        _clients.clear()


def interpreter(command: str) -> str:
    """Find the interpreter that has SkyPilot.

    Args:
        command: see ``SkyClient``.

    Raises:
        LaunchError: there is no such interpreter.
    """
    if not command and _is_installed():
        return sys.executable
    path = shutil.which(os.path.expanduser(command or "sky"))
    if path is None:
        what = f"there is no command {command}" if command else "SkyPilot is not installed here"
        raise LaunchError(f"{what}: {_HOW}")
    if os.path.basename(path).startswith("python"):
        return path
    with open(path, "rb") as file:
        named = _NAMED.search(file.read(1024))
    if named is None:
        raise LaunchError(f"{path} does not say which Python runs it: name the interpreter that has SkyPilot with sky=")
    return os.fsdecode(named[1] or named[2])


def _is_installed() -> bool:
    for name in ("skypilot", "skypilot-nightly"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return bool(metadata.version(name))
    return False
