"""Get hosts by ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel import programs
from monarch_kernel.launchers.base import (
    MARKER,
    HostPhase,
    HostStatus,
    InfeasibleError,
    JobStatus,
    KeyWay,
    Launcher,
    LauncherOption,
    LaunchRequest,
    SubmissionRefusedError,
    Ticket,
    find_announcement,
)
from monarch_kernel.launchers.engine_job import EngineJob, each_at_once
from monarch_kernel.launchers.job import checked_meshes
from monarch_kernel.launchers.scripts import Script, one_word, script
from monarch_kernel.launchers.tunnel import Tunnels, reaches

# Build all command lines of the system's ssh.

#: No user can answer a prompt, and the remote command has no terminal.
_OPTIONS = ("-T", "-o", "BatchMode=yes")
#: Characters that no name of a host or user contains, but that shells or the user's ssh configuration could interpret.
_ODD = frozenset("\"'`$\\;&|<>(){}*?!#")


def checked_host(word: str) -> str:
    """Check a host for ssh: ``HOST``, ``USER@HOST`` or ``ssh://USER@HOST:PORT``. Return it.

    Raises:
        ValueError: it is not such a host. A file that lists hosts may come from an untrusted source.
    """
    is_text = isinstance(word, str) and bool(word)  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass any
    if not is_text or word.startswith("-") or "@-" in word or any(not _is_plain(each) for each in word):
        raise ValueError(f"{word!r} is not a host for ssh: write HOST or USER@HOST")
    return word


def _is_plain(character: str) -> bool:
    return character.isprintable() and not character.isspace() and character not in _ODD


def ssh_command(ssh: Sequence[str], host: str, *remote: str, options: Sequence[str] = ()) -> list[str]:
    """Build the command line of a connection.

    Args:
        ssh: the command, with further options for all hosts.
        host: the host; see ``checked_host``.
        remote: the remote command, as one word; none if ``options`` make it unnecessary.
        options: options of this connection.

    Raises:
        ValueError: the host is invalid.
    """
    return [*ssh, *_OPTIONS, *options, "--", checked_host(host), *remote]


# Get hosts by ssh, from a list or a hostfile.

_SSH = "ssh"
#: The folder on the hosts in which workers keep their announcements and logs.
_FOLDER = "~/.local/state/monarch_kernel/workers"
#: The number of parallel connections.
PARALLEL = 8
#: The additional time limit for a start, beyond the connection (seconds).
_START_TIME = 120.0
#: The time limit for a worker to end in good order (tenths of a second, for sh).
_GRACE = 60
#: How long an answer of a host is used before the host is queried again (seconds).
FRESH = 2.0
#: The time limit for an attempt to connect directly (seconds).
_DIRECT_TIME = 1.5
#: Monarch's names of the transports between hosts.
_TRANSPORTS = ("tcp", "tls", "metatls", "metatls-hostname")
#: ssh's own exit code: the connection failed.
_NO_CONNECTION = 255


@dataclass
class _Start:
    """The start of a worker by this process."""

    process: subprocess.Popen[bytes] | None = None
    status: HostStatus | None = None
    said: str = ""
    seen: float = 0.0
    cancelled: bool = False

    def holds(self, now: float) -> bool:
        """Return whether the status need not be queried again."""
        return self.status is not None and (self.status.state is HostPhase.GONE or now - self.seen < FRESH)


class SSHLauncher(Launcher):
    """Starts a worker on each of several hosts by the system's ``ssh``.

    It uses the user's configuration of ssh: users, keys, agents, jump hosts, ControlMaster.

    A connection lasts until the worker has announced itself. The key is sent through it. No secret is an argument or in
    a file on the host.

    Args:
        hosts: the hosts, as for ``ssh``, with a user if needed. A host that is named several times has several workers.
        ssh: the command, with further options for all hosts.
        port: the port at which workers listen; 0: any free port.
        tunnel: whether this process reaches workers through ssh, because ports are closed; None: only if no direct
            connection succeeds.
        parallel: the number of parallel connections.
    """

    name = "ssh"
    OPTIONS = (
        LauncherOption(name="nodes", type=list, metavar="HOST,...", help="the hosts, as for ssh"),
        LauncherOption(name="hostfile", metavar="FILE", help="... or a file with one at the beginning of each line"),
        LauncherOption(name="ssh", metavar="COMMAND", help="the command, with options for all hosts (default: ssh)"),
        LauncherOption(name="port", type=int, metavar="PORT", help="where workers listen (default: any)", plain=True),
        LauncherOption(name="tunnel", type=bool, help="reach workers through ssh (default: where needed)", plain=True),
        LauncherOption(name="parallel", type=int, metavar="N", help="connections that are made at once", plain=True),
    )

    def __init__(
        self,
        hosts: Sequence[str],
        ssh: Sequence[str] = (_SSH,),
        port: int = 0,
        tunnel: bool | None = None,
        parallel: int = PARALLEL,
    ) -> None:
        self._hosts = [checked_host(host) for host in hosts]
        self._ssh = list(ssh)
        self._port = port
        self._tunnel = tunnel
        self._parallel = max(1, parallel)
        self._starts: dict[str, _Start] = {}
        self._tunnels = Tunnels()
        self._lock = threading.Lock()
        self._news = threading.Event()  # set when a start has failed, or the last one has ended

    def add(self, hosts: Sequence[str], at: int) -> None:
        """Insert more hosts into the list, before this position."""
        self._hosts[at:at] = [checked_host(host) for host in hosts]

    @classmethod
    def configured(cls, values: Mapping[str, Any]) -> SSHLauncher:
        """See ``Launcher``."""
        given = dict(values)
        nodes, file = given.pop("nodes", None), given.pop("hostfile", None)
        if bool(nodes) == bool(file):
            raise ValueError("name the hosts, either by nodes (--nodes node1,node2) or by a hostfile (--hostfile FILE)")
        if "ssh" in given:
            given["ssh"] = shlex.split(given["ssh"])
        return cls(nodes or hostfile(file), **given)

    def usual_hosts(self) -> int:
        """See ``Launcher``."""
        return len(self._hosts)

    # -- starting -------------------------------------------------------------------------------------

    def submit(self, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        if request.hosts > len(self._hosts):
            raise InfeasibleError(
                f"{request.hosts} hosts were asked for, and the list for ssh has {len(self._hosts)}: name more hosts, "
                "or ask for fewer"
            )
        if shutil.which(self._ssh[0]) is None:
            raise SubmissionRefusedError(self.name, f"there is no command {self._ssh[0]}", "install OpenSSH's client")
        return self._started(request, self._hosts[: request.hosts], [])

    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        places: list[str] = list(ticket.data["hosts"])
        status = self.poll(ticket)
        used = [places[host.host] for host in status.hosts if host.state is not HostPhase.GONE]
        # First use a host whose worker is gone, if it can still be reached, because it has files of the job.
        gone = [places[host.host] for host in status.hosts if host.state is HostPhase.GONE]
        free = [
            host for host in dict.fromkeys([*gone, *self._hosts]) if host not in used or self._hosts.count(host) > 1
        ]
        for host in used:
            if host in free and self._hosts.count(host) <= used.count(host):
                free.remove(host)
        wanted = max(count, min(len(free), count + self._parallel))
        chosen = self.answering(free[:wanted])[:count]
        if len(chosen) < count:
            raise InfeasibleError(
                f"{count} more hosts were asked for, and {len(chosen)} of those in the list for ssh are free and "
                "answer: name more hosts"
            )
        return self._started(request, chosen, places)

    def answering(self, hosts: Sequence[str]) -> list[str]:
        """Return those of these hosts that can be reached."""
        answers = each_at_once(self._parallel, lambda host: (host, self._answers(host)), hosts, "ssh")
        return [host for host, answered in answers if answered]

    def _answers(self, host: str) -> bool:
        try:
            return self._run(host, script("true")).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    def _started(self, request: LaunchRequest, new: list[str], places: list[str]) -> Ticket:
        """Start workers, each on a thread of a pool that ends with the last of them."""
        numbers = range(len(places), len(places) + len(new))
        ticket = Ticket(
            launcher=self.name, job=request.command.job, hosts=numbers.stop, data={"hosts": [*places, *new]}
        )
        self.begin(request, dict(zip(numbers, new)))
        return ticket

    def begin(self, request: LaunchRequest, hosts: Mapping[int, str]) -> list[threading.Thread]:
        """Start workers on hosts by their numbers. Return the starting threads, which end with the last start."""
        with self._lock:
            for number in hosts:
                self._starts[request.command.marker(number)] = _Start()
        waiting = list(hosts.items())

        def work() -> None:
            while True:
                with self._lock:
                    if not waiting:
                        return
                    number, host = waiting.pop(0)
                self._start(request, number, host)

        threads = [
            threading.Thread(target=work, name="ssh-start", daemon=True)
            for _ in range(min(self._parallel, len(waiting)))
        ]
        for thread in threads:
            thread.start()
        return threads

    def _start(self, request: LaunchRequest, number: int, host: str) -> None:
        command = request.command
        mark = command.marker(number)
        start = self._starts[mark]
        argv = command.argv(
            _ADDRESS,
            key=KeyWay.STDIN,
            announce=("-", f"{_FOLDER}/{mark}.json"),
            log=f"{_FOLDER}/{mark}.log",
            background=True,
            walltime=request.resources.walltime,
        )
        address = script('"tcp://$a:"@{port}', port=self._port)
        remote = _remote(
            script(
                "@{prepare} exec env @{marks} @{worker}",
                prepare=self._preparation(command.job),
                marks=[f"{name}={value}" for name, value in command.marks(number).items()],
                worker=[address if word == _ADDRESS else word for word in argv],
            )
        )
        said, errors, code = b"", b"", None
        try:
            with self._lock:
                if start.cancelled:
                    return
                start.process = programs.start(
                    ssh_command(self._ssh, host, remote),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for the program, which then ends the job
                )
            said, errors = start.process.communicate(command.stdin(), _START_TIME)
            code = start.process.returncode
        except subprocess.TimeoutExpired:
            assert start.process is not None
            start.process.kill()
            said, errors = start.process.communicate()
            errors += f"\nit did not answer within {_START_TIME:g} s".encode()
        except OSError as e:
            errors = f"{self._ssh[0]}: {e.strerror}".encode()
        text = errors.decode(errors="replace").strip()
        found = find_announcement(said)
        now = time.time()
        if found is not None:
            status = HostStatus.announced(number, found, since=now)
        else:
            last = text.splitlines()[-1] if text else "it wrote nothing"
            status = HostStatus(
                host=number, state=HostPhase.GONE, name=host, reason=last, exit_code=code, failed=True, since=now
            )
        with self._lock:
            start.said, start.status, start.seen = text, status, time.monotonic()
            over = all(one.status is not None for one in self._starts.values())
            if over:
                # The others announced themselves before. The next connection to them shows whether they have died.
                # Querying each over a separate connection would double the time of the start.
                for other, one in self._starts.items():
                    if other.startswith(f"{command.job}."):
                        one.seen = start.seen
            if found is None or over:
                self._news.set()

    def _preparation(self, job: str) -> Script:
        """Build the preparation that sh runs before it starts a worker: it sets ``a`` to the address for listening."""
        del job
        return _OWN_ADDRESS

    # -- asking ---------------------------------------------------------------------------------------

    def poll(self, ticket: Ticket) -> JobStatus:
        """See ``Launcher``."""
        found = self.statuses(ticket, range(ticket.hosts))
        return JobStatus(tuple(found[number] for number in range(ticket.hosts)))

    def statuses(self, ticket: Ticket, numbers: Sequence[int]) -> dict[int, HostStatus]:
        """Return the status of these hosts, by their numbers."""
        found: dict[int, HostStatus] = {}
        ask: list[int] = []
        now = time.monotonic()
        with self._lock:
            self._news.clear()
            mine = {number: self._starts.get(_mark(ticket, number)) for number in numbers}
            starting = any(start is not None and start.status is None for start in mine.values())
            for number, start in mine.items():
                host = ticket.data["hosts"][number]
                if start is not None and start.status is None:
                    began = start.process is not None
                    why = "its worker is starting" if began else "waiting for a connection"
                    state = HostPhase.STARTING if began else HostPhase.QUEUED
                    found[number] = HostStatus(host=number, state=state, name=host, reason=why)
                elif start is not None and (known := start.status) is not None and (starting or start.holds(now)):
                    # During starts, the others are not queried each time, because that would slow down the starts.
                    found[number] = known
                else:
                    ask.append(number)
        for number, status in each_at_once(
            self._parallel, lambda number: (number, self._ask(ticket, number)), ask, "ssh"
        ):
            found[number] = status
            with self._lock:
                start = self._starts.setdefault(_mark(ticket, number), _Start())
                start.status, start.seen = status, time.monotonic()
        return found

    def rest(self, seconds: float) -> None:
        """See ``Launcher``."""
        self._news.wait(seconds)

    def _ask(self, ticket: Ticket, number: int) -> HostStatus:
        """Query a host for whether its worker is alive."""
        host, mark = ticket.data["hosts"][number], _mark(ticket, number)
        # Repeat this after a moment: a process that is just forking or executing a program may be missed.
        ask = script(
            '@{find} a=$(find); [ -n "$a" ] || { sleep 0.1; a=$(find); }; [ -n "$a" ] && echo lives; '
            "cat @{announcement} 2>/dev/null",
            find=_find(mark),
            announcement=_path(mark, "json"),
        )
        try:
            done = self._run(host, ask)
        except (OSError, subprocess.TimeoutExpired) as e:
            return HostStatus(host=number, state=HostPhase.GONE, name=host, reason=f"it cannot be asked: {e}")
        if done.returncode == _NO_CONNECTION:
            last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no connection"])[-1]
            return HostStatus(host=number, state=HostPhase.GONE, name=host, reason=last)
        said = find_announcement(done.stdout)
        lives = b"lives" in done.stdout.splitlines()
        if said is not None and (lives or said.error):
            return HostStatus.announced(number, said)
        if lives:
            return HostStatus(host=number, state=HostPhase.STARTING, name=host, reason="its worker is starting")
        name = host if said is None else said.host
        return HostStatus(host=number, state=HostPhase.GONE, name=name, reason="its worker has ended")

    def log(self, ticket: Ticket, host: int, lines: int = 100) -> str:
        """See ``Launcher``."""
        mark = _mark(ticket, host)
        start = self._starts.get(mark)
        said = "" if start is None else start.said
        if start is not None and start.status is not None and start.status.exit_code == _NO_CONNECTION:
            return said
        try:
            tail = script("tail -n @{lines} @{log} 2>/dev/null", lines=int(lines), log=_path(mark, "log"))
            done = self._run(ticket.data["hosts"][host], tail)
        except (OSError, subprocess.TimeoutExpired) as e:
            return said or f"the log of {ticket.data['hosts'][host]} cannot be read: {e}"
        return "\n".join(filter(None, (said, done.stdout.decode(errors="replace").strip())))

    # -- ending ---------------------------------------------------------------------------------------

    def end(self, ticket: Ticket, hosts: Sequence[int] | None = None) -> None:
        """See ``Launcher``. Hosts that cannot be reached are skipped: their workers end after their idle time."""
        numbers = list(range(ticket.hosts) if hosts is None else hosts)
        with self._lock:
            for number in numbers:
                start = self._starts.get(_mark(ticket, number))
                if start is not None and start.status is None:
                    start.cancelled = True
                    gone = HostStatus(host=number, state=HostPhase.GONE, reason="it was cancelled")
                    if start.process is None:
                        start.status = gone
                    else:
                        start.process.kill()
        each_at_once(self._parallel, lambda number: self._end(ticket, number), numbers, "ssh")

    def _end(self, ticket: Ticket, number: int) -> None:
        mark = _mark(ticket, number)
        start = self._starts.get(mark)
        if start is not None and start.status is not None and start.process is None and start.cancelled:
            return  # it was never started
        # The worker ends its ranks in good order. Remaining processes are then killed.
        end = script(
            "@{find} p=$(sed -n 's/.*\"pid\":\\([0-9]*\\).*/\\1/p' @{announcement} 2>/dev/null); "
            'a=$(find); case " $(echo $a) " in *" $p "*) ;; *) p=$a;; esac; [ -n "$p" ] && kill $p 2>/dev/null; '
            'i=0; while a=$(find); [ -n "$a" ]; do i=$((i+1)); [ $i -gt @{grace} ] && kill -9 $a 2>/dev/null; '
            "[ $i -gt @{limit} ] && break; sleep 0.1; done; rm -f @{announcement} @{log}",
            find=_find(mark),
            announcement=_path(mark, "json"),
            log=_path(mark, "log"),
            grace=_GRACE,
            limit=2 * _GRACE,
        )
        try:
            self._run(ticket.data["hosts"][number], end)
        except (OSError, subprocess.TimeoutExpired):
            pass
        with self._lock:
            if start is not None:
                gone = HostStatus(host=number, state=HostPhase.GONE, reason="it was ended", since=time.time())
                start.status, start.seen = gone, time.monotonic()

    # -- reaching -------------------------------------------------------------------------------------

    def route(self, ticket: Ticket, host: HostStatus) -> str:
        """See ``Launcher``."""
        address = host.url.removeprefix("tcp://")
        if self._tunnel is False or (self._tunnel is None and reaches(host.url, _DIRECT_TIME)):
            return host.url
        place = ticket.data["hosts"][host.host]
        return self._tunnels.to(host.url, ssh_command(self._ssh, place, options=("-W", address)))

    def close(self) -> None:
        """See ``Launcher``."""
        self._tunnels.close()

    def _run(self, host: str, text: Script) -> subprocess.CompletedProcess[bytes]:
        return programs.run(
            ssh_command(self._ssh, host, _remote(text)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=self.PATIENCE,
            check=False,
        )


class SSHJob(EngineJob):
    """Hosts reached by ``ssh``, with the user's configuration of it (``docs/ssh.md``).

    Args:
        hosts: their names, as for ``ssh``; or the path of a hostfile, with a host at the beginning of each line. None:
            call ``add_mesh`` to name them.
        meshes: the number of hosts of each mesh; by default all of them are the mesh ``hosts``. Further hosts of the
            list are spares, which replace lost ones.
        ssh: the command, with further options for all hosts, such as ``("ssh", "-F", "config")``.
        port: the port at which workers listen; 0: any free port.
        tunnel: whether workers are reached through ssh, because their ports are closed; None: only if necessary.
        parallel: the number of parallel connections.
        options: those of ``EngineJob``.
    """

    _adds_meshes = True
    _launcher: SSHLauncher

    def __init__(
        self,
        hosts: Sequence[str] | str | os.PathLike[str] | None = None,
        meshes: Mapping[str, int] | None = None,
        *,
        ssh: Sequence[str] = (_SSH,),
        port: int = 0,
        tunnel: bool | None = None,
        parallel: int = PARALLEL,
        **options: Any,
    ) -> None:
        names = hostfile(hosts) if isinstance(hosts, str | os.PathLike) else list(hosts or ())
        if not names and (hosts is not None or meshes):
            raise ValueError("SSHJob needs at least one host, as in SSHJob(['node1', 'node2'])")
        launcher = SSHLauncher(names, ssh, port, tunnel, parallel)
        every = {"hosts": len(names)} if names else {}
        super().__init__(launcher, every if meshes is None else meshes, **options)

    def add_mesh(self, name: str, hosts: Sequence[str]) -> None:
        """Request another mesh of these hosts, before the job is applied.

        Raises:
            RuntimeError: the job was applied.
            ValueError: the name is not an identifier, the mesh already exists, or a host is invalid for ssh.
        """
        self._check_new("add_mesh")
        if name in self._requested:
            raise ValueError(f"there is a mesh {name} of this job")
        requested = checked_meshes("SSHJob", {**self._requested, name: len(hosts)})
        self._launcher.add(hosts, sum(self._requested.values()))
        self._requested = requested


def monarch_ssh_job(
    python_exe: str = "python",
    ssh_args: Sequence[str] = (),
    monarch_port: int = 0,
    transport: str = "tcp",
    **options: Any,
) -> SSHJob:
    """Create an ``SSHJob`` without meshes, with the arguments of Monarch's class of this name, which is private there.

    Args:
        python_exe: the interpreter on the hosts.
        ssh_args: further options for ``ssh``.
        monarch_port: the port at which workers listen; 0: any free port.
        transport: Monarch's name of a transport between hosts. It is always encrypted TCP.

    Raises:
        ValueError: the transport is not one between hosts.
    """
    if transport not in _TRANSPORTS:
        raise ValueError(f"SSHJob cannot use the transport {transport!r}: use one of {', '.join(_TRANSPORTS)}")
    return SSHJob(ssh=(_SSH, *ssh_args), port=monarch_port, python=python_exe, **options)


def hostfile(path: str | os.PathLike[str]) -> list[str]:
    """Parse a hostfile in the format of MPI and DeepSpeed: the first word of each line; ``#`` begins a comment.

    Raises:
        ValueError: the file cannot be read, or names no host.
    """
    try:
        with open(os.path.expanduser(os.fspath(path))) as file:
            lines = [line.partition("#")[0].split() for line in file]
    except OSError as e:
        raise ValueError(f"the hostfile {os.fspath(path)} cannot be read: {e.strerror}") from e
    if not (found := [words[0] for words in lines if words]):
        raise ValueError(f"the hostfile {os.fspath(path)} names no host")
    return found


#: A placeholder in the command line of a worker, for the address by which this connection reached the host.
_ADDRESS = "tcp://ADDRESS:0"
_OWN_ADDRESS = script('set -- $SSH_CONNECTION; a=$3; case "$a" in *:*) a="[$a]";; esac;')


def _mark(ticket: Ticket, number: int) -> str:
    return f"{ticket.job}.{number}"


def _path(mark: str, kind: str) -> Script:
    return script('"$HOME"@{path}', path=f"{_FOLDER[1:]}/{mark}.{kind}")


def _find(mark: str) -> Script:
    """Define a function of sh that finds the processes of a worker, which carry its mark."""
    return script("find() { grep -lszxF @{mark} /proc/[0-9]*/environ | cut -d/ -f3; };", mark=f"{MARKER}={mark}")


def _remote(text: Script) -> Script:
    """Build a command that runs a script of sh, whatever the user's login shell is."""
    return script("sh -c @{text}", text=one_word(text))
