"""Implements `%mesh up`, `down`, `restart`, `heal` and `interrupt`. Each function returns the text to print."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from monarch_kernel.actor import Healed, HealError, HostMesh, MeshFailure, ProcMesh, SupervisionError
from monarch_kernel.debugger import get_debugger
from monarch_kernel.display.quantities import duration
from monarch_kernel.engines import tool_runtime
from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.introspection import awaited_here
from monarch_kernel.kernel.interrupts.interrupt_relay import ANSWER_GRACE, SILENT, Interruption
from monarch_kernel.kernel.managed_mesh import UP_TIMEOUT, ManagedMesh, UpOptions, parts, recall, remember
from monarch_kernel.kernel.session import MeshSession, ProviderHosts
from monarch_kernel.kernel.usage_errors import replacing
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.meshes import KeptError, KeptHost, KeptInfo, format_ranks, held, kept_host_of, name_ranks
from monarch_kernel.protocol.refs import DeathKind
from monarch_kernel.subscriptions import Subscription

if TYPE_CHECKING:
    from monarch_kernel.engines.join.controller import JoinController


# List kept meshes, which outlive kernels; attach to one, and detach from it.


def kept_by_others() -> list[KeptInfo]:
    """Return the kept meshes of this user that are not attached to this notebook.

    Raises:
        KeptError: their folder belongs to another user.
    """
    here = {host.name for host in held()}
    return [info for info in tool_runtime().kept() if info.name not in here]


def is_kept(name: str, command: str) -> bool:
    """Return whether this is a kept mesh of this user."""
    try:
        return any(info.name == name for info in tool_runtime().kept())
    except KeptError as error:
        raise UsageError(f"{command}: there is no mesh {name!r} here, and {error}") from None


def attach(session: MeshSession, name: str, force: bool = False) -> KeptHost:
    """Attach to a kept mesh, and make it the mesh in use."""
    label = os.path.basename(os.path.abspath(name)) if os.sep in name else name
    if label in session.proc_meshes():
        raise UsageError(f"%mesh attach: there is a mesh {label!r} here already; stop or detach it first")
    try:
        host = tool_runtime().attach(name, force)
    except (KeptError, ValueError) as error:
        raise UsageError(f"%mesh attach: {error}{_force_hint(error, force)}") from None
    for procs in host.proc_meshes:
        managed = recall(procs)
        if managed is not None:
            session.adopt(managed)
        session.choose(procs.name)
    return host


def detach(session: MeshSession, name: str | None) -> str:
    """Detach from a kept mesh, which keeps running.

    Returns:
        One line for the user.
    """
    procs = session.find(name, "%mesh detach")
    host = kept_host_of(procs)
    if host is None:
        raise UsageError(
            f"%mesh detach: mesh {procs.name} ends with this kernel; only a mesh that was started with "
            "%mesh up --keep can be detached"
        )
    names = [mesh.name for mesh in host.proc_meshes]
    host.detach()
    for each in names:
        session.let_go(each)
    limit = f" within {_hours(host.idle)}" if host.idle else ""
    return f"mesh {host.name}: detached; %mesh attach {host.name} takes it back{limit}"


def end_elsewhere(name: str, force: bool) -> str:
    """Stop a kept mesh that is not attached to this notebook.

    Returns:
        One line for the user.
    """
    try:
        info = tool_runtime().end_kept(name, force)
    except KeptError as error:
        raise UsageError(f"%mesh down: {error}; --force stops it anyway") from None
    count = sum(mesh.alive for mesh in info.meshes)
    return f"mesh {name}: {count} rank{'s' * (count != 1)} stopped; it was not attached to this notebook"


def _force_hint(error: Exception, forced: bool) -> str:
    return " (--force)" if isinstance(error, KeptError) and error.held and not forced else ""


def _hours(idle: float) -> str:
    return f"{idle / 3600:g} h" if idle >= 3600 else duration(idle)


# Join a job that another program started as a mesh of the notebook, and leave it.

_told: Subscription | None = None


@dataclass(frozen=True)
class Machines:
    """Additional machines to search for joinable jobs; see ``JoinController.add_machines``."""

    commands: Mapping[str, Sequence[str]]
    meet: str


def join(
    session: MeshSession,
    name: str,
    machines: Machines,
    *,
    drive: bool = False,
    hold: float = 0.0,
) -> str:
    """Join a job, and make it the mesh in use.

    Args:
        machines: additional machines to search for its ranks.
        drive, hold: see ``JoinController.join``. With ``drive``, a job that is already joined is only taken over.

    Returns:
        One line for the user.
    """
    if name in session.proc_meshes() and not tool_runtime().is_joined(session.proc_meshes()[name]):
        raise UsageError(f"%mesh join: there is a mesh {name!r} here already; stop it first (%mesh down {name})")
    began = time.monotonic()
    jobs = tool_runtime().joined_jobs()
    if not jobs.notices:
        jobs.notices.subscribe(_say)
    _tell_of_reformed(session, jobs)
    try:
        if drive and name in session.proc_meshes():
            procs = session.proc_meshes()[name]
            jobs.drive(procs)
            _take_stops(procs)
            return f"job {name}: this notebook has control of it now"
        jobs.add_machines(machines.commands, machines.meet)
        procs = jobs.join(name, drive=drive, hold=hold)
        other = jobs.driver_of(procs, ask=False)
    except JoinError as error:
        raise UsageError(f"%mesh join: {error}") from None
    if drive:
        _take_stops(procs)
    session.choose(name)
    failed = jobs.held_ranks(procs)
    missing = sorted(procs.dead())
    absent = f"; not there: {format_ranks(missing, limit=6)}" if missing else ""
    took = duration(time.monotonic() - began)
    looks_on = f"; {other} has control, and this notebook looks on" if other else ""
    faults = jobs.faults_of(procs)
    count = sum(each for each, _ in faults.values())
    faulty = f"; the tools there had {count} faults so far, such as {min(faults.items())[1][1]}" if count else ""
    end = "%mesh leave lets go of it, and the job goes on"
    lines = [f"job {name}: {shape(procs)}, joined in {took}{absent}{looks_on}{faulty}; {end}"]
    for error in dict.fromkeys(failed.values()):
        ranks = format_ranks([rank for rank, said in failed.items() if said == error], limit=6)
        lines.append(f"  held after {error}: {ranks}; %mesh pm shows where, and they end with %mesh leave")
    return "\n".join(lines)


def _take_stops(procs: ProcMesh) -> None:
    """Take over the stops of the previous viewer: ask the ranks to report them."""
    get_debugger().watch(procs)


def _say(job: str, text: str) -> None:
    print(f"job {job}: {text}", file=sys.stderr)


def _tell_of_reformed(session: MeshSession, jobs: JoinController) -> None:
    """Report once that the mesh of a joined job was formed again, and use it if its predecessor was in use."""
    global _told
    if _told is not None:
        return

    def tell(name: str, text: str) -> None:
        if session.chosen in (None, name):
            session.choose(name)
        print(text, file=sys.stderr, flush=True)

    _told = jobs.on_reformed.subscribe(tell)


def leave(session: MeshSession, name: str | None) -> str:
    """Leave a joined job.

    Returns:
        One line for the user.
    """
    procs = session.find(name, "%mesh leave")
    if not tool_runtime().is_joined(procs):
        raise UsageError(f"%mesh leave: mesh {procs.name} is this kernel's own; %mesh down {procs.name} stops it")
    tool_runtime().joined_jobs().leave(procs)
    session.let_go(procs.name)
    left = f"; {session.chosen} is in use now" if session.chosen else ""
    return f"job {procs.name}: left, and it goes on{left}"


def shape(procs: ProcMesh) -> str:
    """Return the number of ranks and the dimensions as text."""
    count = len(procs)
    sizes = ", ".join(f"{label}={size}" for label, size in procs.extent.items())
    return f"{count} rank{'s' * (count != 1)} ({sizes})"


#: The time for ranks to report what an interrupt stopped (seconds).
INTERRUPT_TIMEOUT = 2.0
#: The time for killed ranks to exit (seconds).
KILL_TIMEOUT = 5.0


#: Syncs the notebook's folders to hosts; returns a line for the user.
Sync = Callable[[HostMesh], str]


def up(session: MeshSession, options: UpOptions, sync: Sync, place: ProviderHosts | None = None) -> str:
    """Start a mesh and use it.

    Args:
        session: the notebook's meshes.
        options: the options of the mesh.
        sync: called before its ranks start, if the options ask for a sync.
        place: the hosts from a provider; None: this host.

    Returns:
        One line for the user.
    """
    started = time.monotonic()
    check_free(session, options.name)
    preload = options.preload
    if options.dist and "torch" not in preload:
        preload = (*preload, "torch")  # imported once, before the ranks are forked
    devices = 0
    try:
        host = tool_runtime().keep(options.name, options.idle) if options.keep else None
        hosts = host.hosts if host is not None else tool_runtime().this_host()
        if place is not None:
            hosts = place.hosts()
            devices = place.devices_each(options.dims)
    except (ValueError, KeptError) as error:
        raise UsageError(f"%mesh up: {error}") from None
    try:
        synced = f"\n  {sync(hosts)}" if options.sync else ""
        if options.environment:
            hosts = hosts.with_python_executable(os.path.join(options.environment, "bin", "python"))
        env = {} if place is not None and place.has_variables else options.env
        own: dict[str, Any] = {"devices": devices} if devices else {}  # not every engine of the tools supports it
        procs = hosts.spawn_procs(per_host=options.dims, name=options.name, env=env, preload=preload, **own)
        try:
            managed = ManagedMesh(procs, options)
            managed.get_ready()
            _join_debugger(procs)
        except BaseException:
            procs.stop("%mesh up did not succeed")
            raise
        remember(managed)
    except BaseException as error:
        if host is not None:
            host.down()
        if isinstance(error, ValueError | TypeError):
            raise UsageError(f"%mesh up: {error}") from None
        death = error.death if isinstance(error, SupervisionError) else None
        if death is not None and death.kind in (DeathKind.NOT_STARTED, DeathKind.PRELOAD_FAILED):
            of_torch = death.kind is DeathKind.PRELOAD_FAILED and options.dist and preload == ("torch",)
            needs = f" (--dist {options.dist} needs torch)" if of_torch else ""
            raise UsageError(f"%mesh up: mesh {options.name} {death.cause}{needs}") from None
        raise
    session.adopt(managed)
    if place is not None:
        session.provider_hosts[options.name] = place
    session.choose(options.name)
    took = duration(time.monotonic() - started)
    group = f", torch.distributed over {options.dist}" if options.dist else ""
    stays = ", kept when this kernel ends" if host is not None else ""
    runs = f", in {options.environment}" if options.environment else ""
    where = "on this host" if place is None else place.describe()
    return f"mesh {options.name}: {managed.describe()} {where}{group}{runs}{stays}, ready in {took}{synced}"


def check_free(session: MeshSession, name: str) -> None:
    """Raise UsageError if a mesh of this name exists or waits for its hosts."""
    taken = session.proc_meshes().get(name)
    if taken is not None:
        raise UsageError(
            f"%mesh up: there is a mesh {name!r} already ({len(taken)} ranks); --reuse takes it as it is, "
            f"--replace stops it first; or give another name"
        )
    if (place := session.provider_hosts.get(name)) is not None and place.waiting:
        raise UsageError(
            f"%mesh up: hosts for mesh {name!r} are waited for ({place.describe()}); %mesh down {name} cancels that"
        )


def reuse(session: MeshSession, options: UpOptions) -> str | None:
    """Use the existing mesh of that name, including a kept one that no kernel is attached to.

    Returns:
        One line for the user; None if there is no such mesh.

    Raises:
        UsageError: the mesh differs from the requested one.
    """
    name = options.name
    if name not in session.proc_meshes():
        if not (options.keep and any(info.name == name for info in kept_by_others())):
            return None
        attach(session, name)
    managed = session.get(name, "%mesh up")
    differs = _differences(managed, options)
    if differs:
        raise UsageError(
            f"%mesh up: mesh {name!r} exists, but {'; '.join(differs)}; --replace stops it and starts the one you "
            "asked for"
        )
    session.choose(name)
    dead = sorted(deaths_of(managed.procs))
    rest = f"; dead: {format_ranks(dead, limit=6)}, {replacing(name)}" if dead else ""
    return f"mesh {name}: {managed.describe()}, reused with its variables{rest}"


def make_room(session: MeshSession, options: UpOptions) -> str:
    """Stop the mesh of that name, if it exists.

    Returns:
        One line for the user; empty if there was no such mesh.
    """
    kept_one = options.keep and any(info.name == options.name for info in kept_by_others())
    return down(session, options.name) if kept_one or options.name in session.proc_meshes() else ""


def down(session: MeshSession, name: str | None, force: bool = False) -> str:
    """Stop a mesh. The newest remaining mesh becomes the one in use.

    Args:
        force: also stop a kept mesh that another kernel is attached to.

    Returns:
        One line for the user.
    """
    place = None if name is None else session.provider_hosts.get(name)
    if name is not None and place is not None and name not in session.proc_meshes():  # waits, or stopped by code
        del session.provider_hosts[name]
        return f"mesh {name}: {place.end()}"
    if name is not None and name not in session.proc_meshes() and is_kept(name, "%mesh down"):
        return end_elsewhere(name, force)
    procs = session.find(name, "%mesh down")
    if tool_runtime().is_joined(procs):  # this kernel may not stop its processes
        return leave(session, procs.name)
    count = len(procs)
    host = kept_host_of(procs)
    if host is not None and len(host.proc_meshes) == 1:
        host.down()
    else:
        procs.stop("%mesh down").get(UP_TIMEOUT)
    session.let_go(procs.name)
    place = session.provider_hosts.pop(procs.name, None)
    ended = "" if place is None else f"; {place.end()}"
    left = f"; {session.chosen} is in use now" if session.chosen else ""
    return f"mesh {procs.name}: {count} rank{'s' * (count != 1)} stopped{ended}{left}"


def restart(session: MeshSession, name: str | None, sync: Sync) -> str:
    """Stop a mesh and start it again with the same options."""
    found = session.find(name, "%mesh restart")
    managed = session.managed(found.name)
    if managed is None or managed.options is None:
        raise UsageError(
            f"%mesh restart: mesh {found.name!r} was not started by %mesh up, so its options are not known; "
            "start it again the way it was started"
        )
    place = session.provider_hosts.pop(found.name, None)  # its hosts are kept
    down(session, found.name)
    try:
        return up(session, managed.options, sync, place)
    except BaseException:
        if place is not None:
            place.end()
        raise


def heal(session: MeshSession, mesh: ProcMesh, ranks: Sequence[int]) -> str:
    """Replace the dead ranks among these, then set up a new rendezvous of all ranks.

    Returns:
        A few lines for the user.
    """
    managed = session.managed(mesh.name)
    host = kept_host_of(mesh)
    was_kept = host is None or host.is_kept
    done: list[Healed] = []
    place = session.provider_hosts.get(mesh.name)
    spares = None if place is None else place.job
    try:
        for part in parts(mesh, mesh.flatten("ranks"), mesh.extent, ranks):
            done.append(part.mesh.heal(hosts=spares).get(UP_TIMEOUT))
        broken = managed is not None and managed.is_group_broken()
        if managed is not None and (broken or any(done)):
            managed.rejoin()
    except (HealError, LaunchError) as error:
        raise UsageError(f"%mesh heal: {error}") from None
    except MeshFailure as error:
        rest = "heal all of them" if len(ranks) < len(mesh) else "try it again"
        raise UsageError(f"%mesh heal: more ranks of mesh {mesh.name} are dead: {error.reason}; {rest}") from None
    told = [str(healed) for healed in done if healed] or [f"mesh {mesh.name}: all ranks are alive"]
    if broken and not any(done):
        told.append("  their process group had been shut down; a new one replaces it")
    if not was_kept:
        told.append(f"  the host agent of mesh {mesh.name} had died, too; a new one keeps it from now on")
    return "\n".join(told)


def interrupt(session: MeshSession, mesh: ProcMesh, ranks: Sequence[int]) -> str:
    """Raise KeyboardInterrupt in the cells and endpoints that run on these ranks, and end their waits in collectives.

    A second interrupt shortly after the first one kills the ranks that still run what the first one interrupted, as a
    second press of the stop button does.

    Returns:
        One line for the user.
    """
    first = session.interrupted.pop(mesh, None)
    if first is not None and not first.may_escalate(time.monotonic()):
        first = None
    # The second time, each rank separately: otherwise a silent rank would hide the answers of the others.
    chosen = [ranks]
    if first is not None:
        time.sleep(max(0.0, first.at + ANSWER_GRACE - time.monotonic()))
        chosen = [[rank] for rank in ranks]
    flat = mesh.flatten("ranks")
    at, calls = time.monotonic(), _pending_calls(mesh)  # before ranks answer those that are interrupted
    asked = [(part, part.mesh.interrupt()) for some in chosen for part in parts(mesh, flat, mesh.extent, some)]
    running: dict[int, frozenset[str]] = {}
    silent: list[int] = []
    for part, call in asked:
        try:
            names = dict(
                zip(part.ranks, call.get(max(0.0, at + INTERRUPT_TIMEOUT - time.monotonic())).values(), strict=True)
            )
        except TimeoutError:
            silent += part.ranks
            continue
        except SupervisionError as error:  # dead ranks run nothing; the others have been interrupted
            names = {part.ranks[rank]: found for rank, found in error.values.items()}
        running.update({rank: frozenset(found) for rank, found in names.items() if found})
    this = Interruption(at, {**running, **dict.fromkeys(silent, SILENT)}, calls)
    if first is not None and (stuck := first.unanswered(this)):
        return f"{kill(mesh, stuck)} (no answer to the first interrupt)"
    if this.running:
        session.interrupted[mesh] = this
    stopped: dict[str, list[int]] = {}
    for rank, found in running.items():
        for name in sorted(found):
            stopped.setdefault("a cell" if name == "cells.run" else name, []).append(rank)
    told = [f"{what} on {_ranks(who)}" for what, who in stopped.items()]
    idle = "no cell runs there, and the job's own program is never interrupted"
    idle = idle if tool_runtime().is_joined(mesh) else "nothing is running there"
    text = f"mesh {mesh.name}: interrupted {', '.join(told)}" if told else f"mesh {mesh.name}: {idle}"
    if silent:
        who = _ranks(silent)
        text += f"; no answer from {who} within {INTERRUPT_TIMEOUT:g} s; %mesh stacks shows what it is doing"
    return text


def _pending_calls(mesh: ProcMesh) -> dict[int, frozenset[int]]:
    """Return the unanswered calls of this process, for each rank of a mesh."""
    ranks = {ref.id: rank for rank, ref in enumerate(mesh._target().procs)}
    found: dict[int, set[int]] = {}
    for call in awaited_here():
        for proc in call.procs:
            if proc in ranks:
                found.setdefault(ranks[proc], set()).add(call.number)
    return {rank: frozenset(numbers) for rank, numbers in found.items()}


def kill(mesh: ProcMesh, ranks: Sequence[int]) -> str:
    """Kill the processes of these ranks.

    Returns:
        One line for the user.
    """
    dead = mesh.dead()
    living = [rank for rank in ranks if rank not in dead]
    kills = [part.mesh.kill(reason="%mesh kill") for part in parts(mesh, mesh.flatten("ranks"), mesh.extent, living)]
    deadline = time.monotonic() + KILL_TIMEOUT
    for each in kills:
        each.get(max(0.0, deadline - time.monotonic()))
    told = f"mesh {mesh.name}: killed {_ranks(living)}" if living else f"mesh {mesh.name}: nothing was killed"
    gone = [rank for rank in ranks if rank in dead]
    rest = f"; {_ranks(gone)} had died before" if gone else ""
    return f"{told}{rest}; {replacing(mesh.name, 'it' if len(ranks) == 1 else 'them')}"


def deaths_of(procs: ProcMesh) -> dict[int, str]:
    """Return the dead ranks of a mesh, and why they died."""
    states = procs.status().get(UP_TIMEOUT)
    return {
        rank: states.get(rank).cause
        for rank in range(len(procs))
        if states.get(rank).state not in ("alive", "unresponsive", "starting")
    }


def _differences(managed: ManagedMesh, options: UpOptions) -> list[str]:
    """Return the differences between a mesh and the requested one, in terms of the options of `%mesh up`."""
    found: list[str] = []
    had = managed.options
    dims = {label: size for label, size in managed.extent.items() if label != "hosts" or had is None or not had.on}
    if dims != options.dims:
        asked = ", ".join(f"{label}={size}" for label, size in options.dims.items())
        found.append(f"it has {managed.describe()}, not {asked}")
    if had is None:
        return [*found, "it was not started by %mesh up"] if options != UpOptions(options.name, options.dims) else found
    if had.dist != options.dist:
        found.append(f"its --dist is {had.dist or 'not given'}, not {options.dist or 'left out'}")
    if had.env != options.env:
        found.append("its --env differs")
    if had.environment != options.environment:
        found.append(f"it runs in {had.environment or 'the environment of the kernel'}")
    if had.preload != options.preload:
        found.append("its --preload differs")
    if had.on != options.on:
        found.append(f"it is on {had.on or 'this host'}, not {options.on or 'this host'}")
    if had.keep != options.keep:
        found.append("it is kept" if had.keep else "it is not kept")
    return found


def _join_debugger(procs: ProcMesh) -> None:
    """Set the breakpoints that apply to all meshes on a new mesh, before its first cell runs."""
    hub = sys.modules.get("monarch_kernel.debugger.controller.hub")
    debugger = hub.existing_debugger() if hub is not None else None
    if debugger is not None:
        debugger.joined(procs)


def _ranks(ranks: Sequence[int]) -> str:
    return name_ranks(ranks, limit=6)
