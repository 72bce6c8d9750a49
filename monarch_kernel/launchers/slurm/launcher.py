"""Get hosts from Slurm: an allocation with a worker on each of its nodes, as a step."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from monarch_kernel import environment, programs
from monarch_kernel.launchers.base import (
    MARKER,
    HostPhase,
    HostStatus,
    InfeasibleError,
    JobStatus,
    KeyWay,
    Launcher,
    LauncherOption,
    LaunchError,
    LaunchRequest,
    Resources,
    SubmissionRefusedError,
    Ticket,
    find_announcement,
    tail,
)
from monarch_kernel.launchers.engine_job import TIMEOUT, EngineJob
from monarch_kernel.launchers.job import CACHED_PATH, JobState, Path, checked_meshes
from monarch_kernel.launchers.registry import jobs_folder
from monarch_kernel.launchers.scripts import Script, one_word, script
from monarch_kernel.launchers.slurm import queue as slurm_queue
from monarch_kernel.launchers.slurm.queue import QueuedJob, UnreachableError
from monarch_kernel.launchers.ssh import ssh_command
from monarch_kernel.launchers.tunnel import Tunnels
from monarch_kernel.private_files import PrivateFolder

# Build the scripts of a Slurm job, for sh. They contain no secret: a worker reads its key from a file, or from munge.
#
# ``keeper`` runs in the allocation for as long as it is kept: as the command of ``salloc`` on the machine that
# requested it, or as the batch script of ``sbatch``. It runs ``start`` for each host; a later program does so for a
# replacement. ``start`` runs ``worker`` on the node, as a separate step, and keeps its output and exit code.

#: Variables of srun for one task, by which programs such as Lightning and MPI would consider a rank that task.
_OF_TASKS = script(
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_GTIDS SLURM_TASK_PID SLURM_NTASKS SLURM_NPROCS "
    "SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_NTASKS_PER_NODE"
)
#: Placeholders in the command line of a worker, for values that are known only on its node.
_ADDRESS, _NAME = "tcp://ADDRESS:0", "NODENAME"
#: The interval at which the keeper of an allocation without workers checks for new ones (seconds).
_SCRIPT_PAUSE = 5


def keeper_script(folder: str, request: LaunchRequest) -> Script:
    """Build the command of an allocation.

    Its arguments are the number of its first host and the number of its hosts; an element of an array has one. A third
    argument ``salloc`` means that salloc is the parent.

    A salloc whose allocation is revoked just as its command ends may never end: the thread that gets the message reaps
    the command, and the main thread then waits for it in a busy loop, on a whole core (22.05; 1 of 1,700 here). SIGHUP
    ends that loop. salloc then relinquishes the allocation, as it does when its command ends.
    """
    linger = max(1, int(request.command.idle))
    return script(
        """#!/bin/sh
# Keeps an allocation of monarch_kernel while workers run in it.
n=$(($1 + ${SLURM_ARRAY_TASK_ID:-0})); end=$((n + $2))
[ "$3" != salloc ] || trap 'kill -HUP "$PPID"' EXIT
cd @{folder} || exit 1
trap 'kill $pause 2>/dev/null; exit 1' TERM HUP
i=$n
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  [ "$i" -lt "$end" ] || break
  sh ./start.sh "$SLURM_JOB_ID" "$i" "$node" &
  i=$((i + 1))
done
wait
# A worker that was lost may be replaced here: until its idle time is over.
lost=0; quiet=0
while [ "$n" -lt "$i" ]; do [ "$(cat "$n.exit")" = 0 ] || lost=1; n=$((n + 1)); done
while [ "$quiet" -lt @{linger} ]; do
  squeue -h -j "$SLURM_JOB_ID" -o '%A %T' 2>/dev/null | grep -qx "$SLURM_JOB_ID RUNNING" || break
  if squeue -h -s -j "$SLURM_JOB_ID" -o %j | grep -q @{steps}; then quiet=0
  elif [ "$lost" = 0 ]; then break
  else quiet=$((quiet + @{pause})); fi
  sleep @{rest} & pause=$!
  wait "$pause"
done
""",
        folder=folder,
        linger=linger,
        steps=f"^{request.command.job}[.]",
        pause=_SCRIPT_PAUSE,
        rest=min(_SCRIPT_PAUSE, linger),
    )


def start_script(folder: str, request: LaunchRequest, port: int, interface: str, shared_home: bool) -> Script:
    """Build the script that runs one worker as a step. Its arguments: the Slurm job, the host's number and its node."""
    # An expired credential still contains its payload, but unmunge then reports an error.
    credential = script('( umask 077; munge --restrict-uid="$(id -u)" < secret > "$2.credential" )\n')
    return script(
        """#!/bin/sh
# Runs a worker of monarch_kernel on a node. $1: the job, $2: the number of the host, $3: the node
cd @{folder} || exit 1
echo "$3" > "$2.node"
unset SLURM_CPUS_PER_TASK SLURM_NTASKS_PER_NODE SLURM_NTASKS SLURM_NPROCS
address=$(scontrol show node --oneliner "$3" | sed -n 's/.* NodeAddr=\\([^ ]*\\) .*/\\1/p')
# One element of an array has the number of the array, for which squeue lists all of them.
end=$(squeue -h -j "$1" -o '%A %e' | sed -n "s/^$1 //p")
end=$(date -d "${end:-unknown}" +%s 2>/dev/null) && left=$((end - $(date +%s))) || left=
@{credential}srun --jobid="$1" --overlap --nodes=1 --ntasks=1 --nodelist="$3" --mem=0 --mpi=none --cpu-bind=none \\
  --job-name=@{step}"$2" @{input_none} \\
  sh -c @{worker} \\
  worker "$2" "${address:-$3}" "$left" > "$2.out" 2> "$2.log" @{key_in}
code=$?
# srun ends with 0 when it loses a node.
[ "$code" = 0 ] && grep -q '^srun: error: ' "$2.log" && code=255
echo "$code" > "$2.ended" && mv "$2.ended" "$2.exit"
""",
        folder=folder,
        credential=script("") if shared_home else credential,
        step=f"{request.command.job}.",
        input_none=["--input=none"] * shared_home,
        worker=one_word(_worker(folder, request, port, interface, shared_home)),
        key_in=script("</dev/null") if shared_home else script('--input=all < "$2.credential"'),
    )


def _worker(folder: str, request: LaunchRequest, port: int, interface: str, shared_home: bool) -> Script:
    command = request.command
    known = {_ADDRESS: script('"tcp://$a:"@{port}', port=port), _NAME: script('"${SLURMD_NODENAME:-$2}"')}
    argv = command.argv(_ADDRESS, key=KeyWay.STDIN, announce=("-",), name=_NAME)
    run = script(
        'exec env @{mark}"$1" @{line} ${3:+--walltime "$3"}',
        mark=f"{MARKER}={command.job}.",
        line=[known.get(word, word) for word in argv],
    )
    if shared_home:
        run = script("@{run} < @{secret}", run=run, secret=f"{folder}/secret")
    else:
        run = script("unmunge --metadata=/dev/null --output=- | ( @{run} )", run=run)
    if interface:
        address = script(
            r"a=$(ip -o addr show dev @{interface} | sed -n 's/.* inet6\{0,1\} \([^/ ]*\).*/\1/p' | head -n 1)",
            interface=interface,
        )
    else:
        # Some distributions map a host's own name to an address of the loopback network.
        address = script(
            """look() { getent "$1" "$2" | sed -n "1s/ .*//p"; }
a=$(look ahostsv4 "$2"); a=${a:-$(look ahosts "$2")}
case "$a" in ""|127.*|::1) a=$(hostname -I | cut -d " " -f 1);; esac"""
        )
    return script(
        """unset @{of_tasks}
@{address}
[ -n "$a" ] || { echo "$2 has no address"@{where} >&2; exit 2; }
case "$a" in *:*) a="[$a]";; esac
@{run}""",
        of_tasks=_OF_TASKS,
        address=address,
        where=f" at {interface}" if interface else "",
        run=run,
    )


def batch_script(program: list[str]) -> Script:
    """Build the script that runs a program in the allocation, where ``SlurmJob`` detects that it is the client."""
    return script(
        """#!/bin/sh
# Runs the client of a job of monarch_kernel in its allocation.
export @{variable}="$SLURM_JOB_ID"
exec @{program}
""",
        variable=environment.SLURM_BATCH,
        program=program,
    )


_WHAT = "Slurm job"
_FILES = ["*.sh", "*.node", "*.out", "*.log", "*.exit", "*.ended", "*.credential", "secret"]
#: The time limit for salloc to report that its request is in the queue (seconds).
_SUBMIT_TIME = 60.0
#: The time limit for the scripts of an ended job to end (seconds).
_KEEPER_TIME = 2.0
#: The interval at which files of an allocation are checked (seconds).
_PAUSE = 0.02
_ID = re.compile(r"job allocation (\d+)|Submitted batch job (\d+)|^(\d+)(?:;\S*)?$", re.MULTILINE)
#: Words in rejections that no waiting changes.
_INFEASIBLE = re.compile(
    "configuration (is )?not available|Node count specification invalid|More processors requested|"
    "Invalid generic resource|invalid feature|Requested time limit is invalid|Invalid partition|"
    "invalid partition|Memory specification|Unable to satisfy|violates accounting/QOS policy",
    re.IGNORECASE,
)
#: The ways to request a job.
WAYS = ("salloc", "sbatch", "array")


class _Part(msgspec.Struct):
    """A Slurm job of a ticket.

    Attributes:
        id: its number.
        first: the number of the host on its first node.
        count: the number of requested hosts.
        own: whether the launcher ends it; otherwise it ends only steps.
    """

    id: str
    first: int
    count: int
    own: bool = True


class _Data(msgspec.Struct):
    """The data in tickets of this launcher.

    Attributes:
        folder: the folder with the scripts and the output of all hosts.
        parts: the Slurm jobs.
        places: by host number, the job of each host that was added to an existing job.
        script: whether the client runs in the allocation (batch mode).
    """

    folder: str
    parts: list[_Part]
    places: dict[str, str] = {}
    script: bool = False

    def job_of(self, host: int) -> str:
        """Return the Slurm job of a host."""
        if (added := self.places.get(str(host))) is not None:
            return added
        return next(part.id for part in self.parts if part.first <= host < part.first + part.count)


class _Place(NamedTuple):
    """A node of a running job: the id of the job in tickets, the number of the job, and the node."""

    job: str
    number: str
    node: str


@dataclass(frozen=True)
class _Host:
    """The data in the files of a host."""

    out: bytes
    code: int | None
    node: str


class SlurmLauncher(Launcher):
    """Requests nodes from Slurm, and runs a worker on each as a step of the job.

    Args:
        way: "salloc": one allocation for all hosts, which survives the loss of any node; a process on this machine
            keeps it. "sbatch": the same, but a process on its first node keeps it, and the loss of that node ends it.
            "array": a separate job for each host; hosts start as Slurm provides them.
        arguments: further arguments for salloc or sbatch, as written on its command line.
        exclusive: whether to request whole nodes.
        spares: the number of additional nodes of each allocation, on which lost hosts are replaced at once; not with
            "array".
        port: the port at which workers listen; 0: any free port.
        interface: the network interface at which they listen, such as "ib0"; "": that of the node's address.
        folder: a folder for the scripts, the key and the logs; by default in the home folder. The nodes must see it at
            the same path, unless ``shared_home`` is false.
        shared_home: whether they see it. Otherwise the key is transferred as a credential of munge, and only "salloc"
            is possible.
        tunnel: whether workers are reached through ``ssh`` to their nodes.
        allocation: the id of a running job in which workers are started, instead of a new one.
    """

    name = "slurm"
    OPTIONS = (
        *(
            LauncherOption(name=name, metavar=metavar, help=what, wish=True, plain=True)
            for name, metavar, what in (
                ("partition", "NAME", "where; by default the cluster's"),
                ("account", "NAME", "that is charged"),
                ("qos", "NAME", "the quality of service"),
                ("constraint", "FEATURES", "features that nodes must have"),
                ("reservation", "NAME", "take nodes of this reservation"),
                ("gres", "LIST", 'generic resources of a node, such as "gpu:a100:4"'),
                ("nodelist", "NODES", "nodes that must be among them"),
                ("exclude", "NODES", "nodes that must not"),
            )
        ),
        LauncherOption(name="way", choices=WAYS, help="how Slurm is asked (default: salloc)", plain=True),
        LauncherOption(name="exclusive", type=bool, help="whether nodes are for this job alone (default)", plain=True),
        LauncherOption(name="spares", type=int, metavar="N", help="more nodes, in place of lost ones", plain=True),
        LauncherOption(name="port", type=int, metavar="PORT", help="where workers listen (default: any)", plain=True),
        LauncherOption(
            name="interface",
            metavar="NAME",
            help='where they listen, such as "ib0"',
            plain=True,
            pattern=r"[A-Za-z0-9_][A-Za-z0-9_.:-]*",
        ),
        LauncherOption(name="tunnel", type=bool, help="reach workers through ssh to their nodes", plain=True),
        LauncherOption(name="shared_home", type=bool, help="whether nodes see this home (default)"),
        LauncherOption(name="folder", metavar="FOLDER", help="for the scripts, the key and the logs"),
        LauncherOption(name="allocation", metavar="JOB", help="a running job in which workers are started"),
        LauncherOption(name="arguments", metavar="TEXT", help="further ones for salloc or sbatch"),
    )

    def __init__(
        self,
        way: str = "salloc",
        arguments: Sequence[str] = (),
        *,
        exclusive: bool = True,
        spares: int = 0,
        port: int = 0,
        interface: str = "",
        folder: str = "",
        shared_home: bool = True,
        tunnel: bool = False,
        allocation: str = "",
    ) -> None:
        if way not in WAYS:
            raise ValueError(f"there is no way {way!r} to ask Slurm: choose one of {', '.join(WAYS)}")
        if not shared_home and way != "salloc":
            raise ValueError(f"without a shared home, hosts can come by salloc only, and not by {way}")
        if spares and way == "array":
            raise ValueError("an array has no spares: each of its hosts is a separate job")
        self._way = way
        self._arguments = list(arguments)
        self._exclusive = exclusive
        self._spares = spares
        self._port = port
        self._interface = interface
        self._folder = os.path.abspath(os.path.expanduser(folder)) if folder else ""
        self._shared_home = shared_home
        self._tunnel = tunnel
        self._allocation = allocation
        self._tunnels = Tunnels()

    @classmethod
    def configured(cls, values: Mapping[str, Any]) -> SlurmLauncher:
        """See ``Launcher``."""
        given = dict(values)
        if "arguments" in given:
            given["arguments"] = shlex.split(given["arguments"])
        return cls(**given)

    def share_nodes(self) -> None:
        """Request parts of nodes instead of whole ones."""
        self._exclusive = False

    # -- asking for hosts -----------------------------------------------------------------------------

    def submit(self, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        path = self._make_folder(request)
        data = _Data(path, [])
        try:
            if self._allocation:
                data.parts = [_Part(self._allocation, 0, 0, own=False)]
                self._add(data, range(request.hosts), self._free(data, JobStatus(())))
            else:
                data.parts = self._new(path, 0, request)
        except BaseException:
            _remove_folder(path)
            raise
        return self._ticket(request.command.job, request.hosts, data)

    def submit_script(self, request: LaunchRequest, program: list[str]) -> Ticket:
        """Request hosts by a batch job, in which a program runs as the client on the first host.

        Raises: as ``submit``.
        """
        path = self._make_folder(request)
        try:
            with PrivateFolder.open(path) as folder:
                folder.replace("batch.sh", batch_script(program).encode())
            argv = ["sbatch", "--parsable", *self._asked(request, array=False), f"--output={path}/client.log"]
            job = self._sbatch([*argv, f"{path}/batch.sh"])
        except BaseException:
            _remove_folder(path)
            raise
        return self._ticket(
            request.command.job, request.hosts, _Data(path, [_Part(job, 0, request.hosts)], script=True)
        )

    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        data = ticket.read(_Data)
        new = range(ticket.hosts, ticket.hosts + count)
        free = self._free(data, self.poll(ticket))
        here = new[: len(free)]
        if len(here) < count and self._allocation:
            raise InfeasibleError(
                f"{count} more hosts were asked for, and {len(here)} nodes of job {self._allocation} are free"
            )
        if len(here) < count:
            rest = new[len(here) :]
            data.parts += self._new(data.folder, rest.start, _for(request, len(rest)))
        self._add(data, here, free)
        return self._ticket(ticket.job, new.stop, data)

    def _make_folder(self, request: LaunchRequest) -> str:
        base = self._folder or os.path.join(os.path.dirname(jobs_folder()), "slurm")
        os.makedirs(base, 0o700, exist_ok=True)
        command = request.command
        path = os.path.join(base, f"monarch-{command.job}")
        with PrivateFolder.make(path) as folder:
            folder.claim(_WHAT)
            folder.replace("secret", command.stdin())
            folder.replace("keeper.sh", keeper_script(path, request).encode())
            script = start_script(path, request, self._port, self._interface, self._shared_home)
            folder.replace("start.sh", script.encode())
        return path

    def _asked(self, request: LaunchRequest, array: bool) -> list[str]:
        """Return the options of salloc and sbatch."""
        needs = request.resources
        nodes = 1 if array else request.hosts + self._spares
        asked = [f"--nodes={nodes}", f"--job-name={request.name}", "--no-kill"]
        asked += ["--exclusive"] if self._exclusive else []
        asked += [f"--gpus-per-node={needs.gpus}"] if needs.gpus else []
        asked += [f"--cpus-per-task={needs.cpus}"] if needs.cpus else []
        asked += [f"--mem={math.ceil(needs.memory / 2**20)}M"] if needs.memory else []
        asked += [f"--time={math.ceil(needs.walltime / 60)}"] if needs.walltime else []
        for name, value in needs.options.items():
            option = f"--{name.replace('_', '-')}"
            if value is True:
                asked.append(option)
            elif value is not None and value is not False:
                asked.append(f"{option}={value}")
        return [*asked, *self._arguments]

    def _new(self, path: str, first: int, request: LaunchRequest) -> list[_Part]:
        """Request a new Slurm job for hosts from this number on."""
        array = self._way == "array"
        asked = self._asked(request, array)
        count = request.hosts
        if self._way == "salloc":
            keeper = ["sh", f"{path}/keeper.sh", str(first), str(count), "salloc"]
            job = self._salloc(["salloc", "--no-bell", "--kill-command=TERM", *asked, *keeper], path)
        else:
            asked += [f"--array=0-{count - 1}"] * array
            argv = ["sbatch", "--parsable", *asked, f"--output={path}/job-%j.log", f"{path}/keeper.sh", str(first)]
            job = self._sbatch([*argv, "1" if array else str(count)])
        if array:
            return [_Part(f"{job}_{at}", first + at, 1) for at in range(count)]
        return [_Part(job, first, count)]

    def _salloc(self, argv: list[str], path: str) -> str:
        log = os.path.join(path, f"job-{time.monotonic_ns()}.log")
        with open(log, "xb", opener=_own) as out:
            process = _detached(argv, out)
        job = ""
        try:
            end = time.monotonic() + _SUBMIT_TIME
            while True:
                code = process.poll()
                with open(log, errors="replace") as file:
                    said = file.read()
                found = _ID.search(said)
                if found is not None:
                    break
                if code is not None:
                    raise self._refused(said)
                if time.monotonic() > end:
                    raise SubmissionRefusedError(self.name, f"salloc did not answer within {_SUBMIT_TIME:g} s: {said}")
                time.sleep(_PAUSE)
            job = next(filter(None, found.groups()))
            self._check_possible(job, said)
        except BaseException:
            if job:
                self._cancel([job])
            else:
                process.terminate()  # salloc cancels its request
            raise
        finally:
            # It ends with the allocation, perhaps after this process.
            threading.Thread(target=process.wait, name="slurm-salloc", daemon=True).start()
        return job

    def _sbatch(self, argv: list[str]) -> str:
        try:
            done = programs.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SUBMIT_TIME, env=_environment()
            )
        except FileNotFoundError:
            raise self._refused(f"there is no command {argv[0]}") from None
        except subprocess.TimeoutExpired:
            raise SubmissionRefusedError(self.name, f"sbatch did not answer within {_SUBMIT_TIME:g} s") from None
        found = _ID.search(done.stdout)
        if done.returncode or found is None:
            raise self._refused(done.stderr or done.stdout)
        job = next(filter(None, found.groups()))
        try:
            self._check_possible(job, done.stderr)
        except BaseException:
            self._cancel([job])
            raise
        return job

    def _check_possible(self, job: str, said: str) -> None:
        """Raise for a job that Slurm has accepted into its queue although it can never start."""
        jobs = slurm_queue.queue(self.PATIENCE, fresh=True)
        state = jobs.get(job) or jobs.get(f"{job}_0")
        if state is not None and state.never:
            words = [line for line in said.splitlines() if _INFEASIBLE.search(line)]
            raise self._refused("; ".join([*words, str(state)]), infeasible=True)

    def _refused(self, said: str, infeasible: bool = False) -> LaunchError:
        words = " ".join(said.split()) or "it said nothing"
        has = slurm_queue.partitions(self.PATIENCE)
        offer = f". Its partitions: {has}" if has else ""
        if infeasible or _INFEASIBLE.search(said):
            return InfeasibleError(
                f"Slurm cannot give these hosts: {words}{offer}. Ask for less, or name another partition"
            )
        return SubmissionRefusedError(self.name, words, f"check the options of the request{offer}")

    # -- places that a job has already ----------------------------------------------------------------

    def _free(self, data: _Data, status: JobStatus) -> list[_Place]:
        """Return the nodes of running jobs on which no host runs: first those that had none."""
        jobs = self._jobs(data, fresh=True)
        # Also by job: several jobs may share a node.
        places = [(data.job_of(host.host), host.name) for host in status.hosts]
        used = set(places)
        living = {place for place, host in zip(places, status.hosts) if host.state is not HostPhase.GONE}
        free: list[_Place] = []
        for part in data.parts:
            job = jobs.get(part.id)
            if job is None or job.state != "RUNNING":
                if not part.own:
                    said = str(job) if job is not None else "there is no such job of yours"
                    raise SubmissionRefusedError(self.name, f"no worker can be started in job {part.id}: {said}")
                continue
            nodes = [node for node in job.nodes if (part.id, node) not in living]
            free += [_Place(part.id, job.number, node) for node in nodes]
        return sorted(free, key=lambda place: (place.job, place.node) in used)

    def _add(self, data: _Data, hosts: range, free: list[_Place]) -> None:
        """Start workers on nodes of existing jobs."""
        if len(free) < len(hosts):
            raise InfeasibleError(
                f"{len(hosts)} hosts were asked for, and {len(free)} nodes of job {self._allocation} are free"
            )
        for host, place in zip(hosts, free):
            data.places[str(host)] = place.job
            argv = ["sh", f"{data.folder}/start.sh", place.number, str(host), place.node]
            process = _detached(argv, subprocess.DEVNULL)
            threading.Thread(target=process.wait, name="slurm-srun", daemon=True).start()

    # -- asking where they are ------------------------------------------------------------------------

    def _jobs(self, data: _Data, fresh: bool = False) -> dict[str, QueuedJob]:
        wanted = {part.id for part in data.parts}
        jobs = slurm_queue.queue(self.PATIENCE, fresh)
        if not fresh and not wanted <= jobs.keys():  # the answer may be older than the job
            jobs = slurm_queue.queue(self.PATIENCE, fresh=True)
        return {job: jobs[job] for job in wanted if job in jobs}

    def poll(self, ticket: Ticket) -> JobStatus:
        """See ``Launcher``."""
        data = ticket.read(_Data)
        files = [_host(data.folder, host) for host in range(ticket.hosts)]
        jobs = self._jobs(data)
        how: dict[str, str] = {}
        found: list[HostStatus] = []
        for number, seen in enumerate(files):
            job = jobs.get(data.job_of(number))
            if job is None or not job.lives:
                name = data.job_of(number)
                if name not in how:
                    how[name] = str(job) if job is not None else slurm_queue.ended(name, self.PATIENCE)
                found.append(self._without_job(data, number, seen, how[name] or "its job has ended"))
            else:
                found.append(self._of_job(data, number, seen, job))
        return JobStatus(tuple(found))

    def _of_job(self, data: _Data, number: int, seen: _Host, job: QueuedJob) -> HostStatus:
        if job.waits:
            start = job.start if job.start > time.time() else 0.0
            return HostStatus(host=number, state=HostPhase.QUEUED, reason=str(job), expected_start=start)
        if seen.node and seen.node not in job.nodes and job.state == "RUNNING":
            why = f"Slurm has taken {seen.node} from job {job.id}: {self._node_reason(seen.node)}"
            return HostStatus(host=number, state=HostPhase.GONE, name=seen.node, reason=why)
        said = find_announcement(seen.out)
        if seen.code is not None or (said is not None and said.error):
            return self._without_job(data, number, seen, f"exit {seen.code}")
        if job.state == "COMPLETING":
            return self._without_job(data, number, seen, str(job))
        if said is not None:
            return HostStatus.announced(number, said, name=seen.node, ends_at=said.ends_at or job.end, since=job.start)
        why = "the client script runs" if data.script else "its worker is starting"
        if job.state != "RUNNING":
            why = str(job)
        return HostStatus(
            host=number, state=HostPhase.STARTING, name=seen.node, reason=why, since=job.start, ends_at=job.end
        )

    def _without_job(self, data: _Data, number: int, seen: _Host, how: str) -> HostStatus:
        """Return the status of a host whose step or job has ended."""
        said = find_announcement(seen.out)
        if said is not None and said.error:
            return HostStatus.announced(number, said, name=seen.node, exit_code=seen.code)
        started = said is not None
        words = [line for line in tail(f"{data.folder}/{number}.log", 20).splitlines() if line.strip()]
        own = [line for line in words if not line.startswith(("srun:", "slurmstepd:"))]
        last = (own if own and not started else words)[-1:]
        reason = "its worker has ended" if seen.code == 0 else ": ".join([how, *last])
        failed = not started and seen.code is not None
        return HostStatus(
            host=number, state=HostPhase.GONE, name=seen.node, reason=reason, exit_code=seen.code, failed=failed
        )

    def _node_reason(self, node: str) -> str:
        try:
            said = slurm_queue.run(["sinfo", "-h", "-N", "-n", node, "-o", "%T (%E)"], self.PATIENCE)
        except UnreachableError:
            said = ""
        return (said.strip().splitlines() or ["it does not say why"])[0].replace(" (none)", "")

    def log(self, ticket: Ticket, host: int, lines: int = 100) -> str:
        """See ``Launcher``."""
        data = ticket.read(_Data)
        if data.script:
            return tail(f"{data.folder}/client.log", lines)
        return tail(f"{data.folder}/{host}.log", lines)

    # -- ending ---------------------------------------------------------------------------------------

    def end(self, ticket: Ticket, hosts: Sequence[int] | None = None) -> None:
        """See ``Launcher``. A Slurm job ends with its last host. A job that was attached to stays."""
        data = ticket.read(_Data)
        ending = set(range(ticket.hosts) if hosts is None else hosts)
        status = self.poll(ticket)
        gone = {host.host for host in status.hosts if host.state is HostPhase.GONE} | ending
        whole = [
            part.id
            for part in data.parts
            if part.own and all(n in gone for n in range(ticket.hosts) if data.job_of(n) == part.id)
        ]
        by_step = {number for number in ending if data.job_of(number) not in whole}
        names = {f"{ticket.job}.{number}" for number in by_step if status.hosts[number].state is not HostPhase.GONE}
        limit = time.monotonic() + self.PATIENCE
        while True:
            jobs = self._jobs(data, fresh=True)
            left = [job for job in whole if job in jobs and jobs[job].lives]
            running = slurm_queue.steps(self.PATIENCE) if names else {}
            left_steps = [step for name, step in running.items() if name in names]
            if not left and not left_steps:
                break
            self._cancel([*left, *left_steps])
            if time.monotonic() > limit:
                break  # Slurm has confirmed the request, and a node that does not answer takes longer
            time.sleep(0.1)
        if hosts is None:
            self._wait_for_keepers(data.folder, ticket.hosts)
            _remove_folder(data.folder)

    def _wait_for_keepers(self, folder: str, hosts: int) -> None:
        """Wait until no script writes into the folder any more. A script on a lost machine never reports its end."""
        limit = time.monotonic() + _KEEPER_TIME
        while time.monotonic() < limit:
            files = [_host(folder, number) for number in range(hosts)]
            if all(seen.code is not None or not seen.node for seen in files):
                return
            time.sleep(_PAUSE)

    def _cancel(self, jobs: Sequence[str]) -> None:
        with contextlib.suppress(UnreachableError):  # it ended meanwhile
            slurm_queue.run(["scancel", *jobs], self.PATIENCE)

    # -- reaching -------------------------------------------------------------------------------------

    def route(self, ticket: Ticket, host: HostStatus) -> str:
        """See ``Launcher``."""
        if not self._tunnel:
            return host.url
        try:
            command = ssh_command(["ssh"], host.name, options=("-W", host.url.removeprefix("tcp://")))
        except ValueError as e:  # the announced name is invalid
            raise LaunchError(f"host {host.host} cannot be reached by ssh: {e}") from None
        return self._tunnels.to(host.url, command)

    def close(self) -> None:
        """See ``Launcher``."""
        self._tunnels.close()


def _for(request: LaunchRequest, hosts: int) -> LaunchRequest:
    return LaunchRequest(hosts, request.command, request.resources, request.name, request.names[-hosts:])


def _host(folder: str, number: int) -> _Host:
    code = _read(f"{folder}/{number}.exit").strip()
    node = _read(f"{folder}/{number}.node").decode(errors="replace").strip()
    return _Host(_read(f"{folder}/{number}.out"), int(code) if code else None, node)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _environment() -> dict[str, str]:
    """Return the environment for a new request, without the variables of a job in which this program runs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def _detached(argv: list[str], out: Any) -> subprocess.Popen[bytes]:
    """Start a command that continues when this program ends or is interrupted."""
    try:
        return programs.start(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=_environment()
        )
    except FileNotFoundError:
        raise SubmissionRefusedError(
            "slurm", f"there is no command {argv[0]}", "install Slurm's client commands, or load their module"
        ) from None


def _remove_folder(path: str) -> None:
    try:
        with PrivateFolder.open(path) as folder:
            if folder.take(_WHAT):
                folder.remove(_FILES)
    except FileNotFoundError:
        pass


# ``SlurmJob``: hosts from Slurm, with Monarch's names of its arguments.

_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class SlurmJob(EngineJob):
    """Hosts from Slurm: its nodes, with a worker on each (``docs/slurm.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name. They are one allocation.
        python_exe: the interpreter on the nodes; "": the path of this process's interpreter.
        slurm_args: further arguments for salloc or sbatch, as written on its command line.
        monarch_port: the port at which workers listen; 0: any free port.
        job_name: the name in the queue.
        ntasks_per_node: the number of Slurm tasks; with ``cpus_per_task``, the processors of a node.
        time_limit: the walltime, as Slurm writes it ("4:00:00", "2-00", minutes), or in seconds as a float.
        partition: the partition; by default the cluster's.
        log_dir: a folder for the scripts, the key and the logs, accessible to you only. By default in your home folder.
        exclusive: whether to request whole nodes.
        share_node: the opposite.
        gpus_per_node: devices.
        cpus_per_task: processors.
        mem: memory of a node, such as "64G".
        job_start_timeout: the time that ``state`` waits for hosts (seconds).
        account: the account that is charged.
        qos: the quality of service.
        constraint: features of nodes.
        reservation: take nodes of this reservation.
        gres: generic resources, such as "gpu:a100:4".
        nodelist: nodes that must be used.
        exclude: nodes that must not be used.
        way: "salloc", "sbatch" or "array"; see ``SlurmLauncher``.
        spares: the number of additional nodes, on which lost hosts are replaced at once.
        interface: the network interface at which workers listen, such as "ib0".
        shared_home: whether nodes can access the folder of the job; otherwise munge transfers the key.
        out_of_cluster: whether workers are reached through ``ssh`` to their nodes, because their ports are closed.
        attach_to: the id of a running job in which workers are started; it does not end with this job.
        options: those of ``EngineJob``.
    """

    _in_batch = False
    _script: list[str] | None = None

    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str = "",
        slurm_args: Sequence[str] = (),
        monarch_port: int = 0,
        job_name: str = "monarch",
        ntasks_per_node: int = 1,
        time_limit: str | float | None = None,
        partition: str | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        exclusive: bool = True,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        job_start_timeout: float | None = None,
        account: str | None = None,
        qos: str | None = None,
        out_of_cluster: bool = False,
        attach_to: str | int | None = None,
        share_node: bool = False,
        *,
        constraint: str | None = None,
        reservation: str | None = None,
        gres: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        way: str = "salloc",
        spares: int = 0,
        interface: str = "",
        shared_home: bool = True,
        **options: Any,
    ) -> None:
        wishes = {
            "partition": partition,
            "account": account,
            "qos": qos,
            "constraint": constraint,
            "reservation": reservation,
            "gres": gres,
            "nodelist": nodelist,
            "exclude": exclude,
            "ntasks_per_node": ntasks_per_node if ntasks_per_node > 1 else None,
        }
        resources = Resources(
            gpus=gpus_per_node or 0,
            cpus=cpus_per_task or 0,
            memory=_bytes(mem) if mem else 0,
            walltime=_seconds(time_limit) if time_limit is not None else 0.0,
            options={name: value for name, value in wishes.items() if value},
        )
        # The script of a batch job creates its job like the program that submitted it, and uses its allocation.
        batch = os.environ.get(environment.SLURM_BATCH, "")
        self._in_batch = bool(batch) and batch == os.environ.get("SLURM_JOB_ID") and attach_to is None
        launcher = SlurmLauncher(
            way,
            slurm_args,
            exclusive=exclusive and not share_node,
            spares=spares,
            port=monarch_port,
            interface=interface,
            folder="" if log_dir is None else os.fspath(log_dir),
            shared_home=shared_home,
            tunnel=out_of_cluster,
            allocation=batch if self._in_batch else str(attach_to or ""),
        )
        timeout = TIMEOUT if job_start_timeout is None else job_start_timeout
        options = {"timeout": timeout, "name": job_name, "python": python_exe, **options}
        super().__init__(launcher, meshes, resources=resources, **options)

    @classmethod
    def here(cls, meshes: Mapping[str, int] | None = None, **options: Any) -> SlurmJob:
        """Return the nodes of the allocation that this program runs in (``SLURM_JOB_ID``), of salloc or a batch script.

        Args:
            meshes: as for ``SlurmJob``; by default all nodes are the mesh ``hosts``.
            options: further arguments of ``SlurmJob``.

        Raises:
            LaunchError: this program does not run in an allocation.
        """
        job = os.environ.get("SLURM_JOB_ID", "")
        nodes = slurm_queue.expand(os.environ.get("SLURM_JOB_NODELIST", ""))
        if not job or not nodes:
            raise LaunchError(
                "this program runs in no allocation of Slurm (SLURM_JOB_ID is not set): start it by salloc or sbatch, "
                "or ask for hosts with SlurmJob({'hosts': 2})"
            )
        return cls({"hosts": len(nodes)} if meshes is None else meshes, attach_to=job, **options)

    def add_mesh(self, name: str, num_nodes: int) -> None:
        """Request another mesh, before the job is applied.

        Raises:
            RuntimeError: the job was applied.
            ValueError: the name is not an identifier, or the number is not positive.
        """
        self._check_new("add_mesh")
        self._requested = checked_meshes("SlurmJob", {**self._requested, name: num_nodes})

    def share_node(self, tasks_per_node: int, gpus_per_task: int, partition: str) -> None:
        """Share nodes with other jobs. Call this before the job is applied.

        Args:
            tasks_per_node: the number of Slurm tasks.
            gpus_per_task: devices for each of them.
            partition: the partition.

        Raises:
            RuntimeError: the job was applied.
        """
        self._check_new("share_node")
        assert isinstance(self._launcher, SlurmLauncher)
        self._launcher.share_nodes()
        options = {**self._resources.options, "partition": partition, "ntasks_per_node": tasks_per_node}
        self._resources = msgspec.structs.replace(self._resources, gpus=tasks_per_node * gpus_per_task, options=options)

    def apply(self, client_script: str | None = None) -> None:
        """Request the hosts. Does nothing if the job is active.

        Args:
            client_script: a Python script that runs on the first host once the hosts are available (batch mode). There,
                ``state()`` of an equal job returns all of them; the job ends with the script. ``log()`` returns its
                output.

        Raises:
            LaunchError: Slurm rejects the request.
            FileNotFoundError: the script does not exist.
        """
        if client_script is None:
            super().apply()
            return
        path = os.path.abspath(os.path.expanduser(client_script))
        if not os.path.isfile(path):
            raise FileNotFoundError(f"there is no script {path}, so nothing was submitted")
        if self.active:
            return
        self._script = [self._python or sys.executable, path]
        try:
            self._start()
        finally:
            self._script = None
        self.apply_id = secrets.token_hex(8)

    def _submit(self, request: LaunchRequest) -> Ticket:
        if self._script is None:
            return super()._submit(request)
        assert isinstance(self._launcher, SlurmLauncher)
        return self._launcher.submit_script(request, self._script)

    def state(self, cached_path: Path | None = CACHED_PATH) -> JobState:
        """See ``Job.state``. In the script of batch mode, its file is not used: the hosts are those of the allocation.

        Raises:
            LaunchError: the hosts belong to a script (batch mode).
        """
        ticket = self._record().ticket if self._id else None
        if ticket is not None and ticket.data.get("script"):
            raise LaunchError("the hosts of this job belong to its script: use status() and log()")
        return super().state(None if self._in_batch else cached_path)


def _seconds(limit: str | float) -> float:
    """Parse a walltime: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]. In seconds."""
    if isinstance(limit, float):
        return limit
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(limit).strip())
    if match is None:
        raise ValueError(
            f"{limit!r} is no time limit: write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, as for Slurm"
        )
    days, *numbers = match.groups()
    given = [int(number) for number in numbers if number is not None]
    if days is not None:
        hours, minutes, seconds = (*given, 0, 0)[:3]
        return float(((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds)
    if len(given) == 1:
        return given[0] * 60.0
    seconds = 0
    for number in given:
        seconds = seconds * 60 + number
    return float(seconds)


def _bytes(memory: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", memory.strip().upper())
    if match is None:
        raise ValueError(f"{memory!r} is no amount of memory: write it as for Slurm, such as '64G'")
    return int(match[1]) * _UNITS[match[2]]
