"""Reload modules in a rank: an actor with a separate thread."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any, TypeVar

from monarch_kernel.actor import Actor, context, endpoint
from monarch_kernel.introspection import StillBusy, between_messages
from workspace_sync.reload.in_place import error_of, imports_here, reload_here, stale_here
from workspace_sync.reload.loaded import Folders, enter_new_tree, loaded_modules
from workspace_sync.reload.refresh_report import FAILED, KEPT, RELOADED, ModuleReport, ModuleSelection, RankReport

T = TypeVar("T")
Pairs = Sequence[tuple[str, str]]


class Reloader(Actor):
    """Records which modules a rank has imported from the workspace, and reloads them from their files.

    Args:
        folders: the folders of the workspace (client, host).
    """

    __tool__ = True
    __background__ = True

    def __init__(self, folders: Pairs) -> None:
        self._rank = context().actor_instance.rank.rank
        self._dropped: dict[str, ModuleType] = {}
        loaded_modules.watch(folders)

    @endpoint
    def watch(self, folders: Pairs) -> tuple[int, RankReport]:
        """Start recording imports from these folders, and compare loaded modules with their files."""
        loaded_modules.watch(folders)
        return self._rank, RankReport(self._rank)

    @endpoint
    def enter(self, folders: Pairs) -> tuple[int, RankReport]:
        """Enter the new tree of the host, and report modules that are older than their files."""
        loaded_modules.watch(folders)
        error = enter_new_tree(Folders(folders))
        return self._rank, RankReport(self._rank, stale_here(None), error, _outside(folders))

    @endpoint
    def stale(self, folders: Pairs, changed: Collection[str] | None) -> tuple[int, RankReport]:
        """Report the modules that are older than their files."""
        loaded_modules.watch(folders)
        return self._rank, RankReport(self._rank, stale_here(changed))

    @endpoint
    def reload(
        self, folders: Pairs, changed: Collection[str] | None, selection: ModuleSelection, when: str, wait: float
    ) -> tuple[int, RankReport]:
        """Reload stale modules in place.

        Args:
            when: "idle": between two messages of all actors of this process; "now": at once.
            wait: the longest wait for idle actors (seconds).
        """
        loaded_modules.watch(folders)
        error = enter_new_tree(Folders(folders))
        if not any(selection.wants(report.name) for report in stale_here(changed)):
            return self._rank, RankReport(self._rank, [], error, _outside(folders))

        def work() -> list[ModuleReport]:
            return reload_here(changed, selection.wants)

        modules, busy = self._between(work, when, wait)
        return self._rank, RankReport(self._rank, modules or [], busy or error, _outside(folders))

    @endpoint
    def replace(
        self, folders: Pairs, changed: Collection[str] | None, when: str, wait: float
    ) -> tuple[int, RankReport]:
        """Import stale modules, and all that import them, as if for the first time. Existing objects are unchanged.

        If one of them raises, the old modules are restored. ``put_back`` undoes it, too.
        """
        loaded_modules.watch(folders)
        error = enter_new_tree(Folders(folders))
        modules, busy = self._between(lambda: self._import_again(changed), when, wait)
        return self._rank, RankReport(self._rank, modules or [], busy or error)

    @endpoint
    def put_back(self) -> tuple[int, RankReport]:
        """Undo the last ``replace``, because another rank has failed."""
        self._put_back()
        return self._rank, RankReport(self._rank)

    def _between(self, work: Callable[[], T], when: str, wait: float) -> tuple[T | None, str]:
        try:
            return (work() if when == "now" else between_messages(work, wait)), ""
        except StillBusy as e:
            return None, f"{e} did not end within {wait:g} s"

    def _import_again(self, changed: Collection[str] | None) -> list[ModuleReport]:
        stale = {report.name: report for report in stale_here(changed)}
        hopeless = [report for report in stale.values() if report.state == KEPT]
        imports = imports_here()
        chosen = {name for name in stale if stale[name].state != KEPT}
        while more := {name for name in imports.keys() - chosen - {"__main__"} if not chosen.isdisjoint(imports[name])}:
            chosen |= more
        self._dropped = {name: sys.modules[name] for name in chosen}
        known = loaded_modules.look()
        self._remove(chosen)
        loaded_modules.forget(chosen)
        done: list[ModuleReport] = []
        for name in sorted(chosen):
            client = known[name].client
            try:
                importlib.import_module(name)
            except BaseException as e:
                self._put_back()
                if isinstance(e, KeyboardInterrupt):
                    raise
                return [*hopeless, ModuleReport(name, client, FAILED, error_of(e, client))]
            if name in stale:
                done.append(ModuleReport(name, client, RELOADED))
        return [*hopeless, *done]

    @staticmethod
    def _remove(names: Collection[str]) -> None:
        for name in names:
            module: Any = sys.modules.pop(name)
            package, _, last = name.rpartition(".")
            parent = sys.modules.get(package)
            if parent is not None and vars(parent).get(last) is module:
                delattr(parent, last)  # `from package import last` would find it there

    def _put_back(self) -> None:
        loaded_modules.forget(self._dropped)
        for name, module in self._dropped.items():
            sys.modules[name] = module
            package, _, last = name.rpartition(".")
            if package in sys.modules:
                setattr(sys.modules[package], last, module)
        self._dropped = {}


def _outside(folders: Pairs) -> str:
    """Return the client's folder that this process works in or imports from, although its host has a tree."""
    return Folders(folders).outside((os.getcwd(), *sys.path))
