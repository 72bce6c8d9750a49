"""Reload in place: execute the new source of a module in the module, and update existing objects.

Each module is updated as a whole or not at all. Functions keep their identity and get new code, wherever they are
referenced (`functions`). Classes keep their identity and get new members (`classes`). Names that other modules of the
workspace have imported from the module are updated. Top-level assignments of the source are executed again, as by
`importlib.reload`: a module keeps state by not assigning it again (``if "CACHE" not in globals(): CACHE = {}``).
"""

from __future__ import annotations

import ast
import dis
import functools
import gc
import importlib
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from monarch_kernel.actor import Actor, context, endpoint
from monarch_kernel.introspection import StillBusy, actor_class_changed, between_messages
from workspace_sync.model.manifest import digest_of
from workspace_sync.reload.classes import ClassUpdate, FunctionUpdate, Journal, Unsound, class_bodies_of, functions_of
from workspace_sync.reload.loaded import Folders, Loaded, enter_new_tree, is_extension, loaded_modules
from workspace_sync.reload.refresh_report import (
    FAILED,
    KEPT,
    RELOADED,
    STALE,
    ModuleReport,
    ModuleSelection,
    RankReport,
)

#: Names that the import system sets in every module.
_OF_IMPORT = frozenset(
    {
        *("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__path__", "__file__", "__cached__"),
        *("__builtins__", "__annotations__"),
    }
)
_CACHED = type(functools.cache(len))


def stale_here(changed: Collection[str] | None = None) -> list[ModuleReport]:
    """Return the modules of this process that are older than their files, with the reason if they cannot be reloaded.

    Args:
        changed: the changed paths at the client; None: any may have changed.
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
    """Reload in place the modules of this process that are older than their files. Nothing else may run meanwhile.

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
    while waiting:  # in an import cycle, a module may need a name that another one has not defined yet
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
    """Return the new source of a module that can be reloaded, and a report unless the module is current.

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
        return None, None  # another name of a module that has its own entry
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
    """Return the imports of each module of the workspace in this process, by name, if its source is known."""
    found = {name: _imports_of(name, loaded, {}) for name, loaded in loaded_modules.look().items()}
    return {name: set() if each is None else each.modules for name, each in found.items()}


def error_of(error: BaseException, client: str) -> str:
    """Describe an error of a source, with the innermost line of the workspace, by its path at the client.

    Args:
        client: the path to name if the error names none.
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
    """Update of one module, applied as a whole or not at all."""

    def __init__(
        self, module: ModuleType, name: str, loaded: Loaded, source: bytes, imports: Mapping[str, Imports]
    ) -> None:
        self._module = module
        self._name = name
        self._loaded = loaded
        self._source = source
        self._imports = imports
        self._namespace: dict[str, object] = vars(module)
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
            except (SyntaxError, ValueError):  # its loader now produces something else
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
        pairs: dict[int, tuple[object, object]] = {}
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
        before: dict[str, object],
        old_bodies: Mapping[str, list[CodeType]],
        bodies: Mapping[str, list[CodeType]],
        pairs: dict[int, tuple[object, object]],
    ) -> None:
        """Replace classes that the source has created again by the existing ones."""
        for path in bodies:
            old, new = self._classes.find(before, path), self._classes.find(self._namespace, path)
            if old is not None and new is not None and old is not new:
                same = old_bodies.get(path) == bodies[path] != []
                self._classes.replacement(old, new, same)
                pairs[id(new)] = new, old

    def _keep_functions(
        self, before: dict[str, object], update: FunctionUpdate, pairs: dict[int, tuple[object, object]]
    ) -> None:
        """Replace functions that the source has created again by the existing ones."""
        for name, new in list(self._namespace.items()):
            old = before.get(name)
            if old is new or type(old) is not FunctionType or type(new) is not FunctionType:
                continue
            own = old.__globals__ is new.__globals__ is self._namespace and old.__qualname__ == new.__qualname__
            if own and not new.__closure__ and not old.__closure__ and update.adopt(old, new):
                pairs[id(new)] = new, old
        for name, old in before.items():
            if isinstance(old, _CACHED) and self._namespace.get(name) is not old and old.__module__ == self._name:
                old.cache_clear()  # it caches results of the old code

    def _drop_names(self, before: dict[str, object], old_code: CodeType | None, code: CodeType) -> None:
        """Delete names that the old source defined and the new one does not; names set by a program stay."""
        stored = stored_names(code)
        for name, value in before.items():
            if name in stored or name in _OF_IMPORT or name not in self._namespace:
                continue
            own = name in stored_names(old_code) if old_code is not None else is_own(value, self._name)
            if own and self._namespace[name] is value and f"{self._name}.{name}" not in sys.modules:
                del self._namespace[name]

    def _lookup_again(self) -> None:
        """Make the runtime look up the endpoints of changed actor classes again.

        Raises:
            Unsound: live actors cannot follow.
        """
        for cls in (getattr(self, "_classes", None) and self._classes.changed) or ():
            if issubclass(cls, Actor):
                try:
                    actor_class_changed(cls)
                except ValueError as e:
                    raise Unsound(f"class {cls.__qualname__}: {e}") from None

    def _follow(self, before: dict[str, object]) -> None:
        """Update names that other modules have imported from this one, and names imported from those modules."""
        todo: list[tuple[str, Mapping[str, object], Mapping[str, object]]] = [(self._name, before, self._namespace)]
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


# -- imports of a source --------------------------------------------------------------------------

_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})


class Imports:
    """Import statements of one source.

    Attributes:
        modules: the modules that it imports when executed, including possible ones (``b`` in ``from a import b``).
        names: its ``from`` imports outside functions and classes: (module, name in that module) by local name.

    Args:
        source: the text.
        name: of the module, to resolve relative imports.
        is_package: whether it is the ``__init__`` of a package.

    Raises:
        SyntaxError: the text is not Python.
    """

    def __init__(self, source: bytes | str, name: str, is_package: bool) -> None:
        self.modules: set[str] = set()
        self.names: dict[str, tuple[str, str]] = {}
        base = name if is_package else name.rpartition(".")[0]
        for node, at_top in _statements(ast.parse(source).body, True):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.modules.update(_with_parents(alias.name))
            elif isinstance(node, ast.ImportFrom):
                origin = _absolute(node, base)
                self.modules.update(_with_parents(origin))
                for alias in node.names:
                    self.modules.add(f"{origin}.{alias.name}")
                    if at_top:
                        self.names[alias.asname or alias.name] = (origin, alias.name)

    def names_from(self, module: str) -> dict[str, str]:
        """Return the names imported from one module: the name in that module by local name."""
        return {own: name for own, (origin, name) in self.names.items() if origin == module}


def _statements(body: Iterable[ast.stmt], at_top: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Iterate over all statements that run when the source is executed, and whether they bind names of the module."""
    for node in body:
        yield node, at_top
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inside = at_top and not isinstance(node, ast.ClassDef)
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, ()), inside)
        for handler in getattr(node, "handlers", ()):
            yield from _statements(handler.body, inside)
        for case in getattr(node, "cases", ()):
            yield from _statements(case.body, inside)


def _absolute(node: ast.ImportFrom, base: str) -> str:
    for _ in range(node.level - 1):
        base = base.rpartition(".")[0]
    if not node.level:
        return node.module or ""
    return ".".join(part for part in (base, node.module) if part)


def _with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def in_order(modules: Iterable[str], imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Sort modules so that each follows its imports; in a cycle, any module may be the first."""
    wanted = sorted(set(modules))
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        todo: list[tuple[str, Iterator[str]]] = [(name, iter(sorted(imports.get(name, ()))))]
        seen.add(name)
        while todo:
            current, inner = todo[-1]
            nearest = next((each for each in inner if each in chosen and each not in seen), None)
            if nearest is None:
                todo.pop()
                order.append(current)
            else:
                seen.add(nearest)
                todo.append((nearest, iter(sorted(imports.get(nearest, ())))))

    chosen = set(wanted)
    for name in wanted:
        if name not in seen:
            visit(name)
    return order


def stored_names(code: CodeType) -> set[str]:
    """Return the names that the code of a module or class sets in its namespace."""
    return {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _STORES}


# -- references -----------------------------------------------------------------------------------

#: Values that are equal by coincidence: they do not show where a name was imported from.
_COMMON = (int, float, complex, str, bytes, bool, type(None), tuple, frozenset, ModuleType)


def redirect(pairs: Mapping[int, tuple[Any, Any]], journal: Journal, skip: Iterable[object]) -> list[str]:
    """Replace references to new objects by references to old ones in mutable containers.

    Args:
        pairs: (new object, old object) by the id of the new object.
        skip: containers of the caller, which are left unchanged.

    Returns:
        Descriptions of references that could not be replaced.
    """
    # Four references are those of the module, the pair, this loop and the call. Few have more, and the heap is large.
    shared = [new for new, _old in pairs.values() if sys.getrefcount(new) > 4]
    if not shared:
        return []
    skipped = {id(each) for each in skip} | {id(pairs), id(shared)} | {id(pair) for pair in pairs.values()}
    left: list[str] = []
    for holder in gc.get_referrers(*shared):
        if id(holder) in skipped or isinstance(holder, FrameType):
            continue
        if isinstance(holder, dict):
            _in_dict(holder, pairs, journal)
        elif isinstance(holder, list):
            for at, value in enumerate(holder):
                if id(value) in pairs:
                    journal.note(lambda holder=holder, at=at, value=value: holder.__setitem__(at, value))
                    holder[at] = pairs[id(value)][1]
        elif isinstance(holder, set):
            for value in [value for value in holder if id(value) in pairs]:
                holder.discard(value)
                holder.add(pairs[id(value)][1])
        elif isinstance(holder, CellType):
            value = holder.cell_contents
            if id(value) in pairs:
                holder.cell_contents = pairs[id(value)][1]
        elif id(type(holder)) in pairs:
            old = pairs[id(type(holder))][1]
            try:
                holder.__class__ = old
            except TypeError:
                left.append(f"objects of class {old.__qualname__} that were made at import are of a class of their own")
    return list(dict.fromkeys(left))


def _in_dict(holder: dict[Any, Any], pairs: Mapping[int, tuple[Any, Any]], journal: Journal) -> None:
    owner = next((each for each in gc.get_referrers(holder) if isinstance(each, type)), None)
    for key, value in list(holder.items()):
        if id(value) in pairs:
            if owner is not None and vars(owner).get(key) is value:
                journal.set_in_class(owner, key, pairs[id(value)][1])  # bypassing its dict, whose lookups are cached
            else:
                journal.set_item(holder, key, pairs[id(value)][1])
        if id(key) in pairs:
            journal.note_dict(holder)
            holder[pairs[id(key)][1]] = holder.pop(key)


def follow_names(
    module: str,
    before: Mapping[str, object],
    after: Mapping[str, object],
    importers: Mapping[str, tuple[dict[str, object], Mapping[str, str]]],
    journal: Journal,
) -> list[str]:
    """Update names that other modules have imported from a module to their new values.

    Args:
        module: the name of the changed module.
        before, after: its namespace before and after the change.
        importers: by module name: the namespace of another module, and its imports from this one (the name in this
            module by local name).

    Returns:
        The updated names, as ``importer.name``.
    """
    changed = {name: (old, after[name]) for name, old in before.items() if name in after and after[name] is not old}
    objects = {id(old): new for old, new in changed.values() if not isinstance(old, _COMMON)}
    followed: list[str] = []
    for importer, (namespace, names) in importers.items():
        if importer == module:
            continue
        for own, value in list(namespace.items()):
            if id(value) in objects:
                new = objects[id(value)]
            elif names.get(own) in changed and value is changed[names[own]][0]:
                new = changed[names[own]][1]
            else:
                continue
            journal.set_item(namespace, own, new)
            followed.append(f"{importer}.{own}")
    return followed


def is_own(value: object, module: str) -> bool:
    """Return whether a value is a function or class that a module defines."""
    return isinstance(value, FunctionType | type) and value.__module__ == module


# Reload modules in a rank: an actor with a separate thread.

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
            module = sys.modules.pop(name)
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
