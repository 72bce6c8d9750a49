"""The subcommands of `%mesh` for jobs that others have started."""

from __future__ import annotations

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel import joined_meshes
from monarch_kernel.kernel.magics.arguments import Arguments, mesh_argument
from monarch_kernel.kernel.magics.other_machines import machines_of, other_machines
from monarch_kernel.kernel.magics.subcommands import Subcommands


class JoinMagics(Subcommands):
    """Jobs of torchrun, srun, mpirun and their kin, whose ranks were prepared (docs/join.md)."""

    @magic_arguments("mesh join")
    @argument("name", metavar="JOB", help="its name; %%mesh jobs lists those that can be joined")
    @other_machines
    @argument("--drive", action="store_true", help="take control from the viewer that has it, which looks on then")
    @argument(
        "--hold",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="keep what this notebook has stopped for so long if it dies, sleeps or loses its network (default: let it "
        "continue)",
    )
    def join(self, found: Arguments) -> None:
        """Make a running job a mesh of this notebook; its ranks stay its own, and outlive the notebook."""
        where = machines_of(found)
        self.say(joined_meshes.join(self._session, found.name, where, drive=found.drive, hold=found.hold))

    @magic_arguments("mesh leave")
    @mesh_argument()
    def leave(self, found: Arguments) -> None:
        """Let go of a joined job: what this notebook has stopped there continues, and the job goes on."""
        self.say(joined_meshes.leave(self._session, found.name))
