"""Subcommands of `%mesh` that start, choose, heal and stop meshes."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel import programs
from monarch_kernel.actor import HostMesh
from monarch_kernel.display.quantities import memory
from monarch_kernel.job import EngineJob
from monarch_kernel.kernel import mesh_lifecycle
from monarch_kernel.kernel.cell_run import CellRun, run_again
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay
from monarch_kernel.kernel.magics.arguments import (
    Arguments,
    Subcommands,
    check_name,
    extended_by,
    listed,
    mesh_argument,
    ranks_option,
)
from monarch_kernel.kernel.magics.status_magics import rank_locations
from monarch_kernel.kernel.managed_mesh import ManagedMesh, UpOptions
from monarch_kernel.kernel.mesh_lifecycle import Sync, deaths_of
from monarch_kernel.kernel.progress import shown_line
from monarch_kernel.kernel.session import ProviderHosts
from monarch_kernel.kernel.sync_run import sync_to
from monarch_kernel.kernel.usage_errors import check_drives, replacing, usage_error
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.host_request import (
    LOCAL,
    AskedHosts,
    add_provider_options,
    argument_of,
    ask,
    given_options,
    job_ids,
    memory_size,
    nearest,
    seconds,
)
from monarch_kernel.launchers.listing import id_of
from monarch_kernel.meshes import name_ranks
from workspace_sync.receipt import receipt_line

if TYPE_CHECKING:
    from monarch_kernel.kernel.notebook import Notebook

# `%mesh up --on`: request hosts from a provider, wait for them in the cell or in the background, start the mesh.

_COMMAND = "%mesh up"


@dataclass(frozen=True)
class AskedJob:
    """An existing job, named on the line in place of a request for hosts.

    Attributes:
        job: the entry in the list of jobs.
        procs: None: a job has no number of ranks for its hosts.
    """

    job: EngineJob
    procs: None = None

    @property
    def gpus(self) -> int:
        """Return how many devices were requested for each of its hosts."""
        return self.job.resources.gpus


def up_on_provider(
    notebook: Notebook,
    options: UpOptions,
    asked: AskedHosts | AskedJob,
    sync: Sync,
    say: Callable[[str], object],
    *,
    wait: bool,
    shared: bool,
) -> None:
    """Start a mesh on hosts of a provider.

    Args:
        notebook: the notebook.
        options: the options of the mesh.
        asked: the request for hosts.
        sync: called before its ranks start, if the options ask for a sync.
        say: called with lines for the user.
        wait: whether to wait until the mesh is up; otherwise a line in this cell reports it.
        shared: whether ranks see all devices of their host.

    Raises:
        UsageError: the provider rejects the request, a host does not start, or there are more ranks than devices. The
            hosts are released.
    """
    place = _place(asked, shared, say)
    session = notebook.session
    session.provider_hosts[options.name] = place
    try:
        with _errors(), shown_line(notebook, f"{place.engine}: asking for hosts", say is print) as tell:
            place.ask()
            if wait:
                place.wait(tell)
        if wait:
            say(mesh_lifecycle.up(session, options, sync, place))
            return
    except BaseException:
        session.provider_hosts.pop(options.name, None)
        if not place.ended:
            place.end()
        raise
    line = _LaterLine(notebook, say)
    say(f"mesh {options.name}: job {place.job.job_id} of {place.engine} is asked for; %mesh ls and %mesh jobs show it")
    thread = threading.Thread(
        target=_later, args=(notebook, options, place, sync, line), name="monarch-up", daemon=True
    )
    thread.start()


class _LaterLine:
    """A status line below a cell that did not wait."""

    def __init__(self, notebook: Notebook, say: Callable[[str], object]) -> None:
        self._router = notebook.router
        self._output = notebook.progress_output() if say is print else None

    def tell(self, text: str) -> None:
        """Replace the line."""
        if self._output is not None and self._output.live and self._output.notice(text):
            self._router.touch(self._output)

    def end(self, text: str) -> None:
        """Show the final text."""
        if self._output is None:
            return
        if self._output.live:
            self.tell(text)
        else:
            self._output.show_text("stderr", f"{text}\n")


def _later(notebook: Notebook, options: UpOptions, place: ProviderHosts, sync: Sync, line: _LaterLine) -> None:
    try:
        place.wait(line.tell)
        text = mesh_lifecycle.up(notebook.session, options, sync, place)
    except Exception as error:  # no caller waits for the result, so the cell shows the error
        if notebook.session.provider_hosts.get(options.name) is place:
            del notebook.session.provider_hosts[options.name]
            text = f"mesh {options.name}: {error}"
        else:  # ended by %mesh down
            text = f"mesh {options.name}: cancelled"
        if not place.ended:
            place.end()
    line.end(text)


def _place(asked: AskedHosts | AskedJob, shared: bool, say: Callable[[str], object]) -> ProviderHosts:
    if isinstance(asked, AskedJob):
        return ProviderHosts(asked.job, asked.job.engine, gpus=asked.gpus > 0, shared=shared)
    if asked.profile is not None:
        say(f"profile {asked.profile.name} of {asked.profile.file}: {asked.describe()}")
    with _errors():
        return ProviderHosts(asked.job(), asked.engine, gpus=bool(asked.gpus), shared=shared, has_variables=True)


@contextmanager
def _errors() -> Generator[None]:
    """Convert errors of the provider to errors of the line."""
    try:
        yield
    except (LaunchError, OSError) as error:
        raise usage_error(_COMMAND, str(error)) from None


# Check the arguments of `%mesh up`: name, dimensions, options of processes and providers, environments.

#: More processes than this on one host are rejected as a mistake.
MOST_PROCS = 1024
#: The dimension of `--procs N`.
DEFAULT_DIM = "gpus"
DEFAULT_NAME = "m"
#: The lifetime of a kept mesh without a kernel (hours).
DEFAULT_IDLE = 12


#: Options that require `--on`.
_AMOUNTS = ("hosts", "gpus", "cpus", "memory", "walltime", "python", "key_file", "timeout")


_FLAGS = ("all_devices", "trust", "no_wait")


#: The time limit of an interpreter for importing what a rank needs (seconds).
_TIMEOUT = 60.0


#: What a rank imports before it can report missing packages.
_NEEDED = "monarch_kernel.actor"


def up_arguments(
    command: str, words: Sequence[str], procs: int | None, usual: int | None = None
) -> tuple[str, dict[str, int]]:
    """Parse the name and dimensions of `up [NAME] --procs N | dim=size ...`; without dimensions, `usual` processes."""
    names = [word for word in words if "=" not in word]
    dims = dict(_dimension(command, word) for word in words if "=" in word)
    if len(names) > 1:
        hint = f"; did you mean --procs {names[-1]}?" if names[-1].isdigit() else ""
        raise usage_error(command, f"give one name, not {' and '.join(map(repr, names))}{hint}")
    if names and names[0].isdigit():
        raise usage_error(command, f"{names[0]!r} is no name; for that many processes write --procs {names[0]}")
    name = check_name(command, names[0]) if names else DEFAULT_NAME
    if len(dims) != sum("=" in word for word in words):
        raise usage_error(command, f"a dimension is given twice in {' '.join(words)!r}")
    if procs is not None and dims:
        raise usage_error(command, "give either --procs or dimensions, not both")
    if procs is not None:
        dims = {DEFAULT_DIM: _size(command, "--procs", procs)}
    if not dims and usual is not None:
        dims = {DEFAULT_DIM: usual}
    if not dims:
        raise usage_error(command, f"say how many processes: --procs 4, or dimensions such as {DEFAULT_DIM}=4")
    total = 1
    for size in dims.values():
        total *= size
    if total > MOST_PROCS:
        raise usage_error(command, f"{total} processes are too many for one host; at most {MOST_PROCS} are started")
    return name, dims


def _dimension(command: str, word: str) -> tuple[str, int]:
    label, _, size = word.partition("=")
    if not label.isidentifier():
        raise usage_error(command, f"{label!r} cannot name a dimension; write for example {DEFAULT_DIM}=4")
    try:
        return label, _size(command, label, int(size))
    except ValueError:
        raise usage_error(command, f"{label} must be a whole number of at least 1, not {size!r}") from None


def _size(command: str, what: str, size: int) -> int:
    if size < 1:
        raise usage_error(command, f"{what} must be at least 1, not {size}")
    return size


def idle_argument(command: str, hours: float | None, keep: bool) -> float:
    """Return the seconds of `--idle HOURS`."""
    if hours is not None and not keep:
        raise usage_error(command, "--idle applies to kept meshes only; add --keep")
    if hours is None:
        return DEFAULT_IDLE * 3600
    if not hours > 0:
        raise usage_error(command, f"--idle takes a number of hours above 0, not {hours:g}")
    return hours * 3600


def env_arguments(command: str, items: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return the variables of repeated `--env K=V`, and the environment of `--env NAME`."""
    env: dict[str, str] = {}
    names: list[str] = []
    for item in items:
        key, equals, value = item.partition("=")
        if not equals and item:
            names.append(item)
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            env[key] = value
        else:
            raise usage_error(command, f"--env takes VARIABLE=VALUE, or the name of an environment, not {item!r}")
    if len(names) > 1:
        raise usage_error(command, f"ranks run in one environment, not in {' and '.join(names)}")
    return env, "".join(names)


def provider_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the options of the provider or profile on the line."""
    for at, word in enumerate(words):
        on = word.removeprefix("--on=") if word.startswith("--on=") else ""
        on = words[at + 1] if word == "--on" and at + 1 < len(words) else on
        if on:
            add_provider_options(parser, on)
            return


def check_no_provider(found: Arguments) -> None:
    """Raise UsageError if a line without a provider has options for hosts."""
    given = [name for name in _AMOUNTS if getattr(found, name) is not None]
    given += [name for name in _FLAGS if getattr(found, name)]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise usage_error(found.magic, f"{option} is for hosts of an engine; add --on ENGINE, such as --on ssh")


def asked_hosts(found: Arguments) -> AskedHosts | AskedJob:
    """Return the request of a line with `--on`.

    Raises:
        UsageError: there is no such provider, profile or job, or it does not accept these options.
    """
    if found.keep:
        raise usage_error(
            found.magic, "--keep is for meshes of this host; hosts of an engine stay for their idle time (--idle)"
        )
    if found.idle is not None and not found.idle > 0:
        raise usage_error(found.magic, f"--idle takes a number of hours above 0, not {found.idle:g}")
    variables, _environment = env_arguments(found.magic, found.env)
    given = {name: getattr(found, name) for name in (*_AMOUNTS, "procs")}
    given |= {"env": variables, "idle": None if found.idle is None else found.idle * 3600}
    try:
        if (job := id_of(found.on, job_ids())) is not None:
            said = [name for name in _AMOUNTS if given[name] is not None]
            if said:
                raise usage_error(found.magic, f"job {job} exists, so --{said[0]} cannot be chosen any more")
            return AskedJob(EngineJob.find(job))
        return ask(found.on, given, given_options(found), trust=found.trust, how="--trust")
    except LaunchError as error:
        raise usage_error(found.magic, str(error)) from None


def environment_prefix(command: str, name: str) -> str:
    """Return the folder of an environment.

    Args:
        command: the command, for errors.
        name: the name of a conda environment, or the path of an environment or of a uv project.

    Raises:
        UsageError: there is no such environment; the message lists similar names.
    """
    from workspace_sync.environment.kinds import environment
    from workspace_sync.model.errors import ScanError

    known = dict(_conda_environments())
    path = known.get(name, name)
    if path is name and os.sep not in name and not os.path.isdir(name):
        listed = f"; conda has {', '.join(sorted(known))}" if known else ""
        raise usage_error(
            command, f"there is no environment {name!r}{nearest(name, known)}: give its name, or its path{listed}"
        )
    try:
        found = environment(path)
    except ScanError as error:
        raise usage_error(command, str(error)) from None
    if not os.access(found.python, os.X_OK):
        raise usage_error(command, f"environment {found.prefix} has no Python: install one into it")
    return found.prefix


def check_for_ranks(command: str, prefix: str) -> None:
    """Raise UsageError if ranks cannot run in an environment."""
    python = os.path.join(prefix, "bin", "python")
    try:
        done = programs.run(
            [python, "-c", f"import {_NEEDED}"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            env=_as_ranks(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise usage_error(command, f"{python} cannot be run: {error}") from None
    if done.returncode:
        last = (done.stderr.strip() or f"it ended with code {done.returncode}").splitlines()[-1]
        raise usage_error(
            command, f"ranks cannot run in {prefix}: {last}; install monarch_kernel there ({python} -m pip install ...)"
        )


def _as_ranks() -> dict[str, str]:
    """Return the environment variables of a rank: a checkout of this package is on its import path."""
    root = programs.ROOT
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))}


def _conda_environments() -> Iterator[tuple[str, str]]:
    """Yield the names and folders of environments that conda and compatible tools have made for this user."""
    folders: list[str] = []
    for variable in ("CONDA_ENVS_PATH", "CONDA_ENVS_DIRS"):
        folders += filter(None, os.environ.get(variable, "").split(os.pathsep))
    for variable in ("CONDA_PREFIX", "MAMBA_ROOT_PREFIX", "CONDA_ROOT"):
        if prefix := os.environ.get(variable):
            folders += [os.path.join(prefix, "envs"), os.path.dirname(prefix)]
    for folder in folders:
        if os.path.isdir(folder):
            for entry in sorted(os.scandir(folder), key=lambda each: each.name):
                if os.path.isdir(os.path.join(entry.path, "conda-meta")):
                    yield entry.name, entry.path
    try:
        with open(os.path.expanduser("~/.conda/environments.txt"), encoding="utf-8") as file:
            listed = file.read().splitlines()
    except OSError:
        return
    for path in listed:  # the first environment of each is the base
        if os.path.isdir(os.path.join(path, "conda-meta")):
            yield os.path.basename(path), path


class LifecycleMagics(Subcommands):
    """Starting, choosing, healing and stopping meshes."""

    @magic_arguments("mesh up")
    @argument("words", nargs="*", metavar="NAME | DIM=SIZE", help="a name (default: m), and dimensions: gpus=4")
    @argument("--procs", type=int, metavar="N", help="that many processes in one dimension, gpus; on each host")
    @argument("--on", metavar="ENGINE", help="hosts from this engine, profile or job; see --on ENGINE --help")
    @argument("--hosts", type=int, metavar="N", help="with --on: so many hosts")
    @argument("--gpus", type=int, metavar="N", help="... with so many GPUs each; a rank on each, with its own")
    @argument("--cpus", type=int, metavar="N", help="... with so many processors each")
    @argument("--memory", type=argument_of(memory_size), metavar="SIZE", help="... with so much memory each: 64GB")
    @argument("--walltime", type=argument_of(seconds), metavar="TIME", help="... for so long: 2h, 30m")
    @argument("--python", metavar="PATH", help="... with this interpreter there")
    @argument("--key-file", metavar="FILE", help="... with this key of their workers (default: a new one)")
    @argument("--timeout", type=argument_of(seconds), metavar="TIME", help="... which are waited for so long (10m)")
    @argument("--all-devices", action="store_true", help="... whose ranks see all GPUs of their host, as torchrun's do")
    @argument("--trust", action="store_true", help="... by a profile in a project's file that you trust as it is")
    @argument("--no-wait", action="store_true", help="... which are not waited for; a line appears here")
    @argument(
        "--env", action="append", default=[], metavar="K=V | NAME", help="a variable (repeatable); or an environment"
    )
    @argument("--sync", action="store_true", help="first sync the folders that %%mesh sync would, and run in them")
    @argument("--dist", choices=["gloo", "nccl"], help="join all ranks in a torch.distributed process group")
    @argument("--preload", action="append", default=[], metavar="MODULE", help="import it once, for all ranks")
    @argument("--reuse", action="store_true", help="use the existing mesh of that name if it is like this")
    @argument("--replace", action="store_true", help="stop the mesh of that name first, if there is one")
    @argument("--keep", action="store_true", help="it outlives this kernel; %%mesh attach takes it back")
    @argument(
        "--idle", type=float, metavar="HOURS", help="with --keep, --on: ends after so many hours without a kernel (12)"
    )
    @extended_by(provider_arguments)
    def up(self, found: Arguments) -> None:
        """Start a mesh of processes on this host, or on hosts of an engine, and use it for the following cells."""
        if found.on in (None, LOCAL):
            check_no_provider(found)
            self._up(found, up_arguments(found.magic, found.words, found.procs), "", None)
            return
        asked = asked_hosts(found)
        usual = asked.procs or asked.gpus or 1
        named = up_arguments(found.magic, found.words, found.procs, usual)
        if not found.reuse and not found.replace:
            mesh_lifecycle.check_free(self._session, named[0])
        self._up(found, named, found.on, asked)

    def _up(
        self, found: Arguments, named: tuple[str, dict[str, int]], on: str, asked: AskedHosts | AskedJob | None
    ) -> None:
        name, dims = named
        env, environment = env_arguments(found.magic, found.env)
        preload = tuple(word for item in found.preload for word in item.split(",") if word)
        idle = 0.0 if asked is not None else idle_argument(found.magic, found.idle, found.keep)
        if found.reuse and found.replace:
            raise usage_error(found.magic, "give either --reuse or --replace, not both")
        if environment:
            environment = environment_prefix(found.magic, environment)
            check_for_ranks(found.magic, environment)
        options = UpOptions(name, dims, env, found.dist or "", preload, found.keep, idle, environment, found.sync, on)
        if found.replace and (ended := mesh_lifecycle.make_room(self._session, options)):
            self.say(ended)
        if found.reuse and (reused := mesh_lifecycle.reuse(self._session, options)):
            self.say(reused)
        elif asked is None:
            self.say(mesh_lifecycle.up(self._session, options, self._sync))
        else:
            up_on_provider(
                self._notebook, options, asked, self._sync, self.say, wait=not found.no_wait, shared=found.all_devices
            )

    def _sync(self, hosts: HostMesh) -> str:
        """Sync the workspace of `%mesh sync` to the hosts of a new mesh. Return a line for the user."""
        return receipt_line(sync_to(self._notebook, "%mesh up", hosts, self.say))

    @magic_arguments("mesh use")
    @argument("name", metavar="NAME", help="the mesh")
    def use(self, found: Arguments) -> None:
        """Run the following cells on this mesh."""
        managed = self._session.use(found.name)
        self.say(f"mesh {managed.name}: {managed.describe()}, in use")

    @magic_arguments("mesh down")
    @mesh_argument()
    @argument("--all", action="store_true", help="all meshes of this notebook")
    @argument("--force", action="store_true", help="also where a cell runs, or a mesh attached to another kernel")
    def down(self, found: Arguments) -> None:
        """Stop a mesh and its processes."""
        if found.all and found.name:
            raise usage_error(found.magic, "give either a name or --all, not both")
        if not found.force:
            self._check_idle(found)
        if not found.all:
            self.say(mesh_lifecycle.down(self._session, found.name, found.force))
            return
        names = self._session.names()
        for name in names:
            self.say(mesh_lifecycle.down(self._session, name))
        if not names:
            self.say("No mesh is up.")

    def _check_idle(self, found: Arguments) -> None:
        """Refuse to stop a mesh on which a cell of this notebook runs in the background."""
        name = found.name or self._session.current
        for run in get_relay().background:
            if isinstance(run, CellRun) and run.waiting and run.managed.is_alive:
                mesh = run.managed.name
                if found.all or mesh == name:
                    what = (self._notebook.file_label(run.cell.filename) or "a cell").removeprefix("Cell ")
                    raise usage_error(
                        found.magic,
                        f"{what} runs on {name_ranks(sorted(run.waiting), limit=6)} of mesh {mesh}: "
                        f"%mesh interrupt {mesh} ends it, --force stops the mesh all the same",
                    )

    @magic_arguments("mesh interrupt")
    @mesh_argument()
    @ranks_option()
    def interrupt(self, found: Arguments) -> None:
        """Interrupt the cells and endpoints of a mesh; again within 2 s, and ranks that do not respond are killed."""
        mesh, ranks = self.addressed(found)
        check_drives(mesh, found.magic)
        for run in get_relay().background:
            if isinstance(run, CellRun) and run.managed.procs is mesh:
                run.drop(ranks)  # a queued cell must not begin
        self.say(mesh_lifecycle.interrupt(self._session, mesh, ranks))

    @magic_arguments("mesh kill")
    @mesh_argument()
    @ranks_option("the ranks that are killed, such as 3 or 0-1 (needed)")
    def kill(self, found: Arguments) -> None:
        """Kill ranks at once, whatever they run; %mesh heal replaces them."""
        if found.ranks is None:
            raise usage_error(found.magic, "say which ranks: %mesh kill -r 3; %mesh down stops the whole mesh")
        mesh, ranks = self.addressed(found)
        self.say(mesh_lifecycle.kill(mesh, ranks))

    @magic_arguments("mesh heal")
    @mesh_argument()
    @ranks_option()
    @argument(
        "--replay", action="store_true", help="run earlier cells on the new ranks: those with --setup, or else all"
    )
    def heal(self, found: Arguments) -> None:
        """Replace dead ranks; the others keep their variables."""
        mesh, ranks = self.addressed(found)
        self.say(mesh_lifecycle.heal(self._session, mesh, ranks))
        if found.replay:
            self._replay(self._session.get(mesh.name, found.magic), ranks)

    def _replay(self, managed: ManagedMesh, ranks: Sequence[int]) -> None:
        """Run the cells of predecessors on new ranks, in the same order, after listing them."""
        missed = {rank: managed.missed(rank) for rank in ranks}
        cells = list({id(each): each for some in missed.values() for each in some}.values())
        cells = [each for each in cells if each.cell.setup] or cells
        if not cells:
            self.say("  no cell that this notebook knows of has run on the predecessors of these ranks")
            return
        listed = [self._notebook.file_label(each.cell.filename) or "a cell" for each in cells]
        new = [rank for rank in ranks if missed[rank]]
        self.say(
            f"  on {name_ranks(new, limit=6)} run again: {', '.join(each.removeprefix('Cell ') for each in listed)}"
        )
        for each in cells:
            here = [rank for rank in ranks if each in missed[rank]]
            run_again(self._notebook, managed, here, each.cell)
            managed.note_replayed(each, here)

    @magic_arguments("mesh restart")
    @mesh_argument()
    def restart(self, found: Arguments) -> None:
        """Stop a mesh and start it again with the same options; its variables are lost."""
        self.say(mesh_lifecycle.restart(self._session, found.name, self._sync))

    # -- kept meshes ---------------------------------------------------------------------------

    @magic_arguments("mesh attach")
    @argument("name", metavar="NAME", help="the mesh, or the path of its folder")
    @argument("--force", action="store_true", help="also if it is attached to another kernel, which then loses it")
    def attach(self, found: Arguments) -> None:
        """Attach a mesh that was started with --keep: its variables, its actors, and what runs on it."""
        host = mesh_lifecycle.attach(self._session, found.name, found.force)
        for mesh in host.proc_meshes:
            managed = self._session.managed(mesh.name)
            sizes = managed.describe() if managed is not None else f"{len(mesh)} ranks"
            self.say(
                f"mesh {mesh.name}: {sizes}, attached, in use" if managed else f"mesh {mesh.name}: {sizes}, attached"
            )
            dead = deaths_of(mesh)
            for cause in dict.fromkeys(dead.values()):
                ranks = listed([rank for rank, why in dead.items() if why == cause])
                self.say(f"  died meanwhile: {ranks}, {cause}; {replacing(mesh.name)}")
            places = rank_locations(self._notebook, mesh, actors=False)
            for place in dict.fromkeys(places.values()):
                ranks = listed([rank for rank, where in places.items() if where == place])
                self.say(f"  still running a cell: {ranks}, at {place}")
        if not host.proc_meshes:
            self.say(f"{host.name}: attached; there is no mesh on it")
        if host.missed:
            size = memory(sum(host.missed.values()))
            self.say(f"  {size} of older output are not shown; %mesh logs has what is left of it")

    @magic_arguments("mesh detach")
    @mesh_argument()
    def detach(self, found: Arguments) -> None:
        """Detach a mesh that was started with --keep; it goes on."""
        self.say(mesh_lifecycle.detach(self._session, found.name))
