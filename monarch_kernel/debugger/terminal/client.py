"""Open the console of a running controller in a terminal, for `monarch-kernel debug`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from monarch_kernel import environment
from monarch_kernel.debugger.commands.stop_text import with_clock
from monarch_kernel.display.tables import only_colours
from monarch_kernel.introspection import Controller

#: The time limit for a completion (seconds).
COMPLETION = 2.0


class TerminalClient:
    """The terminal's side of a connection.

    Args:
        sock: the connection to the console.
        controller: the process of the console.
    """

    def __init__(self, sock: socket.socket, controller: Controller) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._controller = controller
        self._numbers = 0
        self._prompt: tuple[str, float | None, float] = ("(mesh) ", None, 0.0)
        self._done: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._words: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ended = threading.Event()
        self._leaves = False
        self._is_watched = False
        self._reader = threading.Thread(target=self._read, name="monarch-console", daemon=True)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    # -- messages ---------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            with self._sock.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    self._handle(json.loads(line))
        except (OSError, ValueError):
            pass  # the console has ended
        self._ended.set()
        self._done.put(None)

    def _handle(self, message: dict[str, Any]) -> None:
        if "prompt" in message:
            self._prompt = message["prompt"], message["left"], time.monotonic()
        if "text" in message:
            self._show(message["text"])
        elif "notice" in message:
            self._show(message["notice"] + "\n")
        elif "words" in message:
            self._words.put(message)
        elif "done" in message:
            self._done.put(message)

    @staticmethod
    def _show(text: str) -> None:
        sys.stdout.write(only_colours(text))  # the stream may be that of prompt_toolkit
        sys.stdout.flush()

    def _say(self, **message: object) -> int:
        self._numbers += 1
        with contextlib.suppress(OSError):  # the reader detects it
            self._sock.sendall(json.dumps({**message, "number": self._numbers}).encode() + b"\n")
        return self._numbers

    def _line(self, line: str) -> bool:
        """Execute a line in the controller, and wait for its end; Ctrl-C ends the wait.

        Returns True if the line ends the session.
        """
        number = self._say(line=line)
        return self._wait(number)

    def _wait(self, number: int) -> bool:
        while (message := self._done.get()) is not None:
            if message["done"] >= number:
                self._leaves = bool(message["leave"])
                return self._leaves
        return True

    def prompt(self) -> str:
        """Return the prompt, with the current remaining time."""
        text, left, at = self._prompt
        return with_clock(text, None if left is None else max(0.0, left - (time.monotonic() - at)))

    # -- lines --------------------------------------------------------------------------------------

    def execute(self, commands: Sequence[str]) -> int:
        """Execute commands, show their output, and leave."""
        self._reader.start()
        self._wait(0)
        for command in commands:
            if self._line(command):
                break
        return self._status()

    def talk(self) -> int:
        """Read lines until one ends the session, or the controller ends."""
        if sys.stdin.isatty() and sys.stdout.isatty():
            return self._talk_at_terminal()
        self._reader.start()
        self._show(f"{self._greeting()}\n")
        self._wait(0)
        for line in sys.stdin:
            self._show(f"{self.prompt()}{line.rstrip()}\n")
            if self._line(line.rstrip("\n")):
                break
        return self._status()

    def _greeting(self) -> str:
        return f"Process {self._controller.pid}: {self._controller.program[:80]}\nhelp lists the commands."

    def _status(self) -> int:
        if self._ended.is_set() and not self._leaves:
            print(f"Process {self._controller.pid} has ended.", file=sys.stderr)
            return 1
        return 0

    def _talk_at_terminal(self) -> int:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.patch_stdout import patch_stdout
        from prompt_toolkit.shortcuts import CompleteStyle

        folder = environment.user_folder("state")
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
            history = FileHistory(os.path.join(folder, "debug_history"))
        except OSError:  # no writable home directory
            history = InMemoryHistory()
        session = PromptSession(
            history=history,
            completer=_completer(self),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
        )
        self._show(f"{self._greeting()}\n")
        with patch_stdout(raw=True):
            self._reader.start()
            self._wait(0)
            while not self._ended.is_set():
                try:
                    line = session.prompt(self.prompt, refresh_interval=1.0, pre_run=lambda: self._watch(session))
                except KeyboardInterrupt:
                    continue  # as in a shell: drop the line
                except EOFError:
                    break
                try:
                    if self._line(line):
                        break
                except KeyboardInterrupt:
                    self._show("\n")  # the command continues; its output is shown when it arrives
        return self._status()

    def _watch(self, session: Any) -> None:
        """End the prompt when the controller ends."""
        app = session.app

        def wait() -> None:
            self._ended.wait()
            if app.is_running and app.loop is not None:
                app.loop.call_soon_threadsafe(lambda: app.exit(exception=EOFError) if app.is_running else None)

        if not self._is_watched:
            self._is_watched = True
            threading.Thread(target=wait, name="monarch-console", daemon=True).start()

    def words(self, before: str) -> list[str]:
        """Return the words that may complete a line; none if the controller takes too long."""
        number = self._say(complete=before)
        deadline = time.monotonic() + COMPLETION
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = self._words.get(timeout=left)
            except queue.Empty:
                break
            if message["number"] == number:
                return list(message["words"])
        return []


def _completer(terminal: TerminalClient) -> Any:
    from prompt_toolkit.completion import Completer, Completion, ThreadedCompleter

    class Words(Completer):
        def get_completions(self, document: Any, complete_event: object) -> Any:
            before = document.text_before_cursor
            length = len(before) - len(re.sub(r"[\w-]+$", "", before))
            for word in terminal.words(before):
                yield Completion(word, start_position=-length)

    return ThreadedCompleter(Words())
