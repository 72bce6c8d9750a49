"""Record training steps on the ranks of a mesh or a joined job, from a controller.

`start` makes every rank record from the same step on, also while a training loop runs: ranks first report the numbers
of the steps that they finish, then a number ahead of all of them is chosen as the beginning. `MeshRecording` waits for
the ranks, stops them, and collects the files of other hosts. The functions below `# -- on ranks` run in the ranks, on
a thread of the debugger's agent.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.controller.query import Answers, ask
from monarch_kernel.debugger.source_locations import user_frame
from monarch_kernel.introspection import main_names
from monarch_kernel.meshes import format_ranks
from monarch_kernel.private_files import PrivateFolder, written_whole
from monarch_kernel.thread_frames import current_frames

if TYPE_CHECKING:
    from monarch_kernel.numerics.recording import Recording, StepRecorder

#: How long ranks may take to load torch and to begin (seconds).
BEGIN = 60.0
#: How long they may take for each further answer (seconds).
ANSWER = 10.0
#: How often running ranks are asked (seconds).
PERIOD = 0.1
_PART = 1 << 22  # bytes of a file that a rank sends at once
Files = tuple[tuple[str, int, int, int], ...]
"""Files of a rank: name, size, device and inode of each."""
_FILES = re.compile(r"recording\.json|rank_\d{5}\.(?:jsonl|\d+\.safetensors)")


class NumericsError(RuntimeError):
    """Ranks cannot do what a numerics command asks; the message names the rank, the reason and what to do."""


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """What to record; see `recording.record`.

    Attributes:
        model: an expression for the model in the ranks' namespace; "" for the model that is called.
    """

    steps: int = 2
    what: tuple[str, ...] = ("modules", "optimizer")
    model: str = ""
    placements: Mapping[str, Any] = field(default_factory=dict[str, Any])
    full: bool = False
    keep: float = 1.0
    replace: bool = False


@dataclass(frozen=True, slots=True)
class RecordingState:
    """The state of a recording on a rank.

    Attributes:
        running: whether user code runs there, which may be in the middle of a step.
        boundaries: how many steps have ended since it was asked to record.
        tag: the number of the last one, equal on all ranks at the same step; None if it is not known.
        stride: by how much that number grows in a step.
        begun: whether it records.
        steps: how many steps it has recorded.
        reason: why it ended; "" before.
        host, folder: where its files are.
        files: its files.
    """

    running: bool
    boundaries: int
    tag: int | None
    stride: int
    begun: bool
    steps: int
    reason: str
    host: str
    folder: str
    files: Files = ()


def ask_all(
    mesh: Any, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None, timeout: float
) -> dict[int, Any]:
    """Call a function on every rank. Return the answers by rank.

    Raises:
        NumericsError: a rank is dead, raised, or did not answer in time.
    """
    answers = ask(mesh, function, *args, ranks=ranks, timeout=timeout)
    if problem := problem_of(answers):
        raise NumericsError(problem)
    return answers.values


def problem_of(answers: Answers) -> str:
    """Return why ranks did not answer, in a sentence for each reason; "" if all did."""
    reasons: dict[str, list[int]] = {}
    for rank, why in answers.dead.items():
        reasons.setdefault(f"dead: {why}", []).append(rank)
    for rank in answers.errors:
        reasons.setdefault(answers.error_of(rank), []).append(rank)
    for rank in answers.late:
        reasons.setdefault("no answer in time; it may be stopped, or hold the interpreter lock", []).append(rank)
    return "; ".join(f"[{format_ranks(sorted(ranks), limit=6)}] {why}" for why, ranks in reasons.items())


class MeshRecording:
    """A recording on the ranks of a mesh. `start` creates it."""

    def __init__(self, mesh: Any, name: str, ranks: Sequence[int] | None, states: dict[int, RecordingState]) -> None:
        self.mesh = mesh
        self.name = name
        #: Whether no rank ran user code as it began: the next cell is recorded.
        self.waits_for_a_cell = not any(state.running for state in states.values())
        #: What the user should know: ranks that could not agree on a step.
        self.notes: list[str] = []
        self._ranks = ranks

    def states(self) -> Answers:
        """Ask the ranks for their states."""
        return ask(self.mesh, state_here, self.name, ranks=self._ranks, timeout=ANSWER)

    def wait(self, timeout: float) -> bool:
        """Wait until every living rank has recorded its steps (seconds). Return whether that happened."""
        deadline = time.monotonic() + timeout
        while True:
            answers = self.states()
            left = [state for state in answers.values.values() if not state.reason]
            if not left and not answers.late:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(PERIOD)

    def stop(self) -> None:
        """End the recording on every rank that answers."""
        ask(self.mesh, stop_here, self.name, ranks=self._ranks, timeout=ANSWER)

    def collect(self) -> Recording:
        """Fetch the files of other hosts, and open the recording.

        Raises:
            NumericsError: no rank has recorded anything.
        """
        from monarch_kernel.numerics.recording import Recording, folder_of

        answers = self.states()
        folder = folder_of(self.name)
        here: set[str] = set()
        for rank, state in sorted(answers.values.items()):
            new = tuple(each for each in state.files if each[0] not in here)
            fetch(self.mesh, rank, read_here, self.name, new, folder)
            here |= {file for file, *_ in new}
        if not here:
            raise NumericsError(f"no rank has recorded anything: {problem_of(answers) or 'no step has ended'}")
        return Recording.open(folder)


def start(
    mesh: Any, name: str, options: RecordingOptions, *, ranks: Sequence[int] | None = None, timeout: float = BEGIN
) -> MeshRecording:
    """Record on the ranks of a mesh: all from the same step on.

    Args:
        mesh: a mesh of processes, or a joined job.
        name: the name of the recording.
        options: what to record.
        ranks: the ranks of `mesh`; all by default.
        timeout: how long running ranks may take to finish the step that they are in (seconds).

    Raises:
        NumericsError: a rank cannot record; then none does.
        ValueError: the name is invalid.
    """
    from monarch_kernel.numerics.recording import folder_of

    folder_of(name)
    margin = 2
    while True:
        try:
            states = ask_all(mesh, arm_here, name, options, ranks=ranks, timeout=BEGIN)
            recording = MeshRecording(mesh, name, ranks, states)
            running = [rank for rank, state in states.items() if state.running]
            if not running:
                return recording
            begun = _begin_together(recording, running, margin, timeout)
        except BaseException:
            ask(mesh, stop_here, name, ranks=ranks, timeout=ANSWER)
            raise
        if begun:
            return recording
        margin *= 4  # a rank was further than the chosen step before it learned of it
        options = replace(options, replace=True)


def _begin_together(recording: MeshRecording, running: list[int], margin: int, timeout: float) -> bool:
    """Choose a step that no running rank has reached, and begin there. Return whether all ranks agreed."""
    deadline = time.monotonic() + timeout
    needed = 2  # two ends of steps tell by how much the number grows in a step
    while True:
        states = ask_all(recording.mesh, state_here, recording.name, ranks=running, timeout=ANSWER)
        if all(state.boundaries >= needed or state.reason for state in states.values()):
            break
        if not any(state.running for state in states.values()):  # the cell has ended; the next one is recorded
            ask_all(recording.mesh, begin_here, recording.name, None, ranks=running, timeout=ANSWER)
            recording.waits_for_a_cell = True
            return True
        if time.monotonic() > deadline:
            late = format_ranks([rank for rank, state in states.items() if state.boundaries < needed], limit=6)
            raise NumericsError(
                f"[{late}] did not finish {needed} training steps in {timeout:g} s: are they training? "
                "A step ends with optimizer.step(); give longer steps --timeout"
            )
        time.sleep(PERIOD)
    tags = [state.tag for state in states.values()]
    if any(tag is None for tag in tags):
        recording.notes.append(
            "ranks have no common number of steps (no optimizer state, no collectives), so they may begin a step apart"
        )
        target: int | None = None
    else:
        known = [tag for tag in tags if tag is not None]
        target = max(known) + margin * max(1, *(state.stride for state in states.values()))
    answers = ask_all(recording.mesh, begin_here, recording.name, target, ranks=running, timeout=ANSWER)
    return all(answers.values())


def fetch(mesh: Any, rank: int, read: Callable[..., bytes], name: str, files: Files, folder: str) -> None:
    """Fetch files of a rank into a folder here, but for those that it has written there itself.

    Args:
        read: the function that reads a part of a file on the rank, called with `name`, the file and an offset.

    Raises:
        NumericsError: the rank does not answer.
    """
    for file, size, device, inode in files:
        path = os.path.join(folder, file)
        if _is_same(path, device, inode):
            continue
        with PrivateFolder.made(folder), written_whole(path) as out:
            for offset in range(0, max(size, 1), _PART):
                out.write(ask_all(mesh, read, name, file, offset, ranks=[rank], timeout=ANSWER)[rank])


def _is_same(path: str, device: int, inode: int) -> bool:
    try:
        about = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (about.st_dev, about.st_ino) == (device, inode)


# -- on ranks ----------------------------------------------------------------------------------------

_recorders: dict[str, StepRecorder] = {}


def arm_here(name: str, options: RecordingOptions) -> RecordingState:
    """Prepare a recording in this process. It begins with the next step if no user code runs, else by `begin_here`."""
    from torch import nn

    from monarch_kernel.numerics.recording import record

    model: Any = None
    if options.model:
        model = eval(compile(options.model, "<model>", "eval"), main_names())
        if not isinstance(model, nn.Module):
            raise TypeError(f"{options.model} is {type(model).__name__}, not a torch.nn.Module")
    rank, size = rank_in_mesh()
    former = _recorders.pop(name, None)
    if former is not None:
        former.stop()
    running = runs_user_code()
    _recorders[name] = record(
        name,
        model,
        steps=options.steps,
        what=options.what,
        placements=options.placements,
        full=options.full,
        keep=options.keep,
        replace=options.replace,
        rank=rank,
        world_size=size,
        waits=running,
    )
    return state_here(name)


def begin_here(name: str, tag: int | None) -> bool:
    """Begin with the first step after the one of that number; None: with the next. Return False if it is past."""
    return _recorder(name).begin(tag)


def state_here(name: str) -> RecordingState:
    """Return the state of a recording."""
    recorder = _recorder(name)
    files: Files = ()
    if os.path.isdir(recorder.folder):
        files = files_in(
            recorder.folder,
            lambda file: (
                _FILES.fullmatch(file) is not None and (not file.startswith("rank") or int(file[5:10]) == recorder.rank)
            ),
        )
    return RecordingState(
        running=runs_user_code(),
        boundaries=recorder.boundaries,
        tag=recorder.tag,
        stride=recorder.stride,
        begun=recorder.has_begun,
        steps=recorder.steps_done,
        reason=recorder.reason,
        host=socket.gethostname(),
        folder=recorder.folder,
        files=files,
    )


def read_here(name: str, file: str, offset: int) -> bytes:
    """Return a part of a file of a recording."""
    if not _FILES.fullmatch(file):
        raise ValueError(f"{file!r} is no file of a recording")
    return part_of(_recorder(name).folder, file, offset)


def stop_here(name: str) -> None:
    """End a recording, if this process has it."""
    recorder = _recorders.get(name)
    if recorder is not None:
        recorder.stop()


def _recorder(name: str) -> StepRecorder:
    found = _recorders.get(name)
    if found is None:
        raise LookupError(f"this process has no recording {name!r}")
    return found


def rank_in_mesh() -> tuple[int, int]:
    """Return rank and world size of this process: of its job, or else of its mesh."""
    from monarch_kernel.debugger.rank.rank_debugger import rank_of
    from monarch_kernel.numerics.recording import rank_and_size

    rank, size = rank_and_size()
    if size == 1:
        _, rank, extent = rank_of()
        size = extent.nelements
    return rank, size


def files_in(folder: str, belongs: Callable[[str], bool]) -> Files:
    """Return the files of a folder of this user whose names belong to this rank."""
    found: list[tuple[str, int, int, int]] = []
    with PrivateFolder.open(folder) as opened:
        for file in opened.names():
            if belongs(file):
                about = os.stat(file, dir_fd=opened.fd, follow_symlinks=False)
                found.append((file, about.st_size, about.st_dev, about.st_ino))
    return tuple(found)


def part_of(folder: str, file: str, offset: int) -> bytes:
    """Return a part of a file in a folder of this user."""
    with PrivateFolder.open(folder) as opened:
        fd = opened.open_file(file, os.O_RDONLY)
        try:
            return os.pread(fd, _PART, offset)
        finally:
            os.close(fd)


def runs_user_code() -> bool:
    """Return whether a thread of this process runs user code."""
    return any(user_frame(frame) is not None for frame in current_frames().values())
