"""The subcommands of `%mesh` for jobs that others have started."""

from __future__ import annotations

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.kernel import joined_meshes
from monarch_kernel.kernel.magics.arguments import Arguments, mesh_argument
from monarch_kernel.kernel.magics.other_machines import machines_of, other_machines
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error


class JoinMagics(Subcommands):
    """Jobs of torchrun, srun, mpirun and their kin, whose ranks were prepared (docs/join.md)."""

    @magic_arguments("mesh join")
    @argument("name", metavar="JOB", help="its name; %%mesh jobs lists those that can be joined")
    @other_machines
    @argument("--pids", metavar="123,456", help="first prepare these processes of this machine (Python 3.14 or later)")
    @argument(
        "--torchrun",
        nargs="?",
        type=int,
        const=0,
        metavar="PID",
        help="the same with the workers of torchrun (its only job here)",
    )
    @argument("--prepare", action="store_true", help="with --slurm: the same with the ranks of that job")
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
        self._prepare(found)
        where = machines_of(found)
        self.say(joined_meshes.join(self._session, found.name, where, drive=found.drive, hold=found.hold))

    def _prepare(self, found: Arguments) -> None:
        """Let viewers into processes that nobody has prepared, if the line says so."""
        if found.prepare and not found.slurm:
            raise usage_error(found.magic, "--prepare goes with --slurm; --pids and --torchrun prepare by themselves")
        if not found.prepare and found.pids is None and found.torchrun is None:
            return
        from monarch_kernel.debugger.outside import slurm
        from monarch_kernel.debugger.outside.look import chosen_here
        from monarch_kernel.debugger.outside.processes import OutsideError
        from monarch_kernel.debugger.outside.remote_exec import prepare_running

        try:
            if found.prepare:
                refused = slurm.prepare_job(found.name, found.slurm, found.python)
            else:
                done = prepare_running(found.name, chosen_here(found.pids, found.torchrun))
                refused = done.refused
                if not done.prepared:
                    raise OutsideError(" ".join(refused))
        except (OutsideError, JoinError, OSError) as error:
            raise usage_error(found.magic, str(error)) from None
        for sentence in refused:
            self.say(sentence)

    @magic_arguments("mesh leave")
    @mesh_argument()
    def leave(self, found: Arguments) -> None:
        """Let go of a joined job: what this notebook has stopped there continues, and the job goes on."""
        self.say(joined_meshes.leave(self._session, found.name))
