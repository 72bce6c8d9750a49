"""The ranks of a Slurm job: each of its nodes reads its own, in a step of the job beside those that run."""

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
    LaunchedRank,
    OutsideError,
    owner_of,
    python_version,
    rank_place,
)
from monarch_kernel.debugger.outside.reading import NATIVE_TIMEOUT, OutsideProcess, as_json, from_json, read_processes
from monarch_kernel.debugger.outside.remote_exec import PreparedRanks
from monarch_kernel.debugger.outside.selection import topmost
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.slurm import queue as slurm_queue
from monarch_kernel.launchers.slurm.queue import step_beside

T = TypeVar("T")

#: How long a command of Slurm may take, and a node until it has read its processes (seconds).
LIMIT, NODE_LIMIT = 15.0, 60.0
#: The most nodes that are read at the same time.
_AT_ONCE = 32
NO_RANK = "No process of it is a rank: none has RANK, SLURM_PROCID or the like and runs Python."
_JOB = re.compile(r"(\d+(?:_\d+)?)(?:\.(\d+))?")


def read_job(job: str, *, native: bool, apart: float) -> tuple[list[OutsideProcess], list[str]]:
    """Read the ranks of a job of this user on all its nodes, each from a step there (`srun --overlap`).

    Args:
        job: its number, or that of a step: `4711`, `4711.0`.
        native: with native frames.
        apart: the time between the two readings (seconds).

    Returns:
        What was read, and a sentence about each node that could not be read.

    Raises:
        OutsideError: there is no such job of this user, it does not run, or no node could be read.
    """
    words = ["look", "--apart", f"{apart:g}", *(["--native"] if native else [])]
    answers = _ask_nodes(job, words, NODE_LIMIT + apart + (NATIVE_TIMEOUT if native else 0), from_json)
    processes = [each for read, _ in answers.values() for each in read or ()]
    notes = [f"Node {node} could not be read: {why}" for node, (_, why) in answers.items() if why]
    if not processes:
        raise OutsideError(f"nothing was read of Slurm job {job}. {' '.join(notes) or NO_RANK}")
    return processes, notes


def prepare_job(name: str, job: str, python: str = "") -> list[str]:
    """Let viewers join the ranks of a job on all its nodes; see ``remote_exec.prepare_running``.

    Args:
        name: of the job, for those who join.
        job: its number, or that of a step.
        python: the interpreter there; by default the path of this process's own.

    Returns:
        A sentence about each rank or node where that was not possible.

    Raises:
        OutsideError: there is no such job of this user, it does not run, or no rank can be joined.
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
    """Run a command of ``monarch-kernel`` for the ranks of a job on each of its nodes, all at the same time.

    Args:
        words: the command; it is told the job, and that it is for its own node.
        limit: how long a node may take (seconds).
        decode: what it prints; raises ``ValueError`` if it is something else.
        python: the interpreter there.

    Returns:
        By node what was printed, or why there is nothing, as the end of a sentence.

    Raises:
        OutsideError: there is no such job of this user, or it does not run.
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
    """What a command prints that runs on a node, in a step beside those of a job, or why it has not run."""
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
    """What a node answers: the ranks of a job that run on it, read from outside, in one line.

    Raises:
        OutsideError: see ``ranks_here``.
    """
    chosen = ranks_here(job)
    node = os.environ.get("SLURMD_NODENAME", "")
    return as_json(read_processes(chosen, native=native, apart=apart, host=node) if chosen else [])


def ranks_here(job: str) -> dict[int, LaunchedRank]:
    """The ranks of a job that run on this node, and their places, by pid.

    Raises:
        OutsideError: Slurm does not know the job here, or several steps of it have ranks.
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
    places = {pid: rank_place(pid) for pid, of in steps.items() if of != own}
    return ranks_of_job(places, step, {pid for pid in places if python_version(pid) != (0, 0)})


def ranks_of_job(places: Mapping[int, LaunchedRank], step: str, python: set[int]) -> dict[int, LaunchedRank]:
    """Which processes of a job are its ranks: workers of torchrun if there are, else what Slurm's tasks run.

    Args:
        places: of all its processes on a node, by pid.
        step: only those of this step; "" for any.
        python: those that run Python.

    Raises:
        OutsideError: several steps have ranks.
    """
    chosen = {pid: place for pid, place in places.items() if pid in python and place.rank >= 0}
    chosen = {pid: place for pid, place in chosen.items() if not step or place.step == step}
    workers = {pid: place for pid, place in chosen.items() if place.elastic}
    chosen = topmost(workers or chosen)
    steps = {place.step for place in chosen.values()}
    if len(steps) > 1:
        # What a batch script runs by itself has the variables of a task, too, and is no rank beside those of a step.
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
    """The pids and steps that `scontrol listpids` prints."""
    rows = [line.split() for line in said.splitlines()[1:]]
    return [(row[0], row[2]) for row in rows if len(row) >= 3 and row[0].isdecimal()]


def _parsed(job: str) -> tuple[str, str]:
    match = _JOB.fullmatch(job.strip())
    if match is None:
        raise OutsideError(
            f"--slurm takes the number of a job, such as 4711, or of a step, such as 4711.0, not {job!r}"
        )
    return match[1], match[2] or ""
