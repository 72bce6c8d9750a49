"""Breakpoints over meshes: set, cleared, and known to every rank that is to have them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.controller.registry import Watched, Watching, log
from monarch_kernel.debugger.events import BreakpointsChanged, MeshBreakpoint
from monarch_kernel.debugger.model.stops import Bound, Breakpoint
from monarch_kernel.debugger.rank import process as remote
from monarch_kernel.meshes import list_proc_meshes

#: How long ranks may take to do what takes no time (seconds). Who takes longer is left out.
QUICK = 2.0
#: How often a rank that has begun, and cannot be told what to stop at, is tried again at once.
TRIES = 20


class Breaking(Watching):
    """The breakpoints of a debugger."""

    def break_at(
        self,
        file: str,
        line: int,
        *,
        mesh: Any = None,
        ranks: Iterable[int] | None = None,
        condition: str = "",
        hits: int = 0,
        first: bool = False,
        differs: str = "",
        log: str = "",
        owner: str = "",
    ) -> MeshBreakpoint:
        """Stop ranks at a line; see `model.stops.Breakpoint` for what the words mean.

        Args:
            mesh: a proc mesh or its name; None: all meshes of this controller, later ones too.
            ranks: of the mesh as spawned; None: all.
            owner: who sets it.

        Returns:
            The breakpoint, with what the ranks that have answered in time made of it.

        Raises:
            ValueError: an expression is none, the mesh or a rank is not there, or the line is not a line.
        """
        if line < 1:
            raise ValueError(f"there is no line {line}: lines are counted from 1")
        for what, source in (("condition", condition), ("expression", differs)):
            _check_expression(what, source)
        if first and differs:
            raise ValueError("a breakpoint stops the first rank, or all where they differ: choose one")
        spec = Breakpoint(0, file, line, condition, hits, first, differs, log=log)
        return self._add(spec, mesh, ranks, owner)

    def break_on_error(
        self, error: str = "*", *, mesh: Any = None, ranks: Iterable[int] | None = None, owner: str = ""
    ) -> MeshBreakpoint:
        """Stop ranks where an endpoint or a cell ends with an exception.

        Args:
            error: the name of its class, or of one that it derives from; "*" for any.
        """
        return self._add(Breakpoint(0, error=error), mesh, ranks, owner)

    def _add(self, spec: Breakpoint, mesh: Any, ranks: Iterable[int] | None, owner: str) -> MeshBreakpoint:
        name = self._name_of(mesh)
        chosen = None if ranks is None else tuple(sorted(set(ranks)))
        if name is not None and chosen is not None:
            size = len(self._by_name(name)[0].whole.procs)
            wrong = [rank for rank in chosen if not 0 <= rank < size]
            if wrong:
                raise ValueError(f"mesh {name} has no rank {wrong[0]}: it has {size} (0 to {size - 1})")
        with self._lock:
            self._next += 1
            made = MeshBreakpoint(self._next, name, chosen, replace(spec, id=self._next), owner)
            self._breakpoints[made.id] = made
        self._arm(None if name is None else [name])
        return made

    def replace(self, file: str, owner: str, lines: Sequence[Mapping[str, Any]]) -> list[MeshBreakpoint]:
        """Make these the only breakpoints of an owner in a file, as the Debug Adapter Protocol's `setBreakpoints` does.

        Args:
            lines: for each, ``line``, and ``condition``, ``hits``, ``log`` if there is one.
        """
        with self._lock:
            old = [each.id for each in self._breakpoints.values() if each.owner == owner and each.spec.file == file]
            for number in old:
                del self._breakpoints[number]
            made: list[MeshBreakpoint] = []
            for each in lines:
                self._next += 1
                spec = Breakpoint(
                    self._next,
                    file,
                    int(each["line"]),
                    str(each.get("condition") or ""),
                    int(each.get("hits") or 0),
                    log=str(each.get("log") or ""),
                )
                made.append(MeshBreakpoint(self._next, None, None, spec, owner))
                self._breakpoints[self._next] = made[-1]
        if old or made:
            self._arm(None)
        return made

    def breakpoints(self) -> list[MeshBreakpoint]:
        """All of them, oldest first."""
        with self._lock:
            return list(self._breakpoints.values())

    def clear(self, number: int | None = None, owner: str | None = None) -> int:
        """Remove a breakpoint, or all of an owner (None: everybody's); how many that were.

        Raises:
            ValueError: there is none of that number.
        """
        with self._lock:
            if number is not None and number not in self._breakpoints:
                known = ", ".join(map(str, self._breakpoints)) or "none"
                raise ValueError(f"there is no breakpoint {number}; there are {known}")
            gone = [
                each.id
                for each in self._breakpoints.values()
                if number in (None, each.id) and owner in (None, each.owner)
            ]
            for each in gone:
                del self._breakpoints[each]
        if gone:
            self._arm(None)
        return len(gone)

    def joined(self, mesh: Any) -> None:
        """A mesh has come up: arm what holds on all meshes before anything runs on it."""
        with self._lock:
            wanted = any(each.mesh is None for each in self._breakpoints.values())
        if wanted:
            self._arm([self.watch(mesh)])

    def _rank_began(self, watched: Watched, rank: int) -> None:
        with self._lock:
            specs = self._specs(watched, rank)
        if specs:
            self._arm_rank(watched, rank, specs)

    def on_meshes_changed(self) -> None:
        """Meshes were made or stopped, or ranks have died, or were replaced."""
        super().on_meshes_changed()
        with self._lock:
            again = [
                (watched, rank)
                for watched in self._watched.values()
                for rank in watched.unarmed
                if rank not in watched.dead
            ]
        for watched, rank in again:
            self._rank_began(watched, rank)

    def _specs(self, watched: Watched, rank: int) -> list[Breakpoint]:
        return [each.spec for each in self._breakpoints.values() if each.holds_on(watched.name, rank)]

    def _arm(self, names: Sequence[str] | None) -> None:
        """Have ranks know what holds on them now, and wait a moment for what they make of it."""

        with self._lock:
            everywhere = any(each.mesh is None for each in self._breakpoints.values())
        if names is None and everywhere:
            for mesh in list_proc_meshes():
                self.watch(mesh)
        deadline = time.monotonic() + QUICK
        for watched in [each for each in self._by_name(None) if names is None or each.name in names]:
            with self._lock:
                alike: dict[tuple[Breakpoint, ...], list[int]] = {}
                for rank in range(len(watched.whole.procs)):
                    alike.setdefault(tuple(self._specs(watched, rank)), []).append(rank)
            for specs, ranks in alike.items():
                answers = ask(
                    watched.whole.procs,
                    remote.arm,
                    list(specs),
                    ranks=ranks,
                    timeout=max(0.1, deadline - time.monotonic()),
                )
                for rank, bound in answers.values.items():
                    self._bound(watched, rank, bound)
                for rank in answers.errors:
                    log.warning("rank %d of mesh %s could not be armed: %s", rank, watched.name, answers.error_of(rank))
        self._tell(BreakpointsChanged())

    def _arm_rank(self, watched: Watched, rank: int, specs: Sequence[Breakpoint]) -> None:
        """The same for one rank, without waiting."""

        agent = watched.agents.flatten("ranks").slice(ranks=slice(rank, rank + 1))
        asked = agent.run.call_one(cloudpickle.dumps((remote.arm, (list(specs),))))

        def done(future: Any) -> None:
            if future.exception() is not None:
                # A rank that is being replaced may be heard before it can be reached: again when its heal is over.
                tries = watched.unarmed[rank] = watched.unarmed.get(rank, 0) + 1
                if tries <= TRIES and rank not in watched.whole.procs.dead():  # and that it may be already
                    self.actor().changed.broadcast()
                return
            watched.unarmed.pop(rank, None)
            self._bound(watched, rank, future.get()[1])
            self._tell(BreakpointsChanged())

        asked.add_done_callback(done)

    def _bound(self, watched: Watched, rank: int, bound: Sequence[Bound]) -> None:
        with self._lock:
            for each in bound:
                if each.id in self._breakpoints:
                    self._breakpoints[each.id].bound[watched.name, rank] = each

    def _name_of(self, mesh: Any) -> str | None:
        if mesh is None:
            return None
        return self._by_name(mesh)[0].name if isinstance(mesh, str) else self.watch(mesh)


def _check_expression(what: str, source: str) -> None:
    if source:
        try:
            compile(source, f"<{what}>", "eval")
        except SyntaxError as error:
            raise ValueError(f"the {what} {source!r} is not an expression: {error.msg}") from None
