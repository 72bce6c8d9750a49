"""Run a shell at a pseudo-terminal of a host, in this terminal.

Bytes of the terminal are arguments and results of endpoints, so they use the same authenticated connection as all
messages. A few calls are in flight at any time, so that neither side can flood the other. The shell ends with its
actor, and so with this process, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import pwd
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Generator, Mapping

from monarch_kernel import programs
from monarch_kernel.actor import Actor, ActorMesh, Future, HostMesh, concurrent_endpoint, endpoint
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.remote_command import ended, first, readable, writable

#: The maximum number of bytes in one message, and of messages in flight per direction.
_PIECE, _WINDOW = 64 * 2**10, 4
#: The time limit for processes of a terminal to end after a hangup (seconds).
_GRACE = 1.0
_POLL = 0.02
#: A process gets a controlling terminal only by requesting it after ``setsid``, which subprocess has called.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class _Terminal(Actor):
    """A shell and its pseudo-terminal, on a host."""

    def __init__(self) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        self._master = -1
        self._over = asyncio.Event()
        self._waiting: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()  # acquired in the order of the calls
        self._writing = asyncio.Lock()

    @endpoint
    async def start(self, env: Mapping[str, str], workdir: str | None, size: tuple[int, int]) -> str:
        """Start the shell. Return why it could not be started, or ""."""
        env = {**os.environ, **env}
        shell = _shell_of(env)
        self._master, slave = os.openpty()
        try:
            _resize(self._master, size)
            os.set_blocking(self._master, False)
            self._shell = _started(shell, slave, env, workdir)
        except OSError as e:
            return f"{e.filename or shell}: {e.strerror}"
        finally:
            os.close(slave)
        self._waiting = asyncio.ensure_future(self._wait(self._shell))
        return ""

    async def _wait(self, shell: subprocess.Popen[bytes]) -> None:
        await ended(shell.pid)
        shell.wait()
        self._over.set()

    @concurrent_endpoint
    async def read(self) -> bytes | int:
        """Return the next output of the terminal; after all of it, the exit code of the shell (128 plus the signal)."""
        async with self._reading:
            assert self._shell is not None
            while True:
                over = self._over.is_set()  # checked before the read, which then gets everything that the shell wrote
                try:
                    if data := os.read(self._master, _PIECE):
                        return data
                except BlockingIOError:
                    pass
                except OSError as e:
                    if e.errno != errno.EIO:
                        raise
                    await self._over.wait()  # until no process has the terminal open
                    over = True
                if over:
                    code = self._shell.returncode
                    return code if code >= 0 else 128 - code
                await first(readable(self._master), self._over.wait())

    @concurrent_endpoint
    async def write(self, data: bytes) -> None:
        """Type into the terminal. Waits while programs there do not read."""
        async with self._writing:
            while data and not self._over.is_set():
                try:
                    data = data[os.write(self._master, data) :]
                except BlockingIOError:
                    await first(writable(self._master), self._over.wait())

    @endpoint
    async def resize(self, size: tuple[int, int]) -> None:
        """Set the size of the terminal (rows, columns). Its programs are notified by SIGWINCH."""
        _resize(self._master, size)

    async def __cleanup__(self, _error: BaseException | None) -> None:
        if self._shell is not None:
            await asyncio.to_thread(self._hang_up, self._shell)
        if self._waiting is not None:
            self._waiting.cancel()
        if self._master >= 0:
            os.close(self._master)

    @staticmethod
    def _hang_up(shell: subprocess.Popen[bytes]) -> None:
        """End all processes of the terminal."""
        end = time.monotonic() + _GRACE
        _signal_all(shell, signal.SIGHUP, signal.SIGCONT)
        while _signal_all(shell) and time.monotonic() < end:
            time.sleep(_POLL)
        _signal_all(shell, signal.SIGKILL)
        shell.wait()


def run_shell(hosts: HostMesh, number: int, env: Mapping[str, str], workdir: str | None) -> int:
    """Run the user's shell (SHELL, or the one of their account there) on a host, at the terminal of this process.

    The terminal is raw meanwhile, so keys, including Ctrl-C, go to the programs there. Afterwards it is restored. All
    processes of the session end with the shell, or with this process.

    Args:
        hosts: a mesh with the dimension ``hosts``.
        number: the number of the host.
        env: further environment variables.
        workdir: the working folder there; None: that of this process, if the host has it.

    Returns:
        The exit code of the shell; 128 plus the signal, if one ended the shell or this process.

    Raises:
        LaunchError: standard input or output is not a terminal, or the shell cannot be started.
        SupervisionError: the host, or the process on it, was lost.
    """
    if not (os.isatty(0) and os.isatty(1)):
        raise LaunchError("a shell needs a terminal at its input and output; exec runs commands without one")
    env = {"TERM": os.environ.get("TERM", "dumb"), **env}
    procs = hosts.slice(hosts=slice(number, number + 1)).spawn_procs(name="shell")
    try:
        terminal = procs.spawn("terminal", _Terminal)
        if refused := terminal.start.call_one(env, workdir, _size()).get():
            raise LaunchError(f"no shell on host {number}: {refused}")
        with _raw_terminal():
            return asyncio.run(_connected(terminal))
    finally:
        procs.stop("the shell has ended").get()


async def _connected(terminal: ActorMesh[_Terminal]) -> int:
    """Copy between both terminals until the shell ends, or a signal ends this process."""
    loop = asyncio.get_running_loop()
    signaled: asyncio.Future[int] = loop.create_future()
    resized: list[Future[None]] = []

    def end(number: signal.Signals) -> None:
        if not signaled.done():
            signaled.set_result(128 + number)

    def resize() -> None:
        resized[:] = [terminal.resize.call_one(_size())]

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGWINCH, resize)
    # A separate file description from that of processes that share this terminal, so that only it becomes nonblocking.
    shown = os.open("/proc/self/fd/1", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    tasks = [asyncio.ensure_future(_show(terminal, shown)), asyncio.ensure_future(_type(terminal)), signaled]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        os.close(shown)


async def _show(terminal: ActorMesh[_Terminal], fd: int) -> int:
    """Show the output of the remote terminal. Return the exit code of the shell."""
    reads = deque(terminal.read.call_one() for _ in range(_WINDOW))
    while not isinstance(data := await reads.popleft(), int):
        reads.append(terminal.read.call_one())
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                await writable(fd)
    return data


async def _type(terminal: ActorMesh[_Terminal]) -> int:
    """Send local input to the remote terminal. Returns only when this terminal is gone."""
    writes: deque[Future[None]] = deque()
    while True:
        await readable(0)
        try:
            data = os.read(0, _PIECE)
        except OSError:
            data = b""
        if not data:
            return 128 + signal.SIGHUP
        writes.append(terminal.write.call_one(data))
        if len(writes) == _WINDOW:
            await writes.popleft()


@contextlib.contextmanager
def _raw_terminal() -> Generator[None]:
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # previously typed input goes there, too
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal itself is gone
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def _started(shell: str, terminal: int, env: Mapping[str, str], workdir: str | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, shell]
    return programs.start(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=env, cwd=workdir, start_new_session=True
    )


def _signal_all(shell: subprocess.Popen[bytes], *signals: signal.Signals) -> bool:
    """Send signals to all processes of a shell's session. Return whether there were any."""
    over = shell.poll() is not None
    found = False
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if os.getsid(pid) == shell.pid and not (over and pid == shell.pid):
                found = True
                for number in signals:
                    os.kill(pid, number)
    return found


def _shell_of(env: Mapping[str, str]) -> str:
    try:
        account = pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:  # the host does not know this user, as in many containers
        account = ""
    return next((found for name in (env.get("SHELL"), account) if name and (found := shutil.which(name))), "/bin/sh")


def _size() -> tuple[int, int]:
    size = os.get_terminal_size(1)
    return size.lines, size.columns


def _resize(fd: int, size: tuple[int, int]) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
