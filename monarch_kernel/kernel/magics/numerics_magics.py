"""Subcommands of `%mesh` that find silent errors of training runs: recordings and their comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments, mesh_option, ranks_option, select
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from monarch_kernel.numerics.control import MeshRecording
    from monarch_kernel.numerics.recording import Recording


class NumericsMagics(Subcommands):
    """Recordings of training steps."""

    _recording: MeshRecording | None = None  # of this process: the latest one

    @magic_arguments("mesh record")
    @argument("name", nargs="?", metavar="NAME", help="the name of the recording")
    @argument("--steps", type=int, default=2, metavar="N", help="how many steps (default: 2)")
    @argument(
        "--what",
        default="modules,optimizer",
        metavar="W,W",
        help="modules, optimizer and collectives, with commas (default: modules,optimizer)",
    )
    @argument("--model", default="", metavar="EXPR", help="the model on the ranks (default: the one that is called)")
    @argument("--placements", metavar="NAME", help="a variable with the placements of plain tensors by patterns")
    @argument("--full", action="store_true", help="also keep the tensors themselves")
    @argument("--keep", type=float, default=1.0, metavar="F", help="the fraction of tensors that --full keeps")
    @argument("--replace", action="store_true", help="overwrite an earlier recording of that name")
    @argument("--stop", action="store_true", help="end the recording, and show it")
    @argument("--timeout", type=float, default=60.0, metavar="S", help="how long to wait for running ranks")
    @ranks_option()
    @mesh_option("the mesh or joined job whose ranks record (default: the one in use)")
    def record(self, found: Arguments) -> Recording | None:
        """Record the next training steps of the ranks: all tensors of modules, gradients and updates, as summaries.

        While a program runs on the ranks, it waits for its steps and returns the recording. Otherwise the next cells
        are recorded; %mesh record then shows how far it is.
        """
        from monarch_kernel.numerics.control import NumericsError, RecordingOptions, start

        current = NumericsMagics._recording
        if found.name is None:
            return self._report(found, current)
        what = tuple(each for each in found.what.split(",") if each)
        wrong = [each for each in what if each not in ("modules", "optimizer", "collectives")]
        if wrong or not what:
            raise usage_error(found.magic, f"--what takes modules, optimizer and collectives, not {found.what!r}")
        if found.steps < 1:
            raise usage_error(found.magic, f"--steps takes a number from 1 on, not {found.steps}")
        if not 0 < found.keep <= 1:
            raise usage_error(found.magic, f"--keep takes a fraction above 0 and at most 1, not {found.keep:g}")
        if not found.timeout > 0:
            raise usage_error(found.magic, f"--timeout takes a number of seconds above 0, not {found.timeout:g}")
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

    def _placements(self, found: Arguments) -> Mapping[str, object]:
        if not found.placements:
            return {}
        value = self._notebook.shell.user_ns.get(found.placements)
        if not isinstance(value, Mapping):
            example = '{"*.wq.weight": Shard(0)}'
            raise usage_error(found.magic, f"no variable {found.placements} has placements by name, such as {example}")
        return value

    def _report(self, found: Arguments, current: MeshRecording | None) -> Recording | None:
        if current is None:
            raise usage_error(found.magic, "give a name for the recording: %mesh record before")
        if found.stop:
            current.stop()
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
