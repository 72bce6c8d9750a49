"""Subcommands of `%mesh` that compare recorded training runs with each other, with a reference, and over commits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments, mesh_option
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from monarch_kernel.numerics.bisection import Bisection
    from monarch_kernel.numerics.comparison import Comparison
    from monarch_kernel.numerics.recording import Recording


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
    @argument("--timeout", type=float, default=60.0, metavar="S", help="how long running ranks may take (default: 60)")
    @mesh_option("the mesh or joined job to record for --reference (default: the one in use)")
    def compare(self, found: Arguments) -> Comparison:
        """Compare two recorded runs, and name the first wrong tensor: module, step, ranks, line, and what it suggests.

        The runs may be of different ranks and shards: one process and a cluster, tensor parallel and not. With
        --reference, the function builds the model in one process, which runs the recorded step of the job with its
        weights, batch and random generators; without a name, the next step of the job is recorded first.
        """
        from monarch_kernel.numerics.comparison import AlignmentError, compare
        from monarch_kernel.numerics.reference import ReferenceRunError, compare_with_reference

        try:
            if found.reference is None:
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
            return compare_with_reference(self._recorded(found), found.reference)
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
    @argument("--project", metavar="FOLDER", help="the folder of the repository (default: the current one)")
    def bisect(self, found: Arguments) -> Bisection:
        """Find the first commit whose step differs, by running one recorded step at commits between two.

        Each commit is checked out into a worktree of its own, where the function builds the model in one process. All
        of them run the recorded step with the same weights, batch and random generators.
        """
        from monarch_kernel.numerics.bisection import BisectionError, bisect
        from monarch_kernel.numerics.recording import Recording
        from monarch_kernel.numerics.reference import ReferenceRunError

        try:
            recording = Recording.open(found.name)
            folder = os.path.abspath(os.path.expanduser(found.project or os.curdir))
            return bisect(recording, found.model, good=found.good, bad=found.bad, project=folder, say=self.say)
        except (BisectionError, ReferenceRunError, ValueError, FileNotFoundError) as error:
            raise usage_error(found.magic, str(error)) from None
