"""debugpy in the same process: both stop at their own breakpoints, and debugpy still does when ours are gone."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.debugger.stopping import guest
from tests.debugger.stopping.driving import line
from tests.waiting import patience

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = patience(30.0)


class Client:
    """As much of a DAP client as it takes to set one breakpoint and to continue."""

    def __init__(self, port: int, said: queue.SimpleQueue[Any]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.said = said
        self.number = 0
        self.send("initialize", clientID="test", adapterID="test", pathFormat="path")
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def send(self, command: str, **arguments: Any) -> None:
        """A request."""
        self.number += 1
        body = json.dumps({"seq": self.number, "type": "request", "command": command, "arguments": arguments}).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def read(self) -> None:
        """Answer events until the connection ends."""
        stream = self.socket.makefile("rb")
        while header := stream.readline():
            stream.readline()
            self.take(json.loads(stream.read(int(header.split(b":")[1]))))

    def take(self, message: dict[str, Any]) -> None:
        """One message of debugpy."""
        match message.get("event") or message.get("command"):
            case "initialize":
                self.send("attach", justMyCode=False)
            case "initialized":
                points = [{"line": line("plain first")}]
                self.send("setBreakpoints", source={"path": guest.__file__}, breakpoints=points)
                self.send("configurationDone")
            case "stopped":
                self.thread_id = message["body"]["threadId"]
                self.send("stackTrace", threadId=self.thread_id)
            case "stackTrace":
                self.said.put(["debugpy", message["body"]["stackFrames"][0]["line"]])
                self.send("continue", threadId=self.thread_id)
            case _:
                pass

    def close(self) -> None:
        """Leave."""
        self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join(PATIENCE)
        self.socket.close()


@pytest.mark.parametrize("first", ["debugpy", "engine"])
def test_both_stop(first: str) -> None:
    pytest.importorskip("debugpy")
    command = [sys.executable, "-Xfrozen_modules=off", "-m", "tests.debugger.stopping.debugpy_guest", first]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        client = Client(json.loads(process.stdout.readline()), said)
        reader = threading.Thread(target=lambda: [said.put(json.loads(text)) for text in process.stdout or ()])
        reader.start()
        heard: list[Any] = []
        while "closed" not in heard:
            heard.append(said.get(timeout=PATIENCE))
        assert heard.count(["debugpy", line("plain first")]) == heard.count("round") + 1, heard
        assert heard.count(["engine", line("plain second")]) == 1, heard
        assert process.wait(PATIENCE) == 0
        client.close()
        reader.join(PATIENCE)  # debugpy's adapter has the other end, and ends with its client
        process.stdout.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # debugpy's adapter, too
        process.wait()
