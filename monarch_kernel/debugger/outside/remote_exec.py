"""Prepare running processes for joining, from Python 3.14 on, by `sys.remote_exec` (PEP 768).

Python itself runs a few lines in the process, on its main thread, at the next point where that thread may be
interrupted. No debugger is attached. From outside, only a flag and a path change that Python provides for this purpose.
The lines are those of `import monarch_kernel.join`; afterwards, the process behaves like any joinable rank.

The two processes communicate through files of this user in the private folder of announcements. The process reads the
file with the lines and removes it. It answers with its announcement, or with a file that contains the error. A process
that does not reach such a point reads the file later. Until then the file stays; after the process has ended, the next
scan removes it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from monarch_kernel import programs
from monarch_kernel.debugger.outside.processes import (
    LaunchedRank,
    OutsideError,
    OutsideProcess,
    check_ours,
    permission_remedy,
    python_version,
)
from monarch_kernel.engines.join.announcements import (
    ANSWER,
    SCRIPT,
    RankAnnouncement,
    announcements,
    began_at,
    check_name,
    join_folder,
    pid_space,
)
from monarch_kernel.private_files import PrivateFolder

#: The first version with `sys.remote_exec`. Both processes need it, and the same minor version.
FIRST = (3, 14)
#: The time limit for processes to run the lines (seconds).
COME_BY = 5.0
#: The interval at which this is checked (seconds).
_LOOK = 0.02
#: The time limit for the other Python (seconds): it starts, and writes to the memory of each process.
_CALL = 20.0

_THERE = "monarch-kernel join prepare can do it there"
_PROGRAM = re.compile(r"python(3(\.\d+)?t?)?")
#: The time limit for processes that have just started until their Python has an interpreter with a main thread
#: (seconds).
_START = 5.0
# Runs in the other Python: for each process of its standard input, it prints a line with the error.
_CALLER = f"""
import json, sys, time
end = time.monotonic() + {_START}
for pid, path in json.load(sys.stdin):
    while True:
        try:
            sys.remote_exec(pid, path)
            said = ""
        except Exception as error:
            said = f"{{type(error).__name__}}: {{error}}"
            if "Can't find" in said and time.monotonic() < end:
                time.sleep({_LOOK})
                continue
        break
    print(json.dumps([pid, said]), flush=True)
"""
# Runs in the process. It adds no names to the process's `__main__`. Errors go to the file, not to the program.
_LINES = """
import importlib, os, sys
try:
    os.unlink({script!r})
    importlib.invalidate_caches()
    try:
        from monarch_kernel.engines.join.listener import prepare
    except ImportError as error:
        raise RuntimeError(
            f"{{error}}. Install monarch_kernel into its environment ({{sys.prefix}}), and join again: the process "
            "need not be started again"
        ) from None
    if prepare({name!r}, **{options!r}) is None:
        raise RuntimeError("it is a child of a rank that can be joined, and no rank itself")
except Exception as error:
    text = str(error) if type(error) is RuntimeError else f"{{type(error).__name__}}: {{error}}"
    with open(os.open({answer!r} + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.rename({answer!r} + ".new", {answer!r})
"""


class PreparedRanks(msgspec.Struct, frozen=True):
    """The result of preparing processes. It is sent between hosts as JSON.

    Attributes:
        name: the name of their job.
        prepared: the processes that can now be joined.
        refused: a sentence about each of the others.
    """

    name: str
    prepared: list[int]
    refused: list[str]


def remote_exec_note(processes: Sequence[OutsideProcess], way: str) -> tuple[str, ...]:
    """Return a sentence if these processes can be joined while they run; else nothing.

    Args:
        processes: the processes that were read.
        way: the options that name them, as part of a command line.
    """
    versions = {each.python for each in processes}
    if not versions or min(versions) < FIRST:
        return ()
    which = " and ".join(f"{major}.{minor}" for major, minor in sorted(versions))
    return (
        f"These processes run Python {which}, which lets a debugger in as they run: %mesh join NAME {way} makes them a "
        "mesh, with all tools.",
    )


def prepare_running(
    name: str, chosen: Mapping[int, LaunchedRank], timeout: float = COME_BY, **options: object
) -> PreparedRanks:
    """Make processes of this machine and user joinable while they run. They need Python 3.14 or later.

    A process that does not reach a point in time where Python can be interrupted becomes joinable when it does.

    Args:
        name: the name of their job.
        chosen: their ranks, by pid. If no environment contains a rank, they are numbered in this order.
        timeout: the time limit for processes to reach a point where Python can be interrupted (seconds).
        options: further options of ``monarch_kernel.join.prepare``.

    Raises:
        JoinError: the name is invalid.
        OutsideError: a process does not exist, belongs to another user, or is already prepared under another name.
    """
    check_name(name)
    for pid in chosen:
        check_ours(pid)
    before = {pid: each for pid, each in _announced().items() if pid in chosen}
    if other := sorted({each.name for each in before.values()} - {name}):
        pids = ", ".join(str(pid) for pid, each in before.items() if each.name == other[0])
        raise OutsideError(f"processes {pids} can be joined already, as {other[0]}: %mesh join {other[0]}")
    numbered = not any(place.rank >= 0 for place in chosen.values())
    why: dict[int, str] = {}
    entrances: dict[str, list[_Entrance]] = {}
    with join_folder() as folder:
        for rank, pid in enumerate(chosen):
            if pid in before:
                continue
            entrance = _Entrance(folder, pid)
            more = {"rank": rank, "world": len(chosen)} if numbered else {}
            try:
                program = _interpreter(pid)
                entrance.write(name, {**options, **more})
            except OutsideError as error:
                why[pid] = str(error)
            else:
                entrances.setdefault(program, []).append(entrance)
        for program, wanted in entrances.items():
            why |= _call(program, wanted)
        why |= _come_by([each for wanted in entrances.values() for each in wanted if each.pid not in why], timeout)
    return PreparedRanks(
        name,
        [pid for pid in chosen if pid not in why],
        [f"{_called(pid, chosen[pid])} cannot be joined: {why[pid]}." for pid in chosen if pid in why],
    )


def _called(pid: int, place: LaunchedRank) -> str:
    return f"Rank {place.rank} (process {pid})" if place.rank >= 0 else f"Process {pid}"


def _come_by(entrances: Sequence[_Entrance], timeout: float) -> dict[int, str]:
    """Wait for processes to run the lines. Return why they still cannot be joined, by pid."""
    why: dict[int, str] = {}
    waiting = list(entrances)
    deadline = time.monotonic() + timeout
    while True:
        there = _announced()
        for each in [each for each in waiting if each.pid not in there]:
            if not began_at(each.pid):
                why[each.pid] = "it has ended"
            elif said := each.answer():
                why[each.pid] = said
        waiting = [each for each in waiting if each.pid not in there and each.pid not in why]
        if not waiting or time.monotonic() > deadline:
            break
        time.sleep(_LOOK)
    for each in waiting:
        why[each.pid] = (
            f"its main thread has not come back to Python within {timeout:g} s; as soon as it has, it can be; "
            f"%mesh look --native --pids {each.pid} shows where it is"
        )
    return why


class _Entrance:
    """The lines for one process, and its answer.

    Args:
        folder: the folder of announcements.
        pid: the process.
    """

    def __init__(self, folder: PrivateFolder, pid: int) -> None:
        self.pid = pid
        self._folder = folder
        self._script, self._answer = (f"{pid}-{pid_space()}{kind}" for kind in (SCRIPT, ANSWER))
        self.path = os.path.join(folder.path, self._script)

    def write(self, name: str, options: Mapping[str, object]) -> None:
        """Write the lines.

        Raises:
            OutsideError: the process has another root directory or another `/tmp`.
        """
        self._folder.discard(self._answer)
        answer = os.path.join(self._folder.path, self._answer)
        lines = _LINES.format(script=self.path, answer=answer, name=name, options=dict(options))
        self._folder.replace(self._script, f"exec({lines!r}, {{}})\n".encode())
        try:
            same = os.stat(f"/proc/{self.pid}/ns/pid").st_ino == pid_space()
            same = same and os.path.samefile(f"/proc/{self.pid}/root{self.path}", self.path)
        except OSError:
            same = False
        if not same:
            self.withdraw()
            raise OutsideError(f"it sees other files than this process, as in a container: {_THERE}")

    def answer(self) -> str:
        """The error that the process has reported; "" if none."""
        try:
            said = self._folder.read(self._answer).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        self._folder.discard(self._answer)
        return said

    def withdraw(self) -> None:
        """Remove the lines, of which the process was not notified."""
        self._folder.discard(self._script)


def _announced() -> dict[int, RankAnnouncement]:
    space = pid_space()
    return {each.pid: each for each in announcements() if each.space == space}


def _interpreter(pid: int) -> str:
    """Return the Python that can call `sys.remote_exec` on a process; usually its own program.

    Raises:
        OutsideError: no such Python was found.
    """
    version = python_version(pid)
    if version < FIRST:
        known = f"Python {version[0]}.{version[1]}" if version != (0, 0) else "no Python that is known"
        raise OutsideError(
            f"it runs {known}, and Python lets a debugger into a running process from 3.14 on; %mesh look reads its "
            "stacks, and docs/join.md says how to start it so that it can be joined"
        )
    try:
        program = os.readlink(f"/proc/{pid}/exe")
        if _PROGRAM.fullmatch(os.path.basename(program)) and os.path.samefile(program, f"/proc/{pid}/exe"):
            return program
    except OSError:  # another root directory, or the program was removed
        pass
    if version == sys.version_info[:2]:
        return sys.executable
    raise OutsideError(
        f"its Python {version[0]}.{version[1]} is no program here that could be called (it is part of another program, "
        f"or lies in a container): {_THERE}"
    )


def _call(program: str, wanted: Sequence[_Entrance]) -> dict[int, str]:
    """Let processes run the lines. Return why that was not possible, by pid."""
    said: dict[int, str] = {}
    try:
        done = programs.run(
            [program, "-I", "-S", "-c", _CALLER],
            input=json.dumps([(each.pid, each.path) for each in wanted]),
            capture_output=True,
            text=True,
            timeout=_CALL,
            cwd="/",
        )
        said = dict(map(json.loads, done.stdout.splitlines()))
        rest = done.stderr.strip().rpartition("\n")[2] or f"it ended with code {done.returncode}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        rest = str(error)
    why: dict[int, str] = {}
    for each in wanted:
        text = said.get(each.pid, f"{program} could not call sys.remote_exec: {rest}")
        if text:
            why[each.pid] = _explained(text)
            each.withdraw()
    return why


def _explained(text: str) -> str:
    if text.startswith("PermissionError"):
        return permission_remedy("Python", "write to")
    if "not enabled" in text:
        return f"it was started with -X disable-remote-debug, or PYTHON_DISABLE_REMOTE_DEBUG ({text})"
    return text
