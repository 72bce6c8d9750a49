"""Subcommands of `%mesh` that take a rank's training step home: captures, and their replay in one process."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments, mesh_option, ranks_option, select
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from monarch_kernel.numerics.capture_control import MeshCapture


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
