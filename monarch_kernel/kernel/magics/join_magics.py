"""The subcommands of `%mesh` for jobs that others have started."""

from __future__ import annotations

import shlex

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.engines.join.remote_machine import RELAY
from monarch_kernel.errors import LaunchError
from monarch_kernel.kernel import joined_meshes
from monarch_kernel.kernel.magics.arguments import Arguments, mesh_argument
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.launchers.relay_commands import by_srun, by_ssh
from monarch_kernel.launchers.ssh import hostfile


class JoinMagics(Subcommands):
    """Jobs of torchrun, srun, mpirun and their kin, whose ranks were prepared (docs/join.md)."""

    @magic_arguments("mesh join")
    @argument("name", metavar="JOB", help="its name; %%mesh jobs lists those that can be joined")
    @argument("--hosts", default="", metavar="HOST,...", help="also look for its ranks on these, by ssh")
    @argument("--ssh", default="ssh", metavar="COMMAND", help="ssh, and further options of it: 'ssh -F config'")
    @argument("--hostfile", default="", metavar="FILE", help="the same for the hosts in a file")
    @argument("--slurm", default="", metavar="JOBID", help="the same for the nodes of a job of Slurm, by srun")
    @argument("--python", default="", metavar="PATH", help="the interpreter there (the path of this kernel's own)")
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
        hosts = [each for each in found.hosts.split(",") if each]
        try:
            machines = by_ssh(
                RELAY,
                [*hosts, *(hostfile(found.hostfile) if found.hostfile else ())],
                found.python,
                shlex.split(found.ssh),
            )
            if found.slurm:
                machines.update(by_srun(RELAY, found.slurm, found.python))
        except (ValueError, LaunchError) as error:
            raise usage_error(found.magic, str(error)) from None
        self.say(joined_meshes.join(self._session, found.name, machines, drive=found.drive, hold=found.hold))

    @magic_arguments("mesh leave")
    @mesh_argument()
    def leave(self, found: Arguments) -> None:
        """Let go of a joined job: what this notebook has stopped there continues, and the job goes on."""
        self.say(joined_meshes.leave(self._session, found.name))
