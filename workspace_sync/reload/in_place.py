"""Reload in place: a changed module's new source is executed in the module, and what exists follows it.

Each module is updated as a whole or not at all. Functions keep their identity and get new code, wherever they are held
(`functions`); classes keep theirs and get new members (`classes`); names that other modules of the workspace have
imported from the module follow (`references`). What the source assigns at its top level is executed again, as
`importlib.reload` does it: a module keeps state by not assigning it anew (``if "CACHE" not in globals(): CACHE = {}``).
"""

from __future__ import annotations

import functools
import importlib
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from importlib.machinery import PathFinder
from types import CodeType, FunctionType, ModuleType
from typing import Any

from monarch_kernel.actor import Actor
from monarch_kernel.introspection import actor_class_changed
from workspace_sync.model.manifest import digest_of
from workspace_sync.reload.classes import ClassUpdate, Unsound
from workspace_sync.reload.folders import Folders
from workspace_sync.reload.functions import FunctionUpdate, class_bodies_of, functions_of
from workspace_sync.reload.imports import Imports, in_order, stored_names
from workspace_sync.reload.journal import Journal
from workspace_sync.reload.loaded import Loaded, is_extension, loaded_modules
from workspace_sync.reload.references import follow_names, is_own, redirect
from workspace_sync.reload.report import FAILED, KEPT, RELOADED, STALE, ModuleReport

#: Names that every module has from the import system.
_OF_IMPORT = frozenset(
    {
        *("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__path__", "__file__", "__cached__"),
        *("__builtins__", "__annotations__"),
    }
)
_CACHED = type(functools.cache(len))


def stale_here(changed: Collection[str] | None = None) -> list[ModuleReport]:
    """The modules of this process that are older than their files, and why they cannot be reloaded, if that is known.

    Args:
        changed: the paths that have changed, as the client names them; None: any may have.
    """
    found: list[ModuleReport] = []
    for name, loaded in sorted(loaded_modules.look().items()):
        if changed is None or loaded.client in changed:
            _source, report = _examined(name, loaded, loaded_modules.folders, changed is not None)
            if report is not None:
                found.append(report)
    return found


def reload_here(
    changed: Collection[str] | None = None, wanted: Callable[[str], bool] = lambda _name: True
) -> list[ModuleReport]:
    """Reload, in place, the modules of this process that are older than their files; nothing else may run.

    Args:
        changed: as for ``stale_here``.
        wanted: whether a module, by name, is to be reloaded.
    """
    known = loaded_modules.look()
    sources: dict[str, bytes] = {}
    reports: dict[str, ModuleReport] = {}
    for name, loaded in known.items():
        if (changed is not None and loaded.client not in changed) or not wanted(name):
            continue
        source, report = _examined(name, loaded, loaded_modules.folders, changed is not None)
        if source is not None:
            sources[name] = source
        elif report is not None:
            reports[name] = report
    imports = {name: found for name, loaded in known.items() if (found := _imports_of(name, loaded, sources))}
    order = [
        name for name in in_order(known, {name: each.modules for name, each in imports.items()}) if name in sources
    ]
    functions = functions_of(vars(sys.modules[name]) for name in order)
    waiting = order
    while waiting:  # a module of a circle may need what another one of it has not defined yet
        failed: list[str] = []
        for name in waiting:
            loaded = known[name]
            update = _ModuleUpdate(sys.modules[name], name, loaded, sources[name], imports)
            reports[name] = update.run(functions[id(vars(sys.modules[name]))])
            if reports[name].state == FAILED:
                failed.append(name)
        if len(failed) == len(waiting):
            break
        waiting = failed
    return [reports[name] for name in sorted(reports)]


def _examined(name: str, loaded: Loaded, folders: Folders, announced: bool) -> tuple[bytes | None, ModuleReport | None]:
    """The new source of a module that can be reloaded, and a report, unless it is current.

    Args:
        announced: whether its file is known to have changed.
    """

    def report(state: str, reason: str = "") -> ModuleReport:
        return ModuleReport(name, loaded.client, state, reason)

    path = folders.now(loaded.path)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        moved = _found_elsewhere(name, path)
        what = f"its source is {moved} now" if moved else f"{loaded.client} is deleted"
        return None, report(KEPT, f"{what}: ranks keep what they have imported until they are restarted")
    except OSError as e:
        return None, report(KEPT, f"{path} cannot be read: {e.strerror}")
    if loaded.digest == digest_of(data) and (loaded.certain or not announced):
        return None, None
    if is_extension(path):
        return None, report(KEPT, "it is an extension module, which Python cannot load twice: restart the ranks")
    if name == "__main__":
        return None, report(KEPT, "it is the program that runs, which would begin again: restart the ranks")
    if name != getattr(sys.modules[name], "__name__", name):
        return None, None  # another name of a module that has its own
    return data, report(STALE)


def _found_elsewhere(name: str, path: str) -> str:
    parent = sys.modules.get(name.rpartition(".")[0])
    importlib.invalidate_caches()
    spec = PathFinder.find_spec(name, getattr(parent, "__path__", None))
    origin = getattr(spec, "origin", None)
    return origin if isinstance(origin, str) and origin != path and os.path.exists(origin) else ""


def _imports_of(name: str, loaded: Loaded, sources: Mapping[str, bytes]) -> Imports | None:
    source = sources.get(name, loaded.source)
    is_package = hasattr(sys.modules[name], "__path__")
    return _read_imports(source, name, is_package) if source else None


@functools.lru_cache(maxsize=4096)
def _read_imports(source: bytes, name: str, is_package: bool) -> Imports | None:
    try:
        return Imports(source, name, is_package)
    except (SyntaxError, ValueError):
        return None


def imports_here() -> dict[str, set[str]]:
    """What each module of the workspace in this process imports, by name; of those whose source is known."""
    found = {name: _imports_of(name, loaded, {}) for name, loaded in loaded_modules.look().items()}
    return {name: set() if each is None else each.modules for name, each in found.items()}


def error_of(error: BaseException, client: str) -> str:
    """An error of a source, with the innermost line of the workspace, as the client names it.

    Args:
        client: the file to name if the error names none.
    """
    folders, line, said = loaded_modules.folders, None, str(error)
    if isinstance(error, SyntaxError) and error.filename and folders.at_client(error.filename):
        client, line, said = folders.at_client(error.filename) or client, error.lineno, error.msg
    else:
        for frame in traceback.extract_tb(error.__traceback__):
            there = folders.at_client(frame.filename)
            if there is not None:
                client, line = there, frame.lineno
    at = f"{client}:{line}" if line else client
    kind = type(error).__name__
    return f"{at}: {kind}: {said}" if said else f"{at}: {kind}"


class _ModuleUpdate:
    """One module, updated as a whole or not at all."""

    def __init__(
        self, module: ModuleType, name: str, loaded: Loaded, source: bytes, imports: Mapping[str, Imports]
    ) -> None:
        self._module = module
        self._name = name
        self._loaded = loaded
        self._source = source
        self._imports = imports
        self._namespace: dict[str, Any] = vars(module)
        self._path = loaded_modules.folders.now(loaded.path)
        self._journal = Journal()

    def run(self, functions: list[FunctionType]) -> ModuleReport:
        """Update the module.

        Args:
            functions: its live functions.
        """
        try:
            code = self._compiled(self._source)
        except (SyntaxError, ValueError) as e:
            return self._failed(e)
        old_code: CodeType | None = None
        if self._loaded.source:
            try:
                old_code = self._compiled(self._loaded.source)
            except (SyntaxError, ValueError):  # its loader makes something else of it by now
                old_code = None
        try:
            notes = self._update(code, old_code, functions)
        except Unsound as e:
            self._journal.roll_back()
            self._lookup_again()
            return self._report(KEPT, f"{e}: respawn the actors, or restart the ranks")
        except BaseException as e:
            self._journal.roll_back()
            self._lookup_again()
            if isinstance(e, KeyboardInterrupt):
                raise
            return self._failed(e)
        loaded_modules.note(self._name, Loaded(self._path, self._loaded.client, digest_of(self._source), self._source))
        linecache.checkcache(self._path)
        return self._report(RELOADED, notes=notes)

    def _report(self, state: str, reason: str = "", notes: list[str] | None = None) -> ModuleReport:
        return ModuleReport(self._name, self._loaded.client, state, reason, notes or [])

    def _failed(self, error: BaseException) -> ModuleReport:
        where = self._loaded.client
        if isinstance(error, SyntaxError) and error.filename in (self._path, self._loaded.path):
            line, said = error.lineno, error.msg
        else:
            frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == self._path]
            line, said = (frames[-1].lineno if frames else None), str(error)
        at = f"{where}:{line}" if line else where
        return self._report(
            FAILED, f"{at}: {type(error).__name__}: {said}" if said else f"{at}: {type(error).__name__}"
        )

    def _compiled(self, source: bytes) -> CodeType:
        loader = getattr(self._module, "__loader__", None)
        translate = getattr(loader, "source_to_code", None)
        if translate is not None:
            return translate(source, self._path)
        return compile(source, self._path, "exec", dont_inherit=True)

    # -- the update --------------------------------------------------------------------------------

    def _update(self, code: CodeType, old_code: CodeType | None, functions: list[FunctionType]) -> list[str]:
        namespace, journal = self._namespace, self._journal
        before = dict(namespace)
        journal.note_dict(namespace)
        update = FunctionUpdate(old_code, code, journal)
        old_bodies = {} if old_code is None else class_bodies_of(old_code)
        bodies = class_bodies_of(code)
        old_names = {name: stored_names(each[0]) for name, each in old_bodies.items() if len(each) == 1}
        self._classes = classes = ClassUpdate(self._name, namespace, before, bodies, old_names, update, journal)
        namespace["__file__"] = self._path
        namespace["__doc__"] = None
        namespace.pop("__annotations__", None)
        with classes.watching():
            exec(code, namespace)
        if classes.refusal is not None:
            raise classes.refusal
        update.update(each for each in functions if id(each) not in update.updated)
        pairs: dict[int, tuple[Any, Any]] = {}
        self._keep_classes(before, old_bodies, bodies, pairs)
        self._keep_functions(before, update, pairs)
        notes = redirect(pairs, journal, skip=(before, namespace))
        for name, value in list(namespace.items()):
            if id(value) in pairs:
                namespace[name] = pairs[id(value)][1]
        self._drop_names(before, old_code, code)
        self._lookup_again()
        self._follow(before)
        classes.check_fields()
        return [*update.notes, *classes.notes, *notes]

    def _keep_classes(
        self,
        before: dict[str, Any],
        old_bodies: Mapping[str, list[CodeType]],
        bodies: Mapping[str, list[CodeType]],
        pairs: dict[int, tuple[Any, Any]],
    ) -> None:
        """Have classes that the source has made once more replaced by those that were there."""
        for path in bodies:
            old, new = self._classes.find(before, path), self._classes.find(self._namespace, path)
            if old is not None and new is not None and old is not new:
                same = old_bodies.get(path) == bodies[path] != []
                self._classes.replacement(old, new, same)
                pairs[id(new)] = new, old

    def _keep_functions(
        self, before: dict[str, Any], update: FunctionUpdate, pairs: dict[int, tuple[Any, Any]]
    ) -> None:
        """Have functions that the source has made once more replaced by those that were there."""
        for name, new in list(self._namespace.items()):
            old = before.get(name)
            if old is new or type(old) is not FunctionType or type(new) is not FunctionType:
                continue
            own = old.__globals__ is new.__globals__ is self._namespace and old.__qualname__ == new.__qualname__
            if own and not new.__closure__ and not old.__closure__ and update.adopt(old, new):
                pairs[id(new)] = new, old
        for name, old in before.items():
            if isinstance(old, _CACHED) and self._namespace.get(name) is not old and old.__module__ == self._name:
                old.cache_clear()  # it has results of the old code

    def _drop_names(self, before: dict[str, Any], old_code: CodeType | None, code: CodeType) -> None:
        """Delete names that the old source defined and the new one does not; what a program has set stays."""
        stored = stored_names(code)
        for name, value in before.items():
            if name in stored or name in _OF_IMPORT or name not in self._namespace:
                continue
            own = name in stored_names(old_code) if old_code is not None else is_own(value, self._name)
            if own and self._namespace[name] is value and f"{self._name}.{name}" not in sys.modules:
                del self._namespace[name]

    def _lookup_again(self) -> None:
        """Have the runtime follow actor classes.

        Raises:
            Unsound: live actors cannot follow.
        """
        for cls in (getattr(self, "_classes", None) and self._classes.changed) or ():
            if issubclass(cls, Actor):
                try:
                    actor_class_changed(cls)
                except ValueError as e:
                    raise Unsound(f"class {cls.__qualname__}: {e}") from None

    def _follow(self, before: dict[str, Any]) -> None:
        """Have names that other modules have imported from this one follow, and those imported from them."""
        todo: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [(self._name, before, self._namespace)]
        seen = {self._name}
        while todo:
            module, old, new = todo.pop()
            importers = {
                name: (vars(sys.modules[name]), each.names_from(module))
                for name, each in self._imports.items()
                if name in sys.modules and name != self._name
            }
            main = sys.modules.get("__main__")
            if main is not None and "__main__" not in importers:
                importers["__main__"] = vars(main), {}
            earlier = {name: dict(namespace) for name, (namespace, _names) in importers.items()}
            for followed in follow_names(module, old, new, importers, self._journal):
                importer = followed.rpartition(".")[0]
                if importer not in seen and importer in self._imports:
                    seen.add(importer)
                    todo.append((importer, earlier[importer], vars(sys.modules[importer])))
