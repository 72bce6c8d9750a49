"""Read the ranks of a Slurm job. Each of its nodes reads its own ranks, in a step beside the running ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from monarch_kernel import programs
from monarch_kernel.debugger.outside.processes import (
    NATIVE_TIMEOUT,
    LaunchedRank,
    OutsideError,
    OutsideProcess,
    as_json,
    from_json,
    launched_rank,
    owner_of,
    python_version,
    read_processes,
    topmost,
)
from monarch_kernel.debugger.outside.remote_exec import PreparedRanks
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.slurm import queue as slurm_queue
from monarch_kernel.launchers.slurm.queue import step_beside

T = TypeVar("T")

#: The time limits for a Slurm command, and for a node to read its processes (seconds).
LIMIT, NODE_LIMIT = 15.0, 60.0
#: The maximum number of nodes that are read in parallel.
_AT_ONCE = 32
NO_RANK = "No process of it is a rank: none has RANK, SLURM_PROCID or the like and runs Python."
_JOB = re.compile(r"(\d+(?:_\d+)?)(?:\.(\d+))?")


def read_job(job: str, *, native: bool, apart: float) -> tuple[list[OutsideProcess], list[str]]:
    """Read the ranks of a job of this user on all its nodes, each from a step there (`srun --overlap`).

    Args:
        job: the number of the job or step: `4711`, `4711.0`.
        native: include native frames.
        apart: the time between the two readings (seconds).

    Returns:
        The processes that were read, and a sentence about each node that could not be read.

    Raises:
        OutsideError: this user has no such job, the job is not running, or no node could be read.
    """
    words = ["look", "--apart", f"{apart:g}", *(["--native"] if native else [])]
    answers = _ask_nodes(job, words, NODE_LIMIT + apart + (NATIVE_TIMEOUT if native else 0), from_json)
    processes = [each for read, _ in answers.values() for each in read or ()]
    notes = [f"Node {node} could not be read: {why}" for node, (_, why) in answers.items() if why]
    if not processes:
        raise OutsideError(f"nothing was read of Slurm job {job}. {' '.join(notes) or NO_RANK}")
    return processes, notes


def prepare_job(name: str, job: str, python: str = "") -> list[str]:
    """Make the ranks of a job joinable on all its nodes; see ``remote_exec.prepare_running``.

    Args:
        name: the name under which viewers join the job.
        job: the number of the job or step.
        python: the interpreter on the nodes; by default the path of this process's interpreter.

    Returns:
        A sentence about each rank or node where that was not possible.

    Raises:
        OutsideError: this user has no such job, the job is not running, or no rank can be joined.
    """
    answers = _ask_nodes(job, ["join", "prepare", name, "--json"], NODE_LIMIT, _prepared, python)
    notes = [f"Node {node}: {why}" for node, (_, why) in answers.items() if why]
    done = [each for each, _ in answers.values() if each is not None]
    notes += [why for each in done for why in each.refused]
    if not any(each.prepared for each in done):
        raise OutsideError(f"no rank of Slurm job {job} can be joined. {' '.join(notes) or NO_RANK}")
    return notes


def _prepared(line: bytes) -> PreparedRanks:
    return msgspec.json.decode(line, type=PreparedRanks)


def _ask_nodes(
    job: str, words: Sequence[str], limit: float, decode: Callable[[bytes], T], python: str = ""
) -> dict[str, tuple[T | None, str]]:
    """Run a command of ``monarch-kernel`` for the ranks of a job on each of its nodes, in parallel.

    Args:
        words: the command; options for the job and for reading this node are added.
        limit: the time limit for a node (seconds).
        decode: decodes the output; raises ``ValueError`` if it is invalid.
        python: the interpreter on the nodes.

    Returns:
        By node, the decoded output, or why there is none, as the end of a sentence.

    Raises:
        OutsideError: this user has no such job, or the job is not running.
    """
    number, step = _parsed(job)
    try:
        known = slurm_queue.queue(LIMIT, fresh=True)
    except OSError as error:
        raise OutsideError(f"Slurm does not answer: {error}") from None
    except LaunchError as error:
        raise OutsideError(str(error)) from None
    found = known.get(number)
    if found is None or not found.lives:
        raise OutsideError(f"you have no Slurm job {number} that runs; squeue --me lists those that do")
    if found.waits or not found.nodes:
        raise OutsideError(f"Slurm job {number} has no nodes yet: {found}")
    line = [python or sys.executable, "-m", "monarch_kernel", *words]
    line += ["--slurm", f"{found.number}{f'.{step}' if step else ''}", "--this-node"]

    def of_node(node: str) -> tuple[T | None, str]:
        said, why = _run_on(node, found.number, line, limit)
        if why:
            return None, why
        try:
            return decode(said), ""
        except ValueError:
            return None, f"its answer is something else: {said[:80]!r}."

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="monarch-look") as pool:
        return dict(zip(found.nodes, pool.map(of_node, found.nodes), strict=True))


def _run_on(node: str, number: str, line: Sequence[str], limit: float) -> tuple[bytes, str]:
    """Run a command on a node, in a step beside those of a job. Return its output, or why it has not run."""
    command = [*step_beside(number, node), *line]
    try:
        done = programs.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=limit)
    except subprocess.TimeoutExpired:
        return b"", f"it did not answer within {limit:g} s."
    except OSError as error:
        return b"", f"srun could not be started: {error}."
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()
        return b"", f"{said.splitlines()[-1] if said else f'srun ended with code {done.returncode}'}."
    return done.stdout, ""


def read_this_node(job: str, *, native: bool, apart: float) -> bytes:
    """Read the ranks of a job that run on this node from outside. Return them in one line.

    Raises:
        OutsideError: see ``ranks_here``.
    """
    chosen = ranks_here(job)
    node = os.environ.get("SLURMD_NODENAME", "")
    return as_json(read_processes(chosen, native=native, apart=apart, host=node) if chosen else [])


def ranks_here(job: str) -> dict[int, LaunchedRank]:
    """Return the ranks of a job that run on this node, by pid.

    Raises:
        OutsideError: Slurm does not know the job on this node, or several steps of it have ranks.
    """
    number, step = _parsed(job)
    node = os.environ.get("SLURMD_NODENAME", "")
    try:
        said = slurm_queue.run(["scontrol", "listpids", number, *([node] if node else [])], LIMIT)
    except OSError as error:
        raise OutsideError(f"Slurm does not answer: {error}") from None
    except LaunchError as error:
        raise OutsideError(str(error)) from None
    steps = {int(pid): of for pid, of in _listed(said) if int(pid) > 0 and owner_of(int(pid)) == os.getuid()}
    own = os.environ.get("SLURM_STEP_ID", "")
    places = {pid: launched_rank(pid) for pid, of in steps.items() if of != own}
    return ranks_of_job(places, step, {pid for pid in places if python_version(pid) != (0, 0)})


def ranks_of_job(places: Mapping[int, LaunchedRank], step: str, python: set[int]) -> dict[int, LaunchedRank]:
    """Find the ranks of a job: workers of torchrun if there are any, otherwise the processes of Slurm's tasks.

    Args:
        places: the ranks of all its processes on a node, by pid.
        step: only processes of this step; "" for any.
        python: the processes that run Python.

    Raises:
        OutsideError: several steps have ranks.
    """
    chosen = {pid: place for pid, place in places.items() if pid in python and place.rank >= 0}
    chosen = {pid: place for pid, place in chosen.items() if not step or place.step == step}
    workers = {pid: place for pid, place in chosen.items() if place.elastic}
    chosen = topmost(workers or chosen)
    steps = {place.step for place in chosen.values()}
    if len(steps) > 1:
        # Processes that a batch script starts itself also have the variables of a task. Beside those of a step, they
        # are no ranks.
        chosen = {pid: place for pid, place in chosen.items() if place.step.isdecimal() and int(place.step) < _SPECIAL}
        steps = {place.step for place in chosen.values()}
    if len(steps) > 1:
        raise OutsideError(
            f"several steps have ranks here ({', '.join(sorted(steps))}); give one, as in --slurm JOB.STEP"
        )
    return chosen


#: Steps from this number on are Slurm's own: the batch script, the external one.
_SPECIAL = 0xFFFFFFF0


def _listed(said: str) -> list[tuple[str, str]]:
    """Parse the pids and steps in the output of `scontrol listpids`."""
    rows = [line.split() for line in said.splitlines()[1:]]
    return [(row[0], row[2]) for row in rows if len(row) >= 3 and row[0].isdecimal()]


def _parsed(job: str) -> tuple[str, str]:
    match = _JOB.fullmatch(job.strip())
    if match is None:
        raise OutsideError(
            f"--slurm takes the number of a job, such as 4711, or of a step, such as 4711.0, not {job!r}"
        )
    return match[1], match[2] or ""
