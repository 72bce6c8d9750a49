"""What all tests share: the leak check, waiting for events, and every kind of death."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deaths import KINDS, Death

# A shell ignores SIGINT in background jobs, nohup ignores SIGHUP, and every process below inherits that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_configure() -> None:
    """Keys that are made when they are first needed do not go into the home of whoever runs the tests."""
    config = tempfile.mkdtemp(prefix="mk-config-", dir="/tmp")
    atexit.register(shutil.rmtree, config, ignore_errors=True)
    os.environ["XDG_CONFIG_HOME"] = config
    for named in ("MONARCH_KERNEL_KEY_FILE", "MONARCH_KERNEL_ALLOW"):
        os.environ.pop(named, None)


def children(pid: int | None = None) -> set[int]:
    """Pids of all living descendants of a process (this one by default)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid or os.getpid()]
    while todo:
        for child in parents.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (one that only waits to be reaped does not)."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], what: str, deadline: float = 20.0) -> None:
    """Poll a condition that no event announces (the state of another process), with a deadline."""
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline} s: {what}")
        time.sleep(0.005)


def describe(pid: int) -> str:
    """A process as a failure message shows it."""
    try:
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()[:120]}"
    except OSError:
        return f"{pid}: (gone)"


def _sockets() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if "monarch-" in line}


def _threads() -> set[threading.Thread]:
    """Living threads, without the one that watches over the time of each test."""
    return {t for t in threading.enumerate() if t.is_alive() and not t.name.startswith("pytest_timeout")}


@contextmanager
def leak_check(what: str = "test") -> Iterator[None]:
    """Ends the runtime afterwards, and fails if a process, run folder, socket, shared memory or thread is left."""
    processes = children()
    threads = set(threading.enumerate())
    memory = set(os.listdir("/dev/shm"))
    yield
    from monarch_kernel.runtime.actor import system

    folder = system.get_system().node.run_dir if system.started() else None
    system.shutdown()
    try:
        wait_until(lambda: not children() - processes, f"all processes of the {what} have ended", 10)
    except AssertionError:
        left = "\n".join(describe(pid) for pid in children() - processes)
        raise AssertionError(f"the {what} left processes behind:\n{left}") from None
    if folder is not None:
        assert not os.path.exists(folder), f"the run folder is still there: {os.listdir(folder)}"
        # A process counts as ended when its main thread has; the others hold its sockets a moment longer.
        wait_until(lambda: not {s for s in _sockets() if s.startswith(folder)}, f"sockets in {folder} are closed", 5)
    wait_until(
        lambda: not (left := _threads() - threads) or all(t.daemon and not t.name.startswith("monarch") for t in left),
        f"threads of the {what} have ended: {_threads() - threads}",
        5,
    )
    assert set(os.listdir("/dev/shm")) <= memory, f"the {what} left shared memory behind"


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A test that leaves anything behind fails."""
    with leak_check():
        yield


@pytest.fixture(params=KINDS)
def death(request: pytest.FixtureRequest) -> Death:
    """Every way in which a rank can die, one after the other."""
    return Death(request.param)
