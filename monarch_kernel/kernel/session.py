"""The meshes that `%mesh` knows: made by it, or by the user's own code and then taken into use."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError

from monarch_kernel.actor import (
    Healed,
    HealError,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    this_host,
)
from monarch_kernel.display.quantities import duration
from monarch_kernel.errors import DeathKind
from monarch_kernel.kernel.managed_mesh import UP_TIMEOUT, ManagedMesh, UpOptions, recall, remember
from monarch_kernel.kernel.mesh_parts import parts
from monarch_kernel.kernel.usage_errors import nearest
from monarch_kernel.meshes import (
    KeptError,
    KeptHost,
    KeptInfo,
    attach,
    end_kept,
    format_ranks,
    held,
    keep,
    kept,
    kept_host_of,
    list_proc_meshes,
    taken_over,
)

#: How long ranks may take to say what an interrupt has stopped (seconds).
INTERRUPT_TIMEOUT = 2.0


class MeshSession:
    """The named meshes of one notebook, and which of them is in use."""

    def __init__(self) -> None:
        self._managed: dict[str, ManagedMesh] = {}
        self._current: str | None = None

    # -- what there is -------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of all meshes of this controller, oldest first."""
        return list(self.proc_meshes())

    def proc_meshes(self) -> dict[str, ProcMesh]:
        """All meshes of this controller by name; of two with one name, the newer."""
        self._forget_stopped()
        return {mesh.name: mesh for mesh in list_proc_meshes()}

    def managed(self, name: str) -> ManagedMesh | None:
        """The mesh of that name if cells have been run on it or `%mesh up` made it."""
        self._forget_stopped()
        return self._managed.get(name)

    @property
    def current(self) -> str | None:
        """The name of the mesh in use; the only one there is, where none was chosen."""
        names = self.names()
        if self._current not in names:
            self._current = None
        return self._current or (names[0] if len(names) == 1 else None)

    def current_mesh(self) -> ProcMesh:
        """The mesh in use; LookupError if none is."""
        name = self.current
        if name is None:
            known = ", ".join(self.names()) or "none"
            raise LookupError(f"no mesh is in use; choose one with %mesh use NAME (there are: {known})")
        return self.proc_meshes()[name]

    def get(self, name: str | None, command: str) -> ManagedMesh:
        """The mesh of that name, or the one in use; made fit to run cells if it is not yet.

        Raises:
            UsageError: there is none; says which there are.
        """
        wanted = name or self.current
        found = self.find(wanted, command)
        managed = self._managed.get(found.name)
        if managed is None or managed.procs is not found:
            managed = recall(found)
            if managed is None:
                managed = ManagedMesh(found)
                managed.get_ready()
                remember(managed)
            self._managed[found.name] = managed
        return managed

    def find(self, name: str | None, command: str) -> ProcMesh:
        """The proc mesh of that name, or the one in use; see `get`."""
        meshes = self.proc_meshes()
        wanted = name or self.current
        if wanted is not None and wanted in meshes:
            return meshes[wanted]
        self._check_not_lost(wanted, command)
        if not meshes:
            which = f"no mesh {name!r}" if name else "no mesh"
            raise UsageError(f"{command}: there is {which}; start one with %mesh up --procs 4")
        known = ", ".join(meshes)
        if wanted is None:
            raise UsageError(f"{command}: no mesh is in use; choose one of {known} with %mesh use NAME")
        raise UsageError(f"{command}: there is no mesh {wanted!r}{nearest(wanted, meshes)}; there are {known}")

    def _check_not_lost(self, name: str | None, command: str) -> None:
        """Say so if this was a kept mesh that another process has now."""
        for lost, why in taken_over().items():
            if name in (None, lost):
                raise UsageError(f"{command}: {why}; %mesh attach {lost} --force takes it back")

    def use(self, name: str, command: str = "%mesh use") -> ManagedMesh:
        """Have cells run on that mesh from now on."""
        managed = self.get(name, command)
        self._current = managed.name
        return managed

    def _forget_stopped(self) -> None:
        for name, managed in list(self._managed.items()):
            if not managed.is_alive:
                self._managed.pop(name, None)  # several threads look

    # -- up and down ---------------------------------------------------------------------------

    def up(self, options: UpOptions) -> str:
        """Start a mesh and use it.

        Returns:
            One line that says what there is now.
        """
        started = time.monotonic()
        taken = self.proc_meshes().get(options.name)
        if taken is not None:
            raise UsageError(
                f"%mesh up: there is a mesh {options.name!r} already ({len(taken)} ranks); --reuse takes it as it is, "
                f"--replace ends it first; or give another name"
            )
        preload = options.preload
        if options.dist and "torch" not in preload:
            preload = (*preload, "torch")  # imported once, before the ranks are forked
        try:
            host = keep(options.name, options.idle) if options.keep else None
            hosts = host.hosts if host is not None else this_host()
        except (ValueError, KeptError) as error:
            raise UsageError(f"%mesh up: {error}") from None
        try:
            procs = hosts.spawn_procs(per_host=options.dims, name=options.name, env=options.env, preload=preload)
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
        self._managed[options.name] = managed
        self._current = options.name
        took = duration(time.monotonic() - started)
        group = f", torch.distributed over {options.dist}" if options.dist else ""
        stays = ", kept when this kernel ends" if host is not None else ""
        return f"mesh {options.name}: {managed.describe()} on this host{group}{stays}, ready in {took}"

    def reuse(self, options: UpOptions) -> str | None:
        """Use the mesh of that name, a kept one that no kernel holds included; None if there is none.

        Returns:
            One line that says what is used.

        Raises:
            UsageError: there is one, and it is another kind of mesh.
        """
        name = options.name
        if name not in self.proc_meshes():
            if not (options.keep and any(info.name == name for info in self.kept_elsewhere())):
                return None
            self.attach(name)
        managed = self.get(name, "%mesh up")
        differs = _differences(managed, options)
        if differs:
            raise UsageError(
                f"%mesh up: mesh {name!r} is there, but {'; '.join(differs)}; --replace ends it and starts the one you "
                "ask for"
            )
        self._current = name
        dead = sorted(deaths_of(managed.procs))
        rest = f"; dead: {format_ranks(dead, limit=6)}, %mesh heal {name} replaces them" if dead else ""
        return f"mesh {name}: {managed.describe()}, reused with its variables{rest}"

    def make_room(self, options: UpOptions) -> str:
        """End the mesh of that name, if there is one.

        Returns:
            One line that says what was ended; empty if nothing was.
        """
        kept_one = options.keep and any(info.name == options.name for info in self.kept_elsewhere())
        return self.down(options.name) if kept_one or options.name in self.proc_meshes() else ""

    def down(self, name: str | None, force: bool = False) -> str:
        """Stop a mesh; the newest of those left is in use then.

        Args:
            force: also a kept mesh that another kernel holds.

        Returns:
            One line that says what was stopped.
        """
        if name is not None and name not in self.proc_meshes() and self._is_kept(name, "%mesh down"):
            return self._down_elsewhere(name, force)
        procs = self.find(name, "%mesh down")
        count = len(procs)
        host = kept_host_of(procs)
        if host is not None and len(host.proc_meshes) == 1:
            host.down()
        else:
            procs.stop("%mesh down").get(UP_TIMEOUT)
        self._let_go(procs.name)
        left = f"; {self._current} is in use now" if self._current else ""
        return f"mesh {procs.name}: {count} rank{'s' * (count != 1)} stopped{left}"

    def _let_go(self, name: str) -> None:
        """A mesh is not this notebook's any more; the newest of those left is in use then."""
        self._managed.pop(name, None)
        if self._current == name:
            names = self.names()
            self._current = names[-1] if names else None

    # -- kept meshes ---------------------------------------------------------------------------

    def _is_kept(self, name: str, command: str) -> bool:
        try:
            return any(info.name == name for info in kept())
        except KeptError as error:
            raise UsageError(f"{command}: there is no mesh {name!r} here, and {error}") from None

    def kept_elsewhere(self) -> list[KeptInfo]:
        """The kept meshes of this user that this notebook does not hold.

        Raises:
            KeptError: the folder that they would be in is another user's.
        """
        here = {host.name for host in held()}
        return [info for info in kept() if info.name not in here]

    def _down_elsewhere(self, name: str, force: bool) -> str:
        try:
            info = end_kept(name, force)
        except KeptError as error:
            raise UsageError(f"%mesh down: {error}; --force ends it nevertheless") from None
        count = sum(mesh.alive for mesh in info.meshes)
        return f"mesh {name}: {count} rank{'s' * (count != 1)} stopped; no kernel here had it"

    def attach(self, name: str, force: bool = False) -> KeptHost:
        """Take over a kept mesh, and use it."""
        label = os.path.basename(os.path.abspath(name)) if os.sep in name else name
        if label in self.proc_meshes():
            raise UsageError(f"%mesh attach: there is a mesh {label!r} here already; end or detach it first")
        try:
            host = attach(name, force)
        except (KeptError, ValueError) as error:
            raise UsageError(f"%mesh attach: {error}{'' if force else _hint(str(error))}") from None
        for procs in host.proc_meshes:
            managed = recall(procs)
            if managed is not None:
                self._managed[procs.name] = managed
            self._current = procs.name
        return host

    def detach(self, name: str | None) -> str:
        """Let go of a kept mesh, without ending it.

        Returns:
            One line that says what was let go.
        """
        procs = self.find(name, "%mesh detach")
        host = kept_host_of(procs)
        if host is None:
            raise UsageError(
                f"%mesh detach: mesh {procs.name} would end with this kernel; only what %mesh up --keep has started "
                "can be let go"
            )
        names = [mesh.name for mesh in host.proc_meshes]
        host.detach()
        for each in names:
            self._let_go(each)
        limit = f" within {_hours(host.idle)}" if host.idle else ""
        return f"mesh {host.name}: let go; %mesh attach {host.name} finds it again{limit}"

    def interrupt(self, mesh: ProcMesh, ranks: Sequence[int]) -> str:
        """Raise KeyboardInterrupt in whatever runs on these ranks.

        Returns:
            What was interrupted where, in one line.
        """
        asked = [(part, part.mesh.interrupt()) for part in parts(mesh, mesh.flatten("ranks"), mesh.extent, ranks)]
        deadline = time.monotonic() + INTERRUPT_TIMEOUT
        stopped: dict[str, list[int]] = {}
        silent: list[int] = []
        for part, call in asked:
            try:
                names = dict(zip(part.ranks, call.get(max(0.0, deadline - time.monotonic())).values(), strict=True))
            except TimeoutError:
                silent += part.ranks
                continue
            except SupervisionError as error:  # the dead run nothing; the others have been told
                names = {part.ranks[rank]: found for rank, found in error.values.items()}
            for rank, found in names.items():
                for name in found:
                    stopped.setdefault("a cell" if name == "cells.run" else name, []).append(rank)
        told = [f"{what} on {_ranks(who)}" for what, who in stopped.items()]
        text = f"mesh {mesh.name}: interrupted {', '.join(told)}" if told else f"mesh {mesh.name}: nothing runs there"
        if silent:
            who = _ranks(silent)
            text += f"; no answer from {who} within {INTERRUPT_TIMEOUT:g} s, %mesh stacks shows where its code is"
        return text

    def heal(self, mesh: ProcMesh, ranks: Sequence[int]) -> str:
        """Replace what died among these ranks; all ranks then meet anew, as at the start.

        Returns:
            What was done, in a few lines.
        """
        managed = self._managed.get(mesh.name)
        host = kept_host_of(mesh)
        was_kept = host is None or host.is_kept
        done: list[Healed] = []
        try:
            for part in parts(mesh, mesh.flatten("ranks"), mesh.extent, ranks):
                done.append(part.mesh.heal().get(UP_TIMEOUT))
            if managed is not None and any(done):
                managed.rejoin()
        except HealError as error:
            raise UsageError(f"%mesh heal: {error}") from None
        except MeshFailure as error:
            rest = "heal all of them" if len(ranks) < len(mesh) else "try it again"
            raise UsageError(f"%mesh heal: more ranks of mesh {mesh.name} are dead: {error.reason}; {rest}") from None
        told = [str(healed) for healed in done if healed] or [f"mesh {mesh.name}: all its ranks are well"]
        if not was_kept:
            told.append(f"  the host agent of mesh {mesh.name} had died, too: a new one keeps it from now on")
        return "\n".join(told)

    def restart(self, name: str | None) -> str:
        """Stop a mesh and start it again with the same options."""
        found = self.find(name, "%mesh restart")
        managed = self._managed.get(found.name)
        if managed is None or managed.options is None:
            raise UsageError(
                f"%mesh restart: mesh {found.name!r} was not started by %mesh up, so how to start it is not known; "
                "start it again the way it was"
            )
        self.down(found.name)
        return self.up(managed.options)


def _differences(managed: ManagedMesh, options: UpOptions) -> list[str]:
    """How a mesh differs from the one that was asked for, in the words of `%mesh up`."""
    found: list[str] = []
    if dict(managed.extent) != options.dims:
        asked = ", ".join(f"{label}={size}" for label, size in options.dims.items())
        found.append(f"it has {managed.describe()}, not {asked}")
    had = managed.options
    if had is None:
        return [*found, "it was not started by %mesh up"] if options != UpOptions(options.name, options.dims) else found
    if had.dist != options.dist:
        found.append(f"its --dist is {had.dist or 'not given'}, not {options.dist or 'left out'}")
    if had.env != options.env:
        found.append("its --env differs")
    if had.preload != options.preload:
        found.append("its --preload differs")
    if had.keep != options.keep:
        found.append("it is kept" if had.keep else "it is not kept")
    return found


def _join_debugger(procs: ProcMesh) -> None:
    """Breakpoints that hold everywhere hold on a new mesh before the first cell runs there."""
    hub = sys.modules.get("monarch_kernel.debugger.controller.hub")
    debugger = hub.existing_debugger() if hub is not None else None
    if debugger is not None:
        debugger.joined(procs)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks, limit=6)}"


def _hint(error: str) -> str:
    return " (--force)" if "by force" in error else ""


def _hours(idle: float) -> str:
    return f"{idle / 3600:g} h" if idle >= 3600 else duration(idle)


def deaths_of(procs: ProcMesh) -> dict[int, str]:
    """Which ranks of a mesh are dead, and why."""
    states = procs.status().get(UP_TIMEOUT)
    return {
        rank: states.get(rank).cause
        for rank in range(len(procs))
        if states.get(rank).state not in ("alive", "unresponsive", "starting")
    }


_sessions: dict[str, Any] = {}


def session() -> MeshSession:
    """The session of this process."""
    found: MeshSession | None = _sessions.get("session")
    if found is None:
        found = _sessions["session"] = MeshSession()
    return found
