"""The subcommand of `%mesh` for jobs of engines."""

from __future__ import annotations

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.engines import engine
from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.engines.join.listing import JoinableList
from monarch_kernel.errors import LaunchError, NotOffered
from monarch_kernel.kernel.job_table import AllJobs
from monarch_kernel.kernel.joined_meshes import Machines
from monarch_kernel.kernel.magics.arguments import Arguments
from monarch_kernel.kernel.magics.other_machines import machines_of, other_machines
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.launchers.listing import JobList, ListedJob, job_named, list_jobs

_LINES = 50


class JobMagics(Subcommands):
    """All jobs of this user, on all engines."""

    @magic_arguments("mesh jobs")
    @argument("words", nargs="*", metavar="logs JOB | kill JOB ...", help="what to do; by default, all are listed")
    @argument("--orphans", action="store_true", help="with kill: all whose program has ended")
    @argument("--host", type=int, metavar="N", help="with logs: of this host only")
    @other_machines
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
        listed = list_jobs(self._session.engine_hosts.awaited())
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
        joinable = self._joinable(machines_of(found))
        if joinable is not None and joinable.jobs:
            return AllJobs(listed, joinable)
        if not listed.jobs:
            self.say("No job is in the list; %mesh up --on ENGINE asks for hosts.")
            return None
        return listed

    def _joinable(self, machines: Machines) -> JoinableList | None:
        """The jobs that others have started, and that can be joined; None on an engine that joins none."""
        try:
            joined = engine().joined_jobs()
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
        """End these jobs; one whose engine does not answer keeps none of the others.

        Raises:
            LaunchError: one was not ended.
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
        ours = {place.job.job_id: name for name, place in self._session.engine_hosts.items()}
        mesh = ours.get(job.job)
        place = self._session.engine_hosts.get(mesh or "")
        said = f"job {job.job} of {job.engine} ended"
        if place is not None and place.waiting:
            del self._session.engine_hosts[mesh or ""]
            said = place.end()  # its own launcher knows of starts that go on in this process
        else:
            job.end()
            self._session.engine_hosts.pop(mesh or "", None)
        self.say(said + (f", and mesh {mesh} with it" if mesh else ""))
