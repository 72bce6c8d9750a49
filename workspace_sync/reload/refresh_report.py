"""Results of a refresh of live code, and the selection of modules for it, as plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

#: State: the module has the new source.
RELOADED = "reloaded"
#: State: the module has the old source, because it cannot be changed in place or its new source is faulty.
KEPT, FAILED = "kept", "failed"
#: State: the module has an older source than its file.
STALE = "stale"


class ModuleReport(msgspec.Struct, array_like=True):
    """Result for one module on one rank.

    Attributes:
        name: of the module.
        file: its path at the client, or on the rank's host if the client has none.
        state: "reloaded", "stale", "kept" (it cannot be changed in place) or "failed" (its new source does
            not compile, or raises).
        reason: why it is kept, or the failure, with file and line.
        notes: parts of the change that existing objects do not follow.
    """

    name: str
    file: str
    state: str
    reason: str = ""
    notes: list[str] = []


class RankReport(msgspec.Struct, array_like=True):
    """Result for one rank.

    Attributes:
        rank: its number in the refreshed mesh.
        modules: modules of the workspace whose files have changed.
        error: why nothing was done on this rank (its actors were busy, it did not answer, it is dead); "" on success.
        outside: the client's folder that it works in or imports from, although its host has a tree; usually "".
    """

    rank: int
    modules: list[ModuleReport] = []
    error: str = ""
    outside: str = ""


class Refreshed(msgspec.Struct):
    """Result of ``refresh``.

    Attributes:
        mesh: the name of the mesh.
        how: "reload", "respawn" or "restart".
        ranks: one entry for each rank.
        respawned: the actor meshes whose actors were created again.
        restored: those of ``respawned`` that were restored from a checkpoint.
        seconds: the total time.
    """

    mesh: str
    how: str
    ranks: list[RankReport] = []
    respawned: list[str] = []
    restored: list[str] = []
    seconds: float = 0.0

    def modules(self, *states: str) -> dict[tuple[str, str, str], list[int]]:
        """Group ranks by (module, state, reason), for modules in these states; without arguments, in any state."""
        found: dict[tuple[str, str, str], list[int]] = {}
        for rank in self.ranks:
            for module in rank.modules:
                if not states or module.state in states:
                    found.setdefault((module.name, module.state, module.reason), []).append(rank.rank)
        return found

    @property
    def errors(self) -> dict[str, list[int]]:
        """Group ranks by the reason why nothing was done on them."""
        found: dict[str, list[int]] = {}
        for rank in self.ranks:
            if rank.error:
                found.setdefault(rank.error, []).append(rank.rank)
        return found

    @property
    def done(self) -> bool:
        """Whether every rank runs the new source of every module."""
        return not self.errors and not self.modules(KEPT, FAILED, STALE)


# -- selection of modules -------------------------------------------------------------------------


class ModuleSelection(msgspec.Struct, array_like=True, frozen=True):
    """A mode of ``%autoreload``, with the modules of ``%aimport``. Each name is one module, as in IPython.

    Attributes:
        mode: "off" (0): no modules; "explicit" (1): those in ``included``; "all" (2, 3): all but those in ``excluded``.
        included: modules of ``%aimport NAME``.
        excluded: modules of ``%aimport -NAME``.
    """

    mode: str = "all"
    included: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    def wants(self, module: str) -> bool:
        """Return whether a module is to be reloaded."""
        if self.mode == "explicit":
            return module in self.included
        return self.mode == "all" and module not in self.excluded


#: All modules.
EVERY = ModuleSelection()


def selection_of(mode: str | int, included: Iterable[str] = (), excluded: Collection[str] = ()) -> ModuleSelection:
    """Parse the arguments of ``%autoreload``.

    Args:
        mode: "off", "now", "explicit", "all", "complete", or 0 to 3 ("" and "now" mean all modules, once). On ranks,
            "complete" is the same as "all": a module that is executed in place has its new names, too.
        included: the modules that ``%aimport`` named.
        excluded: the modules that ``%aimport -NAME`` named.

    Raises:
        ValueError: the mode is invalid.
    """
    modes = {"0": "off", "off": "off", "1": "explicit", "explicit": "explicit"}
    modes |= dict.fromkeys(("", "now", "2", "all", "3", "complete"), "all")
    wanted = modes.get(str(mode).strip().lower())
    if wanted is None:
        raise ValueError(f"%autoreload has no mode {mode!r}: use off, explicit, all or complete (0 to 3)")
    return ModuleSelection(wanted, tuple(sorted(set(included))), tuple(sorted(set(excluded))))
