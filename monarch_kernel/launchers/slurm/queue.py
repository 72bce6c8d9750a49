"""Run Slurm's commands: queries about a user's jobs, whose text output is stable since release 20.11, and steps."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from monarch_kernel import programs
from monarch_kernel.launchers.base import LaunchError

#: How long an answer of squeue is used (seconds). All jobs of this process share it, so many jobs cost no more.
_FRESH = 1.0
#: States of jobs that have no nodes yet, and of jobs that have nodes. A job in any other state has ended.
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_LIVING = {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
#: Reasons for which a job waits until an administrator changes something.
_NEVER = re.compile(
    "PartitionNodeLimit|PartitionTimeLimit|PartitionConfig|BadConstraints|InvalidAccount|InvalidQOS|"
    "AccountNotAllowed|QOSNotAllowed|.*PerJob.*|.*MaxWallDurationPerJobLimit"
)


class UnreachableError(OSError):
    """Slurm did not answer. The message quotes it."""


@dataclass(frozen=True)
class QueuedJob:
    """A job in the output of squeue.

    Attributes:
        id: its id; for an element of an array, the number of the array with that of the element, as in "12_3".
        number: its own number, for srun.
        state: "PENDING", "RUNNING", ...
        reason: why it is in that state; "" if squeue prints none.
        nodes: its nodes, without lost ones.
        start: when it is expected to start, or has started (Unix time); 0: unknown.
        end: when its time limit ends (Unix time); 0: unknown, or never.
    """

    id: str
    number: str
    state: str
    reason: str = ""
    nodes: tuple[str, ...] = ()
    start: float = 0.0
    end: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether it has no nodes yet."""
        return self.state in _WAITING

    @property
    def lives(self) -> bool:
        """Whether it has nodes, or will get them."""
        return self.waits or self.state in _LIVING

    @property
    def never(self) -> bool:
        """Whether it waits for resources that the end of other jobs cannot free."""
        return self.waits and _NEVER.fullmatch(self.reason) is not None

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


@dataclass
class _Answer:
    jobs: dict[str, QueuedJob] = field(default_factory=dict[str, QueuedJob])
    at: float = float("-inf")


_answers: dict[str, _Answer] = {}
_lock = threading.Lock()


def queue(limit: float, fresh: bool = False) -> Mapping[str, QueuedJob]:
    """Return all jobs of this user by their ids, including ended ones, as long as Slurm's controller remembers them.

    Args:
        limit: the time limit (seconds).
        fresh: whether to ignore an answer from a moment ago.

    Raises:
        UnreachableError: Slurm does not answer.
    """
    with _lock:
        answer = _answers.setdefault(os.environ.get("SLURM_CONF", ""), _Answer())
        if fresh or time.monotonic() - answer.at > _FRESH:
            said = run(["squeue", "-h", "-r", "-t", "all", "-u", str(os.getuid()), "-o", "%i|%A|%T|%r|%N|%S|%e"], limit)
            answer.jobs = {job.id: job for job in map(_job, said.splitlines()) if job is not None}
            answer.at = time.monotonic()
        return answer.jobs


def steps(limit: float) -> dict[str, str]:
    """Return the running steps of all jobs of this user: their ids by their names.

    Raises:
        UnreachableError: Slurm does not answer.
    """
    said = run(["squeue", "-h", "-s", "-u", str(os.getuid()), "-o", "%j|%i"], limit)
    return dict(line.strip().split("|", 1) for line in said.splitlines() if "|" in line)


def ended(job: str, limit: float) -> str:
    """Describe how a job ended that squeue no longer shows, if accounting is enabled; "" if unknown."""
    try:
        said = run(["sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode"], limit)
    except (UnreachableError, LaunchError):
        return ""
    state, _, code = (said.strip().splitlines() or [""])[0].partition("|")
    return f"{state} (exit code {code})" if code and code != "0:0" else state


def partitions(limit: float) -> str:
    """Describe the resources of the partitions, in a clause; "" if Slurm does not report them."""
    try:
        said = run(["sinfo", "-h", "-o", "%P|%D|%c|%m|%G|%l"], limit)
    except (UnreachableError, LaunchError):
        return ""
    found: list[str] = []
    for line in said.splitlines():
        name, nodes, cpus, memory, gres, time_limit = (line.strip().split("|") + [""] * 6)[:6]
        has = f"{name.rstrip('*')} {nodes} nodes of {cpus} CPUs, {memory} MB"
        has += f", {gres}" if gres not in ("", "(null)") else ""
        found.append(has + (f", for at most {time_limit}" if time_limit not in ("", "infinite") else ""))
    return "; ".join(found)


def run(argv: Sequence[str], limit: float) -> str:
    """Run a command of Slurm, and return its output.

    Raises:
        LaunchError: the command does not exist.
        UnreachableError: the command fails, or takes too long.
    """
    try:
        done = programs.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
            errors="replace",
            env={**os.environ, "SLURM_TIME_FORMAT": "%Y-%m-%dT%H:%M:%S"},
        )
    except FileNotFoundError as e:
        raise LaunchError(
            f"there is no command {argv[0]}: install Slurm's client commands (slurm-client on Debian), or load their "
            "module, on the machine of this program"
        ) from e
    except subprocess.TimeoutExpired as e:
        raise UnreachableError(f"{argv[0]} did not answer within {limit:g} s: is slurmctld up (scontrol ping)?") from e
    if done.returncode:
        raise UnreachableError(done.stderr.strip() or f"{argv[0]} ended with exit code {done.returncode}")
    return done.stdout


def expand(names: str) -> tuple[str, ...]:
    """Expand Slurm's short form of nodes, such as "n[1-3,07],gpu[01-02]-ib"."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names.strip()):
        pieces = re.findall(r"\[[^\]]*\]|[^\[]+", part)
        choices = [_numbers(piece[1:-1]) if piece.startswith("[") else [piece] for piece in pieces]
        found += ["".join(each) for each in itertools.product(*choices)]
    return tuple(found)


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if dash:
            found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            found.append(part)
    return found


def _job(line: str) -> QueuedJob | None:
    fields = line.strip().split("|")
    if len(fields) != 7:
        return None
    name, number, state, reason, nodes, start, end = fields
    reason = "" if reason in ("None", "(null)", "N/A") else reason
    try:
        return QueuedJob(name, number, state, reason, expand(nodes), _time(start), _time(end))
    except ValueError:
        return None


def _time(text: str) -> float:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return 0.0


def step_beside(job: str, node: str) -> list[str]:
    """Return the prefix of a command line that runs on a node of a Slurm job, in a step beside the running ones.

    The step takes no resources from the others: it shares theirs, and has no devices. Its output is unbuffered, because
    Slurm would otherwise keep it until the end of a line, and frames have no lines.
    """
    # Variables of an allocation that this process is in would be used as options.
    told = [name for name in os.environ if name.startswith(("SLURM_", "SRUN_", "PMI")) and name != "SLURM_CONF"]
    step = ["srun", "--overlap", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--quiet"]
    step += ["--unbuffered", "--mpi=none", "--gres=none", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    return ["env", *(f"--unset={name}" for name in told), *step, f"--chdir={os.sep}"]
