"""Subcommands of `%mesh` for silent errors of training: recordings, their comparison, captures of steps and replay."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments, Subcommands, mesh_option, ranks_option, select
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from monarch_kernel.numerics.bisection import Bisection
    from monarch_kernel.numerics.capture_control import MeshCapture
    from monarch_kernel.numerics.comparison import Comparison
    from monarch_kernel.numerics.control import MeshRecording
    from monarch_kernel.numerics.recording import Recording, StepRecorder


class NumericsMagics(Subcommands):
    """Recordings of training steps."""

    _recording: MeshRecording | StepRecorder | None = None  # of this process: the latest one

    @magic_arguments("mesh record")
    @argument("name", nargs="?", metavar="NAME", help="the name of the recording")
    @argument("--steps", type=int, default=2, metavar="N", help="how many steps (default: 2)")
    @argument(
        "--what",
        default="modules,optimizer",
        metavar="W,W",
        help="modules, optimizer, collectives and ops, with commas (default: modules,optimizer)",
    )
    @argument("--model", default="", metavar="EXPR", help="the model on the ranks (default: the one that is called)")
    @argument("--placements", metavar="NAME", help="a variable with the placements of plain tensors by patterns")
    @argument("--full", action="store_true", help="also keep the tensors themselves")
    @argument("--keep", type=float, default=1.0, metavar="F", help="the fraction of tensors that --full keeps")
    @argument("--replace", action="store_true", help="overwrite an earlier recording of that name")
    @argument(
        "--here", action="store_true", help="record steps of cells of the notebook itself, with tensors on a mesh"
    )
    @argument("--stop", action="store_true", help="end the recording, and show it")
    @argument("--list", action="store_true", help="list the recordings, with their ranks and steps")
    @argument("--timeout", type=float, default=60.0, metavar="S", help="how long to wait for running ranks")
    @ranks_option()
    @mesh_option("the mesh or joined job whose ranks record (default: the one in use)")
    def record(self, found: Arguments) -> Recording | None:
        """Record the next training steps of the ranks: all tensors of modules, gradients and updates, as summaries.

        While a program runs on the ranks, it waits for its steps and returns the recording. Otherwise the next cells
        are recorded; %mesh record then shows how far it is. With --here, the cells of the notebook itself are
        recorded: those of a model whose tensors are on a mesh (mesh.activate(), distribute()).
        """
        from monarch_kernel.numerics.control import NumericsError, RecordingOptions, start

        if found.list:
            self._list()
            return None
        current = NumericsMagics._recording
        if found.name is None:
            return self._report(found, current)
        what = tuple(each for each in found.what.split(",") if each)
        wrong = [each for each in what if each not in ("modules", "optimizer", "collectives", "ops")]
        if wrong or not what:
            raise usage_error(found.magic, f"--what takes modules, optimizer, collectives and ops, not {found.what!r}")
        if found.steps < 1:
            raise usage_error(found.magic, f"--steps takes a number from 1 on, not {found.steps}")
        if not 0 < found.keep <= 1:
            raise usage_error(found.magic, f"--keep takes a fraction above 0 and at most 1, not {found.keep:g}")
        if not found.timeout > 0:
            raise usage_error(found.magic, f"--timeout takes a number of seconds above 0, not {found.timeout:g}")
        if found.here:
            self._record_here(found, what)
            return None
        mesh = self._session.find(found.on, found.magic)
        ranks = select(found.magic, found.ranks, [], mesh.extent, mesh.name) if found.ranks else None
        options = RecordingOptions(
            found.steps, what, found.model, self._placements(found), found.full, found.keep, found.replace
        )
        try:
            recording = start(mesh, found.name, options, ranks=ranks, timeout=found.timeout)
        except (NumericsError, ValueError) as error:
            raise usage_error(found.magic, str(error)) from None
        NumericsMagics._recording = recording
        for note in recording.notes:
            self.say(f"Note: {note}.")
        if recording.waits_for_a_cell:
            steps = "the next step" if found.steps == 1 else f"the next {found.steps} steps"
            self.say(f"The ranks of {mesh.name} record {steps}. Run them, then %mesh record shows the recording.")
            return None
        if not recording.wait(found.timeout):
            self.say("The ranks still record; %mesh record shows how far they are, %mesh record --stop ends it.")
            return None
        return self._shown(found, recording)

    def _record_here(self, found: Arguments, what: tuple[str, ...]) -> None:
        """Record the next steps of this process."""
        from monarch_kernel.numerics.control import MeshRecording
        from monarch_kernel.numerics.recording import record

        if found.on or found.ranks:
            raise usage_error(found.magic, "--here records the notebook's own steps, with all ranks of their mesh")
        try:
            model = None
            if found.model:
                model = eval(compile(found.model, "<model>", "eval"), self._notebook.shell.user_ns)
            placements: Any = self._placements(found)
            former = NumericsMagics._recording
            if former is not None and not isinstance(former, MeshRecording):
                former.stop()
            NumericsMagics._recording = record(
                found.name,
                model,
                steps=found.steps,
                what=what,
                placements=placements,
                full=found.full,
                keep=found.keep,
                replace=found.replace,
            )
        except (NameError, TypeError, ValueError, ImportError, OSError) as error:
            raise usage_error(found.magic, str(error)) from None
        self.say("The next cells of this notebook are recorded; %mesh record then shows the recording.")

    def _list(self) -> None:
        from monarch_kernel.numerics.recording import Recording, recordings

        names = recordings()
        for name in names:
            try:
                each = Recording.open(name)
                facts = (
                    f"{each.description['created']}, {len(each.ranks)} of {each.world_size} ranks, {each.steps} steps"
                )
                self.say(f"{name}: {facts}{''.join(f'; {note}' for note in each.notes)}")
            except ValueError as error:  # one damaged recording does not hide the others
                self.say(f"{name}: {error}")
        if not names:
            self.say("There are no recordings; %mesh record NAME makes one.")

    def _placements(self, found: Arguments) -> Mapping[str, object]:
        if not found.placements:
            return {}
        value = self._notebook.shell.user_ns.get(found.placements)
        if not isinstance(value, Mapping):
            example = '{"*.wq.weight": Shard(0)}'
            raise usage_error(found.magic, f"no variable {found.placements} has placements by name, such as {example}")
        return value

    def _report(self, found: Arguments, current: MeshRecording | StepRecorder | None) -> Recording | None:
        from monarch_kernel.numerics.control import MeshRecording
        from monarch_kernel.numerics.recording import Recording

        if current is None:
            raise usage_error(found.magic, "give a name for the recording: %mesh record before")
        if found.stop:
            current.stop()
        if not isinstance(current, MeshRecording):
            if current.reason:
                return Recording.open(current.folder)
            self.say(f"{current.name}: {current.steps_done} steps recorded so far; %mesh record --stop ends it.")
            return None
        states = current.states().values
        if states and not found.stop and not all(state.reason for state in states.values()):
            done = min(state.steps for state in states.values())
            self.say(f"{current.name}: {done} steps recorded so far; %mesh record --stop ends it.")
            return None
        return self._shown(found, current)

    def _shown(self, found: Arguments, recording: MeshRecording) -> Recording:
        from monarch_kernel.numerics.control import NumericsError

        try:
            return recording.collect()
        except (NumericsError, OSError, ValueError) as error:
            raise usage_error(found.magic, str(error)) from None


class ComparisonMagics(Subcommands):
    """Comparing recordings of training runs."""

    @magic_arguments("mesh compare")
    @argument(
        "names", nargs="*", metavar="NAME", help="two recordings, the right one first; with --reference, the job's"
    )
    @argument(
        "--noise", nargs="+", default=[], metavar="NAME", help="recordings of the first run with perturbed inputs"
    )
    @argument("--reference", metavar="FILE:FUNCTION", help="compare with one process that runs the model it returns")
    @argument("--optimizer", default="", metavar="FILE:FUNCTION", help="makes the reference's optimizer of the model")
    @argument("--timeout", type=float, default=60.0, metavar="S", help="how long running ranks may take (default: 60)")
    @mesh_option("the mesh or joined job to record for --reference (default: the one in use)")
    def compare(self, found: Arguments) -> Comparison:
        """Compare two recorded runs, and name the first wrong tensor: module, step, ranks, line, and what it suggests.

        The runs may be of different ranks and shards: one process and a cluster, tensor parallel and not. With
        --reference, the function builds the model in one process, which runs the recorded step of the job with its
        weights, batch, random generators and optimizer; without a name, the next step of the job is recorded first.
        The optimizer is the job's, with its settings, unless --optimizer names a function that takes the model.
        """
        from monarch_kernel.numerics.comparison import AlignmentError, compare
        from monarch_kernel.numerics.reference import ReferenceRunError, compare_with_reference

        try:
            if found.reference is None:
                if found.optimizer:
                    raise usage_error(found.magic, "--optimizer needs --reference FILE:FUNCTION")
                if len(found.names) != 2:
                    raise usage_error(
                        found.magic, "name two recordings, the right one first, or one and --reference FILE:FUNCTION"
                    )
                return compare(found.names[0], found.names[1], noise=found.noise or None)
            if len(found.names) > 1 or found.noise:
                raise usage_error(
                    found.magic,
                    "--reference takes one recording at most, and measures the noise of the reference itself",
                )
            return compare_with_reference(self._recorded(found), found.reference, found.optimizer)
        except (AlignmentError, ReferenceRunError, ValueError, FileNotFoundError) as error:
            raise usage_error(found.magic, str(error)) from None

    def _recorded(self, found: Arguments) -> Recording:
        """Open the named recording, or record the next step of the job."""
        from monarch_kernel.numerics.control import NumericsError, RecordingOptions, start
        from monarch_kernel.numerics.recording import Recording

        if found.names:
            return Recording.open(found.names[0])
        mesh = self._session.find(found.on, found.magic)
        name = f"{mesh.name}.step"
        try:
            recording = start(mesh, name, RecordingOptions(steps=1, full=True, replace=True), timeout=found.timeout)
            if recording.waits_for_a_cell:
                recording.stop()
                raise usage_error(
                    found.magic,
                    f"nothing runs on {mesh.name}: record a step with %mesh record NAME --full, and name it here",
                )
            if not recording.wait(found.timeout):
                recording.stop()
                raise usage_error(
                    found.magic, f"no step has ended within {found.timeout:g} s: give it longer --timeout"
                )
            return recording.collect()
        except NumericsError as error:
            raise usage_error(found.magic, str(error)) from None

    @magic_arguments("mesh bisect")
    @argument("name", metavar="NAME", help="the recording of the wrong run, with --full")
    @argument("--good", required=True, metavar="REF", help="a commit whose step is right")
    @argument("--bad", default="HEAD", metavar="REF", help="a later commit whose step is wrong (default: HEAD)")
    @argument("--model", required=True, metavar="FILE:FUNCTION", help="the function that builds the model")
    @argument(
        "--optimizer", default="", metavar="FILE:FUNCTION", help="a function that makes its optimizer of the model"
    )
    @argument("--project", metavar="FOLDER", help="the folder of the repository (default: the current one)")
    def bisect(self, found: Arguments) -> Bisection:
        """Find the first commit whose step differs, by running one recorded step at commits between two.

        Each commit is checked out into a worktree of its own, where the function builds the model in one process. All
        of them run the recorded step with the same weights, batch, random generators and state of the optimizer.
        """
        from monarch_kernel.numerics.bisection import BisectionError, bisect
        from monarch_kernel.numerics.recording import Recording
        from monarch_kernel.numerics.reference import ReferenceRunError

        try:
            recording = Recording.open(found.name)
            folder = os.path.abspath(os.path.expanduser(found.project or os.curdir))
            return bisect(
                recording,
                found.model,
                good=found.good,
                bad=found.bad,
                optimizer=found.optimizer,
                project=folder,
                say=self.say,
            )
        except (BisectionError, ReferenceRunError, ValueError, FileNotFoundError) as error:
            raise usage_error(found.magic, str(error)) from None


class CaptureMagics(Subcommands):
    """Captures of training steps and their replay."""

    _capture: MeshCapture | None = None  # of this process: the latest one

    @magic_arguments("mesh capture")
    @argument("name", nargs="?", metavar="NAME", help="the name of the capture; without it: how far the latest one is")
    @argument("--next-step", action="store_true", help="the next step that begins (the default)")
    @argument("--on-error", action="store_true", help="the step in which a forward, the loss or a backward raises")
    @argument("--on-nan", action="store_true", help="the first step whose loss or gradients are not finite")
    @argument("--replace", action="store_true", help="overwrite an earlier capture of that name")
    @argument("--stop", action="store_true", help="end the capture; what is written stays")
    @argument("--timeout", type=float, default=60.0, metavar="S", help="how long to wait for running ranks")
    @ranks_option()
    @mesh_option("the mesh or joined job whose ranks are captured (default: the one in use)")
    def capture(self, found: Arguments) -> None:
        """Write what a rank's training step needs to run again alone: weights, batch, generators, collectives.

        With --on-error and --on-nan the evidence of each running step is kept until the step is over, and written if
        it goes wrong. %mesh replay runs a captured step again.
        """
        from monarch_kernel.numerics.capture_control import CaptureOptions, start
        from monarch_kernel.numerics.control import NumericsError

        current = CaptureMagics._capture
        if found.name is None:
            self._report(found, current)
            return
        if not found.timeout > 0:
            raise usage_error(found.magic, f"--timeout takes a number of seconds above 0, not {found.timeout:g}")
        mesh = self._session.find(found.on, found.magic)
        ranks = select(found.magic, found.ranks, [], mesh.extent, mesh.name) if found.ranks else None
        at_once = found.next_step or not (found.on_error or found.on_nan)
        options = CaptureOptions(at_once, found.on_error, found.on_nan, found.replace)
        try:
            current = start(mesh, found.name, options, ranks=ranks, timeout=found.timeout)
        except (NumericsError, ValueError) as error:
            raise usage_error(found.magic, str(error)) from None
        CaptureMagics._capture = current
        self.say(current.announcement())
        if current.waits_for_a_cell or not at_once:
            self.say("It waits for that step; %mesh capture shows how far it is, %mesh capture --stop ends it.")
        elif current.wait(found.timeout):
            self._collect(found, current)
        else:
            self.say(
                "The ranks have not come to the end of a step yet. %mesh capture shows how far they are, "
                "%mesh capture --stop ends it."
            )

    def _report(self, found: Arguments, current: MeshCapture | None) -> None:
        from monarch_kernel.numerics.capture_control import listed

        if current is None:
            raise usage_error(found.magic, "give a name for the capture: %mesh capture before")
        if found.stop:
            current.stop()
        states = current.states()
        if not found.stop and any(state.state in ("waiting", "step begun") for state in states.values()):
            self.say(f"Capture {current.name}:\n{listed(states)}")
            return
        self._collect(found, current)

    def _collect(self, found: Arguments, current: MeshCapture) -> None:
        from monarch_kernel.numerics.control import NumericsError

        try:
            self.say(current.collect())
        except (NumericsError, OSError) as error:
            raise usage_error(found.magic, str(error)) from None
        self.say(f'Run it again with %mesh replay {current.name} --rank N, or with replay("{current.name}", rank=N): …')

    @magic_arguments("mesh replay")
    @argument("name", metavar="NAME", help="the name of a capture, or its folder")
    @argument("--rank", type=int, metavar="N", help="the rank (default: the only one captured)")
    @argument("--all", action="store_true", help="all captured ranks, one after the other")
    @argument("--script", metavar="'FILE ARGUMENT ...'", help="the script to run (default: the captured program's)")
    def replay(self, found: Arguments) -> None:
        """Run a captured step of a rank again in one process of this machine, and compare it bit by bit.

        The script runs until its first step, which is the captured one. Its process groups have no other processes:
        collectives are answered from the capture. For code of cells, and for breakpoint() and %debug, use
        ``with replay("NAME", rank=N):`` of monarch_kernel.numerics.
        """
        if found.all and found.rank is not None:
            raise usage_error(found.magic, "--rank and --all exclude each other")
        from monarch_kernel.numerics.capture_control import run_replay
        from monarch_kernel.numerics.step_capture import CaptureError
        from monarch_kernel.numerics.step_replay import RankCapture, captured_ranks, find_folder

        try:
            folder = find_folder(found.name)
            captured = RankCapture.open(folder, captured_ranks(folder)[0] if found.all else found.rank)
        except CaptureError as error:
            raise usage_error(found.magic, str(error)) from None
        if not found.script and captured.description["program"].get("script") is None:
            raise usage_error(
                found.magic,
                f"{found.name} was captured from cells, whose code is in the notebook: run it in "
                f'`with replay("{found.name}", rank={captured.rank}):`, from monarch_kernel.numerics import replay',
            )
        ranks = None if found.all else [captured.rank]
        run_replay(str(folder), ranks, shlex.split(found.script or ""), self.say)
