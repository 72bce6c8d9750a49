"""Subcommands of `%mesh` for this user's jobs on all providers, and for joining running jobs (docs/join.md)."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel import environment
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.engines import tool_runtime
from monarch_kernel.engines.interface import NotOffered
from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.engines.join.jobs import JoinableList
from monarch_kernel.engines.join.remote_machine import RELAY
from monarch_kernel.kernel import mesh_lifecycle
from monarch_kernel.kernel.magics.arguments import Arguments, Subcommands, mesh_argument
from monarch_kernel.kernel.mesh_lifecycle import Machines
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.listing import JobList, ListedJob, job_named, list_jobs
from monarch_kernel.launchers.relay_commands import relay_commands

_LINES = 50
_MACHINE_OPTIONS = (
    argument("--hosts", default="", metavar="HOST,...", help="also look for ranks on these, by ssh"),
    argument("--ssh", default="ssh", metavar="COMMAND", help="ssh, and further options of it: 'ssh -F config'"),
    argument("--hostfile", default="", metavar="FILE", help="the same for the hosts in a file"),
    argument("--slurm", default="", metavar="JOBID", help="the same for the nodes of a job of Slurm, by srun"),
    argument("--python", default="", metavar="PATH", help="the interpreter there (the path of this kernel's own)"),
    argument(
        "--meet", metavar="HOST:PORT", help=f"and on the machines at this meeting point ({environment.JOIN_MEET.name})"
    ),
)


def _other_machines(function: Callable[..., object]) -> Callable[..., object]:
    """Add the options that name other machines to a subcommand."""
    for option in reversed(_MACHINE_OPTIONS):
        function = option(function)
    return function


def _machines_of(found: Arguments) -> Machines:
    """Return the machines that a line names.

    Raises:
        UsageError: a host file cannot be read, Slurm does not know the job, or an address is invalid.
    """
    meet = environment.JOIN_MEET
    try:
        ssh = shlex.split(found.ssh)
        commands = relay_commands(RELAY, found.hosts, found.hostfile, found.slurm, found.python, ssh)
        return Machines(commands, meet.get() if found.meet is None else meet.parse(found.meet))
    except (ValueError, OSError, LaunchError) as error:
        raise usage_error(found.magic, str(error)) from None


_HEADINGS = ("job", "engine", "meshes", "hosts", "since", "used by", "folder", "program")


@dataclass(frozen=True, repr=False)
class AllJobs(AsTable):
    """One table of all jobs of a user: jobs of providers for notebooks, then jobs that notebooks can join."""

    listed: JobList
    joinable: JoinableList

    def table(self) -> TableView:
        """Return one row per job, with the columns of provider jobs."""
        rows: list[list[str]] = []
        notes: list[str] = []
        for view in (self.listed.table(), self.joinable.table()):
            at = {heading: number for number, heading in enumerate(view.headings)}
            rows += [[row[at[heading]] if heading in at else "" for heading in _HEADINGS] for row in view.rows]
            notes += [view.note] if view.note else []
        return TableView(_HEADINGS, rows, right=(4,), note="\n".join(notes)).without_empty_columns()


class JobMagics(Subcommands):
    """Listing, ending, joining and leaving jobs."""

    @magic_arguments("mesh jobs")
    @argument("words", nargs="*", metavar="logs JOB | kill JOB ...", help="what to do; by default, all are listed")
    @argument("--orphans", action="store_true", help="with kill: all whose program has ended")
    @argument("--host", type=int, metavar="N", help="with logs: of this host only")
    @_other_machines
    @argument("-n", "--lines", type=int, metavar="N", default=_LINES, help=f"with logs: the last N lines ({_LINES})")
    def jobs(self, found: Arguments) -> JobList | AllJobs | None:
        """List the jobs of yours on all engines, print what their workers have written, or end them."""
        verb, names = (found.words[0], found.words[1:]) if found.words else ("", [])
        if verb not in ("", "logs", "kill"):
            raise usage_error(found.magic, f"there is no {verb!r} of jobs; write logs JOB, or kill JOB")
        if found.orphans and verb != "kill":
            raise usage_error(found.magic, "--orphans goes with kill: %mesh jobs kill --orphans")
        if (verb == "logs" and len(names) != 1) or (verb == "kill" and not names and not found.orphans):
            raise usage_error(found.magic, f"say which job: %mesh jobs {verb} JOB; %mesh jobs lists them")
        if found.lines < 1:
            raise usage_error(found.magic, f"-n takes a number of lines of at least 1, not {found.lines}")
        listed = list_jobs(self._session.provider_hosts.awaited())
        try:
            chosen = [job_named(name, listed.jobs) for name in names]
            if verb == "logs":
                self.say(chosen[0].log(found.host, found.lines))
                return None
            if verb == "kill":
                self._end([*chosen, *(job for job in listed.jobs if found.orphans and job.is_left)])
                return None
        except (LaunchError, OSError) as error:
            raise usage_error(found.magic, str(error)) from None
        joinable = self._joinable(_machines_of(found))
        if joinable is not None and joinable.jobs:
            return AllJobs(listed, joinable)
        if not listed.jobs:
            self.say("No job is in the list; %mesh up --on ENGINE asks for hosts.")
            return None
        return listed

    def _joinable(self, machines: Machines) -> JoinableList | None:
        """Return the jobs of other programs that can be joined; None if this engine cannot join jobs."""
        try:
            joined = tool_runtime().joined_jobs()
        except NotOffered:
            return None
        try:
            joined.add_machines(machines.commands, machines.meet)
            return JoinableList(joined.joinable(), [mesh.name for mesh in joined.list_proc_meshes()])
        except JoinError as error:
            raise UsageError(f"%mesh jobs: {error}") from None
        finally:
            joined.let_go_of_machines()

    def _end(self, jobs: list[ListedJob]) -> None:
        """End these jobs. A provider that does not answer does not prevent ending the other jobs.

        Raises:
            LaunchError: a job was not ended.
        """
        if not jobs:
            self.say("There is no job whose program has ended.")
        failed: list[str] = []
        for job in jobs:
            try:
                self._end_one(job)
            except (LaunchError, OSError) as error:
                failed.append(f"job {job.job} of {job.engine} was not ended: {error}")
        if failed:
            raise LaunchError("; ".join(failed))

    def _end_one(self, job: ListedJob) -> None:
        ours = {place.job.job_id: name for name, place in self._session.provider_hosts.items()}
        mesh = ours.get(job.job)
        place = self._session.provider_hosts.get(mesh or "")
        said = f"job {job.job} of {job.engine} ended"
        if place is not None and place.waiting:
            del self._session.provider_hosts[mesh or ""]
            said = place.end()  # its launcher knows of starts in progress in this process
        else:
            job.end()
            self._session.provider_hosts.pop(mesh or "", None)
        self.say(said + (f", and mesh {mesh} with it" if mesh else ""))

    @magic_arguments("mesh join")
    @argument("name", metavar="JOB", help="its name; %%mesh jobs lists those that can be joined")
    @_other_machines
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
        where = _machines_of(found)
        self.say(mesh_lifecycle.join(self._session, found.name, where, drive=found.drive, hold=found.hold))

    def _prepare(self, found: Arguments) -> None:
        """Prepare running processes for viewers, if the line asks for that."""
        if found.prepare and not found.slurm:
            raise usage_error(found.magic, "--prepare goes with --slurm; --pids and --torchrun prepare by themselves")
        if not found.prepare and found.pids is None and found.torchrun is None:
            return
        from monarch_kernel.debugger.outside import slurm
        from monarch_kernel.debugger.outside.outside_report import chosen_here
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
        self.say(mesh_lifecycle.leave(self._session, found.name))
