"""Test hosts: namespaces joined by cables (veth pairs) to a switch (a bridge in a namespace of its own).

A host has its own network, name, processes, ``/dev/shm`` and temporary folder, so no host can reach another but over
the wire: no Unix socket, shared memory or ``/proc`` entry of one can be opened on another. The machine's own
interfaces and routes are never touched. All of a host hangs on its process 1 (``init.py``), which ends with this
process: nothing has a name that could be left behind, except an empty folder, which the next network removes.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.conftest import describe, wait_until
from tests.waiting import patience

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PREFIX = "mkt-"
CLONE_NEWNET = 0x40000000  # of sched.h
#: To start a process, or to end one (seconds).
PATIENCE = patience(20.0)


class CannotMakeHosts(Exception):
    """This machine or this user cannot make network namespaces."""


def make_network(names: Sequence[str]) -> Network:
    """Hosts of these names on one switch.

    Raises:
        CannotMakeHosts: not root, a tool is missing, or the kernel refuses.
    """
    if os.geteuid() != 0:
        raise CannotMakeHosts("test hosts are network namespaces, which only root can make")
    try:
        return Network(names)
    except FileNotFoundError as error:
        raise CannotMakeHosts(f"test hosts need {error.filename} (iproute2, util-linux), which is not here") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.output or "").strip()
        raise CannotMakeHosts(f"test hosts cannot be made here: {said or error}") from None


class Process:
    """A program that runs on a host, as the leader of a session and group of its own."""

    def __init__(self, host: Host, command: Sequence[str], popen: subprocess.Popen[str]) -> None:
        self.host = host
        self.command = command
        self._popen = popen  # of nsenter, which stays outside and ends as the program does

    @property
    def pid(self) -> int:
        """Of the program itself, as this process sees it (on its host it has another number)."""
        found: list[int] = []
        wait_until(lambda: found.extend(_children(self._popen.pid)) or found or self.ended, f"{self} has started")
        if not found:
            raise AssertionError(f"{self} has ended with {self._popen.returncode}")
        return found[0]

    @property
    def stdin(self) -> IO[str]:
        assert self._popen.stdin is not None
        return self._popen.stdin

    @property
    def stdout(self) -> IO[str]:
        assert self._popen.stdout is not None
        return self._popen.stdout

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    @property
    def running(self) -> bool:
        return not self.ended

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit code, or minus the signal that ended it."""
        return self._popen.wait(timeout)

    def signal(self, number: int) -> None:
        """Send a signal to the program alone."""
        if self.running:
            os.kill(self.pid, number)
            if number == signal.SIGCONT:  # nsenter stops when its program does, and does not go on by itself
                os.kill(self._popen.pid, number)

    def kill(self) -> None:
        """SIGKILL to the program alone, and wait for its end."""
        self.signal(signal.SIGKILL)
        self.wait()

    def communicate(self, stdin: str | None = None, timeout: float = 60.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a program with pipes."""
        out, err = self._popen.communicate(stdin, timeout)
        return self._popen.returncode, out, err

    def close(self) -> None:
        """Close this end of its pipes."""
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()

    def __str__(self) -> str:
        return f"{self.command[:4]} on {self.host.name}"


class Host:
    """One machine of a test network."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.network = network
        self.name = name
        self.address = f"10.77.0.{number + 1}"
        self.port = f"port{number}"  # where its cable ends at the switch
        self.folder = network.folder
        self.crashed = False
        self._processes: list[Process] = []
        self._init = _hold(
            ["--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--kill-child"],
            [str(HERE / "init.py"), name, self.folder, "/dev/shm"],
        )
        self.pid = _children(self._init.pid)[0]
        """Of its process 1."""
        self._space = os.readlink(f"/proc/{self.pid}/ns/pid")

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        cwd: str | Path = ROOT,
        stderr: Any = subprocess.PIPE,
        **options: Any,
    ) -> Process:
        """Start a program here, with pipes. Options are Popen's."""
        for stream in ("stdin", "stdout"):
            options.setdefault(stream, subprocess.PIPE)
        popen = subprocess.Popen(
            [*self._enter(), "env", "-C", str(cwd), "setsid", *command],
            env={**os.environ, "TMPDIR": self.folder, "PYTHONUNBUFFERED": "1", **(env or {})},
            stderr=stderr,
            text=True,
            start_new_session=True,
            **options,
        )
        self._processes.append(Process(self, command, popen))
        return self._processes[-1]

    def run(self, *command: str, env: Mapping[str, str] | None = None, stdin: str | None = None) -> str:
        """Run a program here to its end; its stdout."""
        process = self.start(command, env)
        code, out, err = process.communicate(stdin)
        if code:
            raise subprocess.CalledProcessError(code, command, out, err)
        return out

    def pids(self) -> set[int]:
        """Every living process of the host but its process 1, however it came to be there."""
        found: set[int] = set()
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/pid") == self._space:
                    state = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[0]
                    # The first thread of a process may be gone while others still have its files open.
                    if state != "Z" or len(os.listdir(f"/proc/{entry}/task")) > 1:
                        found.add(int(entry))
            except OSError:
                continue
        return found - {self.pid}

    def files(self) -> list[str]:
        """What lies in its temporary folder."""
        return sorted(os.listdir(f"/proc/{self.pid}/root{self.folder}"))

    def shown(self) -> str:
        """Its processes, as a failure message shows them."""
        return "\n".join(describe(pid) for pid in sorted(self.pids()))

    def crash(self) -> None:
        """SIGKILL everything that runs here, at once; the host itself stays, empty."""
        self.crashed = True
        while pids := self.pids():
            for pid in pids:
                _kill(pid)
            wait_until(lambda pids=pids: not pids & self.pids(), f"all processes of {self.name} are gone")

    def enter_network(self) -> None:
        """From now on this thread, and those that it starts, use this host's network, and else are where they were."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self.pid}/ns/net") as space:
            if libc.setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network of {self.name}")

    def ip(self, *arguments: str) -> str:
        """``ip`` on this host."""
        return _run(["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", *arguments])

    def close(self) -> None:
        """The end of the host, and of everything on it."""
        if self._init.stdin is not None:
            self._init.stdin.close()
        # The kernel kills what is left together with process 1, which so can be gone only when all are.
        try:
            self._init.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._init.kill()
            self._init.wait(PATIENCE)
        for process in self._processes:
            process.wait()
            process.close()
        if self._init.stdout is not None:
            self._init.stdout.close()

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]


class Network:
    """Hosts on one switch, and what can go wrong between them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.folder = _make_folder()
        self.hosts: list[Host] = []
        self._delayers: dict[str, subprocess.Popen[str]] = {}
        self._switch: subprocess.Popen[str] | None = None
        try:
            # A namespace of its own for the network only: the switch runs no program of ours.
            self._switch = _hold([], ["-c", "import sys; print('up', flush=True); sys.stdin.read()"])
            self._at_switch("ip", "link", "add", "switch", "type", "bridge", "stp_state", "0", "forward_delay", "0")
            self._at_switch("ip", "link", "set", "switch", "up")
            for number, name in enumerate(names):
                host = Host(self, name, number)
                self.hosts.append(host)
                _run(["nsenter", f"--net=/proc/{host.pid}/ns/net", "ip", "link", "set", "lo", "up"])
                cable = ["ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth0"]
                self._at_switch(*cable, "netns", str(host.pid))
                self._at_switch("ip", "link", "set", host.port, "master", "switch", "up")
                host.ip("address", "add", f"{host.address}/24", "dev", "eth0")
                host.ip("link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def cut(self, host: Host) -> None:
        """From now on nothing gets to this host or away from it, and nobody is told: no reset, no lost carrier."""
        self._at_switch("ip", "link", "set", host.port, "nomaster")

    def mend(self, host: Host) -> None:
        """Undo ``cut``."""
        self._at_switch("ip", "link", "set", host.port, "master", "switch")

    def vanish(self, host: Host) -> None:
        """The host is gone as by a power failure: silent for all others, and nothing runs on it any more."""
        self.cut(host)
        host.crash()

    def part(self, one: Host, other: Host) -> None:
        """Two hosts do not hear each other any more, and nobody is told; others hear both."""
        for here, there in ((one, other), (other, one)):
            # What is sent there goes to a card that does not exist.
            here.ip("neigh", "replace", there.address, "lladdr", "02:00:00:00:00:00", "dev", "eth0", "nud", "permanent")

    def heal(self, one: Host, other: Host) -> None:
        """Undo ``part``."""
        for here, there in ((one, other), (other, one)):
            here.ip("neigh", "del", there.address, "dev", "eth0")

    @contextmanager
    def slow(self, host: Host, delay: float, jitter: float = 0.0, loss: float = 0.0) -> Generator[None]:
        """Meanwhile every frame to and from this host takes ``delay`` seconds, ``jitter`` more or less."""
        if not self._netem(host, delay, jitter, loss):
            self._start_delayer(host, delay, jitter, loss)
        try:
            yield
        finally:
            if host.port in self._delayers:
                self._stop_delayer(host)
            else:
                for at, interface in ((self._net(), host.port), (f"/proc/{host.pid}/ns/net", "eth0")):
                    _run(["nsenter", f"--net={at}", "tc", "qdisc", "del", "dev", interface, "root"])

    def limit(self, host: Host, rate: float) -> None:
        """From now on the host's cable carries so many bits a second in each direction.

        Raises:
            CannotMakeHosts: this kernel or its tools cannot.
        """
        # What waits longer than 50 ms is dropped, as by a switch with small buffers.
        how = ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{max(32_000, rate / 8 / 500):.0f}", "latency", "50ms"]
        try:
            for at, interface in ((self._net(), host.port), (f"/proc/{host.pid}/ns/net", "eth0")):
                _run(["nsenter", f"--net={at}", "tc", "qdisc", "replace", "dev", interface, "root", *how])
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            said = getattr(error, "stderr", None) or error
            raise CannotMakeHosts(f"the cables of test hosts cannot be limited here: {said}") from None

    def traffic(self, host: Host) -> int:
        """How many bytes have gone to and from the host so far."""
        shown = self._at_switch("cat", "/proc/net/dev").splitlines()
        fields = next(line for line in shown if line.strip().startswith(host.port + ":")).partition(":")[2].split()
        return int(fields[0]) + int(fields[8])

    def close(self) -> None:
        """The end of all hosts, and of everything on them."""
        for process in self._delayers.values():
            _end(process)
        self._delayers.clear()
        for host in self.hosts:
            if host._init.stdin is not None:
                host._init.stdin.close()  # all begin to end before the first is waited for
        for host in self.hosts:
            host.close()
        if self._switch is not None:
            _end(self._switch)
        _remove_folder(self.folder)

    def _net(self) -> str:
        assert self._switch is not None
        return f"/proc/{self._switch.pid}/ns/net"

    def _at_switch(self, *command: str) -> str:
        return _run(["nsenter", f"--net={self._net()}", *command])

    def _netem(self, host: Host, delay: float, jitter: float, loss: float) -> bool:
        """Delay by the kernel, in both directions; False: this kernel cannot."""
        how = ["netem", "delay", f"{delay}s", f"{jitter}s", "loss", f"{loss:%}", "limit", "100000"]
        try:
            for at, interface in ((self._net(), host.port), (f"/proc/{host.pid}/ns/net", "eth0")):
                _run(["nsenter", f"--net={at}", "tc", "qdisc", "replace", "dev", interface, "root", *how])
        except (subprocess.CalledProcessError, FileNotFoundError):
            return False
        return True

    def _start_delayer(self, host: Host, delay: float, jitter: float, loss: float) -> None:
        inner, outer = f"{host.port}i", f"{host.port}o"
        self._at_switch("ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
        self._at_switch("ip", "link", "set", inner, "up")
        self._at_switch("ip", "link", "set", host.port, "nomaster")
        self._at_switch("ip", "link", "set", outer, "master", "switch", "up")
        numbers = [str(delay), str(jitter), str(loss)]
        command = [sys.executable, "-ISu", str(HERE / "delayer.py"), host.port, inner, *numbers]
        self._delayers[host.port] = _start_outside(["nsenter", f"--net={self._net()}", *command])

    def _stop_delayer(self, host: Host) -> None:
        _end(self._delayers.pop(host.port))
        self._at_switch("ip", "link", "del", f"{host.port}i")
        self._at_switch("ip", "link", "set", host.port, "master", "switch")


# -- processes outside of the hosts -----------------------------------------------------------


def _hold(namespaces: Sequence[str], program: Sequence[str]) -> subprocess.Popen[str]:
    """A process in new namespaces, which ends when we do: its stdin is ours."""
    python = [sys.executable, "-IS", *program]
    # Without a PID namespace of its own there is nothing to fork for.
    fork = ["--fork"] if "--pid" in namespaces else []
    return _start_outside(["unshare", "--net", *namespaces, *fork, "--", *python])


def _start_outside(command: Sequence[str]) -> subprocess.Popen[str]:
    """A process that says "up" when it is, and ends with its stdin or by SIGTERM."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stderr is not None
    ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
    if not ready or process.stdout.readline() != "up\n":
        process.kill()
        _, said = process.communicate()
        raise subprocess.CalledProcessError(process.returncode, command, "", said)
    process.stderr.close()
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(PATIENCE)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=True, text=True, capture_output=True, timeout=PATIENCE)
    return done.stdout


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


# -- the folder that every host covers with one of its own ------------------------------------


def _make_folder() -> str:
    """An empty folder with a short path (a Unix socket's has 107 bytes); removes those of dead test runs."""
    for left in Path("/tmp").glob(f"{PREFIX}*"):
        maker = left.name.removeprefix(PREFIX).partition("-")[0]
        if maker.isdigit() and not os.path.exists(f"/proc/{maker}"):
            _remove_folder(str(left))
    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/tmp")


def _remove_folder(folder: str) -> None:
    end = time.monotonic() + PATIENCE
    while os.path.isdir(folder):
        try:
            os.rmdir(folder)  # never more than that: whatever lay on it was on a host
        except OSError:
            # Busy as long as a host's process 1 has it mounted, which may be ending just now.
            if time.monotonic() > end:
                return
            time.sleep(0.01)
