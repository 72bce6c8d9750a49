"""What all tests share: the leak check, waiting for events, and every kind of death."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.deaths import KINDS, Death

# A shell ignores SIGINT in background jobs, nohup ignores SIGHUP, and every process below inherits that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_configure() -> None:
    """Keys that are made when they are first needed do not go into the home folder of the user that runs the tests."""
    config = tempfile.mkdtemp(prefix="mk-config-", dir="/tmp")
    atexit.register(shutil.rmtree, config, ignore_errors=True)
    os.environ["XDG_CONFIG_HOME"] = config
    os.environ["XDG_STATE_HOME"] = os.path.join(config, "state")
    for named in ("MONARCH_KERNEL_KEY_FILE", "MONARCH_KERNEL_ALLOW"):
        os.environ.pop(named, None)


def children(pid: int | None = None) -> set[int]:
    """Pids of all living descendants of a process (this one by default)."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # without Path and text: every test of the suite does this twice at least
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", buffering=0) as stat:
                    state, parent, _ = stat.read().rpartition(b")")[2].split(None, 2)
            except OSError:
                continue
            if state != b"Z":
                parents.setdefault(int(parent), []).append(int(name))
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


def wait_until(condition: Callable[[], object], what: str, deadline: float = 40.0) -> None:
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
def leak_check(what: str = "test", deadline: float = 20) -> Generator[None]:
    """Ends the runtime afterwards, and fails if a process, run folder, socket, shared memory or thread is left.

    It names all that is left, and ends the processes: the next test begins as if nothing had been.
    """
    processes = children()
    threads = set(threading.enumerate())
    memory = set(os.listdir("/dev/shm"))
    yield
    from monarch_kernel.runtime.actor import process, system

    folder = process.get_system().node.run_dir if process.started() else None
    left: list[str] = []
    try:
        system.shutdown()
    except Exception as e:
        left.append(f"a runtime that cannot be shut down: {type(e).__name__}: {e}")
        process.set_system(None)
    if not _within(deadline, lambda: not children() - processes):
        stray = children() - processes
        left.append("processes:\n" + "\n".join(map(describe, stray)))
        for pid in stray:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _within(deadline, lambda: not any(map(alive, stray)))
    if folder is not None:
        if os.path.exists(folder):
            left.append(f"its run folder, with {os.listdir(folder)}")
        # A process counts as ended when its main thread has; the others hold its sockets a moment longer.
        if not _within(10, lambda: not {s for s in _sockets() if s.startswith(folder)}):
            left.append(f"open sockets in {folder}")
    if not _within(10, lambda: all(t.daemon and not t.name.startswith("monarch") for t in _threads() - threads)):
        left.append(f"threads: {', '.join(sorted(t.name for t in _threads() - threads))}")
    # What the tests beside these have just made is not mapped yet; what they have just removed is not any more.
    if not _within(5, lambda: not _unused_memory(memory)):
        left.append(f"shared memory: {', '.join(sorted(_unused_memory(memory)))}")
    assert not left, f"the {what} left behind " + "; ".join(left)


def _unused_memory(before: set[str]) -> set[str]:
    """Shared memory that was not there before, and that no living process uses."""
    return {name for name in set(os.listdir("/dev/shm")) - before if not _mapped(name)}


def _mapped(name: str) -> bool:
    """Whether a living process uses this shared memory: it is of the tests that run beside these."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f" /dev/shm/{name}\n" in maps.read_text():
                return True
        except OSError:  # it has ended
            continue
    return False


def _within(deadline: float, condition: Callable[[], object]) -> bool:
    try:
        wait_until(condition, "", deadline)
    except AssertionError:
        return False
    return True


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A test that leaves anything behind fails."""
    with leak_check():
        yield


@pytest.fixture(params=KINDS)
def death(request: pytest.FixtureRequest) -> Death:
    """Every way in which a rank can die, one after the other."""
    return Death(request.param)
