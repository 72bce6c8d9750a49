"""Capture training steps on the ranks of a mesh or a joined job, from a controller.

`start` arms the ranks and returns a `MeshCapture`, which knows how much they will write, waits for them, and collects
the files of other hosts. The functions below `# -- on ranks` run in the ranks, on a thread of the debugger's agent.
"""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_kernel import programs
from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.meshes import format_ranks
from monarch_kernel.numerics.control import (
    ANSWER,
    BEGIN,
    PERIOD,
    Files,
    NumericsError,
    ask_all,
    fetch,
    files_in,
    part_of,
    problem_of,
    rank_in_mesh,
    runs_user_code,
)

if TYPE_CHECKING:
    from monarch_kernel.numerics.step_capture import Capture

_FILES = re.compile(r"rank_\d{5}\.(?:json|safetensors)")


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What to capture; see `step_capture.capture`."""

    next_step: bool = True
    on_error: bool = False
    on_nan: bool = False
    replace: bool = False


@dataclass(frozen=True, slots=True)
class CaptureState:
    """The state of a capture on a rank.

    Attributes:
        running: whether user code runs there.
        state, reason, size, seconds: as in `Capture`.
        rank: the rank that its files are named after.
        host, folder: where they are.
        files: the files.
    """

    running: bool
    state: str
    reason: str
    size: int
    seconds: float
    rank: int
    host: str
    folder: str
    files: Files = ()


class MeshCapture:
    """A capture on the ranks of a mesh. `start` creates it.

    Attributes:
        mesh: the mesh.
        name: the name of the capture.
        options: what is captured.
        waits_for_a_cell: whether no rank ran user code as it began: a step of the next cell is captured.
    """

    def __init__(
        self,
        mesh: Any,
        name: str,
        options: CaptureOptions,
        ranks: Sequence[int] | None,
        states: dict[int, CaptureState],
    ) -> None:
        self.mesh, self.name, self.options = mesh, name, options
        self.waits_for_a_cell = not any(state.running for state in states.values())
        self._ranks = ranks
        self._first = states

    def announcement(self) -> str:
        """Say what will be written, and where, before it is."""
        from monarch_kernel.numerics.step_capture import megabytes

        sizes = [state.size for state in self._first.values()]
        when = [
            text
            for wanted, text in (
                (self.options.next_step, "the next step"),
                (self.options.on_error, "the step that raises"),
                (self.options.on_nan, "the first step that is not finite"),
            )
            if wanted
        ]
        count = f"{len(sizes)} rank{'s' if len(sizes) > 1 else ''}"
        size = f"about {megabytes(sum(sizes))}" if sum(sizes) else "of unknown size: there is no optimizer yet"
        folder = next(iter(self._first.values())).folder
        return f"Capture {self.name} of {' or '.join(when)} on {count}: {size}, in {folder}."

    def states(self) -> dict[int, CaptureState]:
        """Ask the ranks for their states; those that do not answer are missing."""
        return ask(self.mesh, capture_state_here, self.name, ranks=self._ranks, timeout=ANSWER).values

    def wait(self, timeout: float) -> bool:
        """Wait until every living rank has written it or failed (seconds). Return whether that happened."""
        deadline = time.monotonic() + timeout
        while True:
            answers = ask(self.mesh, capture_state_here, self.name, ranks=self._ranks, timeout=ANSWER)
            open_ones = [state for state in answers.values.values() if state.state in ("waiting", "step begun")]
            if not open_ones and not answers.late:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(PERIOD)

    def stop(self) -> None:
        """End it on every rank that answers; what is written stays."""
        ask(self.mesh, stop_capture_here, self.name, ranks=self._ranks, timeout=ANSWER)

    def collect(self) -> str:
        """Fetch the files of other hosts; return what each rank has written.

        Raises:
            NumericsError: no rank has written anything.
        """
        from monarch_kernel.numerics.step_capture import folder_of, megabytes

        answers = ask(self.mesh, capture_state_here, self.name, ranks=self._ranks, timeout=ANSWER)
        folder = folder_of(self.name)
        lines: list[str] = []
        written = 0
        for rank, state in sorted(answers.values.items()):
            if state.state != "written":
                lines.append(f"[{rank}] {state.state}" + (f": {state.reason}" if state.reason else ""))
                continue
            written += 1
            fetch(self.mesh, rank, read_capture_here, self.name, state.files, folder)
            lines.append(f"[{rank}] {megabytes(state.size)} in {state.seconds:.1f} s: {state.reason}")
        problem = problem_of(answers)
        lines += [problem] if problem else []
        if not written:
            raise NumericsError(f"no rank has captured a step: {'; '.join(lines)}")
        return f"Captured in {folder}:\n" + "\n".join(lines)


def start(
    mesh: Any, name: str, options: CaptureOptions, *, ranks: Sequence[int] | None = None, timeout: float = BEGIN
) -> MeshCapture:
    """Capture a step on the ranks of a mesh. Ranks that run user code begin after the end of their current step.

    Args:
        mesh: a mesh of processes, or a joined job.
        ranks: the ranks of `mesh`; all by default.
        timeout: how long the ranks may take to load torch and to arm (seconds).

    Raises:
        NumericsError: a rank cannot capture; then none does.
    """
    try:
        states = ask_all(mesh, arm_capture_here, name, options, ranks=ranks, timeout=timeout)
    except BaseException:
        ask(mesh, stop_capture_here, name, ranks=ranks, timeout=ANSWER)
        raise
    return MeshCapture(mesh, name, options, ranks, states)


def run_replay(name: str, ranks: Sequence[int] | None, program: Sequence[str], say: Callable[[str], object]) -> int:
    """Replay ranks of a capture by `monarch-kernel replay`, in a process of its own; return its exit code.

    Args:
        ranks: one rank; None for all that were captured.
        program: the script with its arguments; empty for the captured program's.
        say: called with each line of output.
    """
    which = ["--all"] if ranks is None else ["--rank", str(ranks[0])]
    words = [*programs.own_command(), "replay", *which, name, *(["--", *program] if program else [])]
    process = programs.start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.decode(errors="replace").rstrip("\n"))
        return process.wait()
    finally:
        process.kill()  # after an interrupt
        process.wait()


def listed(states: dict[int, CaptureState]) -> str:
    """Say how far the ranks of a capture are, equal ones together."""
    groups: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        reason = f": {state.reason}" if state.reason else ""
        groups.setdefault(f"{state.state}{reason}", []).append(rank)
    return "\n".join(f"[{format_ranks(ranks, limit=6)}] {text}" for text, ranks in groups.items())


# -- on ranks ----------------------------------------------------------------------------------------

_captures: dict[str, Capture] = {}


def arm_capture_here(name: str, options: CaptureOptions) -> CaptureState:
    """Prepare a capture in this process."""
    from monarch_kernel.numerics.step_capture import capture

    rank, size = rank_in_mesh()
    former = _captures.pop(name, None)
    if former is not None:
        former.end()
    _captures[name] = capture(
        name,
        next_step=options.next_step,
        on_error=options.on_error,
        on_nan=options.on_nan,
        replace=options.replace,
        after_step=runs_user_code(),
        rank=rank,
        world_size=size,
    )
    return capture_state_here(name)


def capture_state_here(name: str) -> CaptureState:
    """Return the state of a capture."""
    found = _capture(name)
    files: Files = ()
    if found.state == "written":
        files = files_in(
            found.folder, lambda file: _FILES.fullmatch(file) is not None and int(file[5:10]) == found.rank
        )
    return CaptureState(
        running=runs_user_code(),
        state=found.state,
        reason=found.reason,
        size=found.size,
        seconds=found.seconds,
        rank=found.rank,
        host=socket.gethostname(),
        folder=found.folder,
        files=files,
    )


def read_capture_here(name: str, file: str, offset: int) -> bytes:
    """Return a part of a file of a capture."""
    if not _FILES.fullmatch(file):
        raise ValueError(f"{file!r} is not a file of a capture")
    return part_of(_capture(name).folder, file, offset)


def stop_capture_here(name: str) -> None:
    """End a capture, if this process has it."""
    found = _captures.get(name)
    if found is not None:
        found.end()


def _capture(name: str) -> Capture:
    found = _captures.get(name)
    if found is None:
        raise LookupError(f"this process has no capture {name!r}")
    return found
