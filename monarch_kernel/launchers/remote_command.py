"""Run a command on the hosts of a job, with live output.

Output is the result of endpoints, so it takes the same route as all messages. A few calls to each process are in flight
at any time. A command that writes faster than this process reads therefore waits, as it would at a pipe. A command ends
with the process in which it runs, and so with this process, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from monarch_kernel import programs
from monarch_kernel.actor import Actor, ActorMesh, HostMesh, concurrent_endpoint, current_rank, endpoint

#: The exit codes of a shell for a command that it cannot find or run.
_NOT_FOUND, _NOT_RUN = 127, 126
#: The maximum number of bytes in one message, and of messages in flight per process.
_PIECE, _WINDOW = 64 * 2**10, 2
#: The time limit for commands to end after an interrupt (seconds).
_GRACE = 2.0


async def readable(fd: int) -> None:
    """Wait until a descriptor can be read, or its other end is closed."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def writable(fd: int) -> None:
    """Wait until a descriptor can be written, or its other end is closed."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(fd, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_writer(fd)


async def ended(pid: int) -> None:
    """Wait until a child of this process that has not been reaped has ended."""
    fd = os.pidfd_open(pid)
    try:
        await readable(fd)
    finally:
        os.close(fd)


async def first(*waits: Coroutine[object, object, object]) -> None:
    """Wait for the first of these coroutines, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


@dataclass(frozen=True)
class CommandCoordinates:
    """The coordinates of a command.

    Attributes:
        rank: the number of its process in the mesh; with one process per host, that of the host.
        point: its coordinates, by dimension.
        name: the hostname.
    """

    rank: int
    point: dict[str, int]
    name: str

    def plain(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return {"host": self.point["hosts"], **asdict(self)}


@dataclass(frozen=True)
class HostCommand:
    """A command to run.

    Attributes:
        words: the program and its arguments; no shell interprets them.
        env: further environment variables.
        workdir: the working folder there; None: that of this process, if the host has it.
        script: a script for bash, with the words as its arguments; None: the words are the command.
        module: whether the first word is the name of a Python module to run.
    """

    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    script: bytes | None = None
    module: bool = False


class _Runner(Actor):
    """Runs the command in place of one process, in its process group."""

    def __init__(self, host: int, hosts: int) -> None:
        here = current_rank()
        self._place = CommandCoordinates(
            host * here.extent.nelements + here.rank, {**here, "hosts": host}, os.uname().nodename
        )
        self._sizes = {**{name: here.size(name) for name in here}, "hosts": hosts}
        self._output = -1
        self._said = b""  # output of this actor itself, instead of the command's
        self._code = 0
        self._over = asyncio.Event()
        self._waiting: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()  # acquired in the order of the calls

    @endpoint
    async def start(self, command: HostCommand) -> CommandCoordinates:
        """Start the command. Return its coordinates; ``read`` reports whether it could not be started."""
        words = [sys.executable, "-m", *command.words] if command.module else list(command.words)
        env = {**os.environ, **command.env}
        for name, at in self._place.point.items():
            env[f"MONARCH_RANK_{name}"] = str(at)
            env[f"MONARCH_SIZE_{name}"] = str(self._sizes[name])
        self._output, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output, False)
        try:
            process = _started(words, command, env, write)
        except OSError as e:
            self._said = f"{e.filename or words[0]}: {e.strerror}\n".encode()
            self._code = _NOT_FOUND if isinstance(e, FileNotFoundError) else _NOT_RUN
            self._over.set()
        else:
            self._waiting = asyncio.ensure_future(self._wait(process))
        finally:
            os.close(write)
        return self._place

    async def _wait(self, process: subprocess.Popen[bytes]) -> None:
        await ended(process.pid)
        code = process.wait()
        self._code = code if code >= 0 else 128 - code
        self._over.set()

    @concurrent_endpoint
    async def read(self) -> bytes | int:
        """Return the next output of the command, from standard output and standard error.

        After all output, returns its exit code (128 plus the signal, if one ended it).
        """
        async with self._reading:
            if self._said:
                said, self._said = self._said, b""
                return said
            while True:
                over = self._over.is_set()  # checked before the read, which then gets everything that the command wrote
                with contextlib.suppress(BlockingIOError):
                    if data := os.read(self._output, _PIECE):
                        return data
                    await self._over.wait()  # until no process has the pipe open
                    over = True
                if over:
                    return self._code
                await first(readable(self._output), self._over.wait())

    @concurrent_endpoint
    async def interrupt(self) -> None:
        """Interrupt the command and its descendants, as Ctrl-C does at a terminal."""
        group = os.getpgid(0)
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                if pid != os.getpid() and os.getpgid(pid) == group:
                    os.kill(pid, signal.SIGINT)

    async def __cleanup__(self, _error: BaseException | None) -> None:
        # Remaining processes of the command are in the group of this process, and end with it.
        if self._waiting is not None:
            self._waiting.cancel()
        if self._output >= 0:
            os.close(self._output)


def _started(words: list[str], command: HostCommand, env: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as stack:
        fds: list[int] = []
        if command.script is not None:  # not in argv, which other users can read
            file = stack.enter_context(open(os.memfd_create("script", 0), "wb"))
            file.write(command.script)
            file.flush()
            fds = [file.fileno()]
            words = ["bash", f"/proc/self/fd/{fds[0]}", *words]
        return programs.start(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=command.workdir,
            pass_fds=fds,
        )


def run_command(
    hosts: HostMesh,
    numbers: Sequence[int],
    command: HostCommand,
    per_host: Mapping[str, int],
    at: Mapping[str, int],
    wrote: Callable[[CommandCoordinates, bytes], None],
) -> list[tuple[CommandCoordinates, int]]:
    """Run a command on several hosts of a mesh in parallel, and wait for all of them.

    Each process gets its coordinates in ``MONARCH_RANK_<dimension>`` and ``MONARCH_SIZE_<dimension>``. An interrupt of
    this process interrupts the command everywhere. Processes that continue after that are killed; a second interrupt
    kills them at once. They are also killed if this process ends in another way.

    Args:
        hosts: a mesh with the dimension ``hosts``.
        numbers: the numbers of the hosts on which it runs.
        command: the command to run.
        per_host: the dimensions and sizes of the processes per host that run it; {}: one.
        at: run it only in processes with these coordinates.
        wrote: called with each piece of output of a process, in order.

    Returns:
        The coordinates and exit codes of the processes: 128 plus the signal, if one ended it.

    Raises:
        KeyboardInterrupt: this process was interrupted.
        SupervisionError: a host, or the process on it, was lost. The command has also ended on the others.
    """
    chosen = sorted(set(numbers))
    where = {name: slice(position, position + 1) for name, position in at.items()}
    procs = [
        hosts.slice(hosts=slice(number, number + 1)).spawn_procs(per_host=per_host or None, name="exec")
        for number in chosen
    ]
    try:
        runners = [each.spawn("command", _Runner, number, len(hosts)) for each, number in zip(procs, chosen)]
        calls = [runner.slice(**where).start.call(command) for runner in runners]
        places = [(runner, place) for runner, call in zip(runners, calls) for place in call.get().values()]
        return asyncio.run(_followed([(_at(runner, place), place) for runner, place in places], wrote))
    finally:
        for each in procs:
            each.stop("the command has ended").get()


def _at(runners: ActorMesh[_Runner], place: CommandCoordinates) -> ActorMesh[_Runner]:
    """Return the runner of a host with these coordinates."""
    return runners.slice(**{name: slice(at, at + 1) for name, at in place.point.items() if name != "hosts"})


async def _followed(
    runners: Sequence[tuple[ActorMesh[_Runner], CommandCoordinates]], wrote: Callable[[CommandCoordinates, bytes], None]
) -> list[tuple[CommandCoordinates, int]]:
    """Forward all output until the command has ended everywhere."""
    interrupted = asyncio.Event()

    def interrupt() -> None:
        if interrupted.is_set():
            whole.cancel()
        interrupted.set()

    async def at_place(runner: ActorMesh[_Runner], place: CommandCoordinates) -> int:
        reads = deque(runner.read.call_one() for _ in range(_WINDOW))
        while not isinstance(data := await reads.popleft(), int):
            reads.append(runner.read.call_one())
            wrote(place, data)
        return data

    async def end() -> None:
        await interrupted.wait()
        for runner, _ in runners:
            runner.interrupt.broadcast()
        await asyncio.sleep(_GRACE)
        whole.cancel()

    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    whole = asyncio.gather(*(at_place(*each) for each in runners))
    ending = asyncio.ensure_future(end())
    try:
        codes = await whole
    except asyncio.CancelledError:
        codes = []
    finally:
        ending.cancel()
    if interrupted.is_set():
        raise KeyboardInterrupt
    return [(place, code) for (_, place), code in zip(runners, codes)]
