"""How long tests wait: as long as is said for an idle machine, times what this one is slower at the moment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

#: What a start of Python takes where tests are first written, with room to spare (seconds).
_START = 0.03
_MOST = 10.0
#: How long a poll sleeps before it looks again (seconds).
_SHORTEST, _LONGEST = 0.005, 0.1
#: What was measured when this run of tests began, for the processes that it starts.
_SLOWNESS = "MK_TEST_SLOWNESS"


def measured() -> float:
    """How many times longer than usual a start of Python takes now: 1 to 10."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-I", "-c", "pass"], stdin=subprocess.DEVNULL, check=True)
    return min(_MOST, max(1.0, (time.monotonic() - began) / _START))


def measure() -> None:
    """Measure once for this process and those below it, which load the same files and measure nothing."""
    if _SLOWNESS not in os.environ:
        os.environ[_SLOWNESS] = f"{measured():.1f}"


def patience(seconds: float) -> float:
    """So many seconds of an idle machine, as long as they last on this one."""
    return seconds * float(os.environ.get(_SLOWNESS, "1"))


class Deadline:
    """The end of a wait. When its time is over, it looks how slow the machine is by then, and gives that once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()
        self._end = self._began + patience(seconds)
        self._grown = False

    def left(self) -> float:
        """Seconds that are left; 0 when it is over."""
        left = self._end - time.monotonic()
        if left <= 0 and not self._grown:
            self._grown = True
            self._end = max(self._end, self._began + self._seconds * measured())
            left = self._end - time.monotonic()
        return max(0.0, left)


def wait_until(condition: Callable[[], object], what: str, deadline: float = 40.0) -> None:
    """Poll a condition that no event announces (the state of another process), with a deadline.

    What it costs is a fifth of the time at most: a condition that runs a cell would else slow what it waits for.
    """
    end = Deadline(deadline)
    while True:
        began = time.monotonic()
        if condition():
            return
        if not end.left():
            raise AssertionError(f"not within {deadline} s of an idle machine: {what}")
        time.sleep(min(_LONGEST, max(_SHORTEST, 4 * (time.monotonic() - began))))


def wait_for_text(show: Callable[[], str], is_right: Callable[[str], object], what: str, deadline: float = 40.0) -> str:
    """Repeat what shows a text until that is right, and return it; an error has the last one."""
    text = ""

    def shows() -> object:
        nonlocal text
        text = show()
        return is_right(text)

    try:
        wait_until(shows, what, deadline)
    except AssertionError as error:
        raise AssertionError(f"{error}; last it showed:\n{text}") from None
    return text


def waiters(path: Path) -> int:
    """How many processes wait for the lock of a file, whose holder this or another process is."""
    inode = f":{path.stat().st_ino}"
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sum(words[1] == "->" and words[6].endswith(inode) for words in lines)


def listens(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def jupyter_url(server: subprocess.Popen[bytes], runtime: Path, log: Path) -> str:
    """Wait until a server of Jupyter listens; return its address.

    Args:
        runtime: where it writes that address, a moment before it listens.
    """
    found: list[str] = []

    def is_up() -> bool:
        assert server.poll() is None, log.read_text()
        for path in runtime.glob("jpserver-*.json"):
            text = path.read_text()
            if text.rstrip().endswith("}") and listens(json.loads(text)["port"]):
                found.append(json.loads(text)["url"])
        return bool(found)

    wait_until(is_up, "the server has started", 30)
    return found[0]


def end_jupyter(server: subprocess.Popen[bytes]) -> None:
    """End a server of Jupyter as its user does, and its kernels with it.

    One that got a last request from a page that was closed meanwhile has ended its loop, and then waits forever for the
    thread of that request (JupyterLab, issue 10442): such a one is killed.
    """
    server.terminate()
    try:
        server.wait(patience(5))
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
