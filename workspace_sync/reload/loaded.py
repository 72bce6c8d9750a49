"""Record the modules of a workspace that this process has imported, and their sources.

After the first ``watch``, an import hook loads modules of the workspace from their source and records its digest. The
loaded source is then known exactly, independent of times and compiled files. A module that was imported earlier is
compared with its file: the code of its functions and its constants must match the source. If the file has changed since
this process began, a match is likely but not certain, and an announced change of the file counts as a change.
"""

from __future__ import annotations

import ast
import importlib
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from workspace_sync.model.manifest import digest_of
from workspace_sync.reload.classes import codes_of, functions_of

_CURRENT = "/current/tree"
# Pattern of the path that replaces `current/tree` when links are resolved, in this tree and in earlier ones.
_RESOLVED = r"/(?:generations/[^/]+/tree|slots/[^/]+)"


class Folders:
    """The folders of a workspace.

    Args:
        pairs: each folder of the client with its folder on the host. A folder with two equal names is used in place,
            for example by ranks on the client's host before any sync.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        # The host's own folders first: a path in one of them is not searched for among those of the client.
        self.pairs = sorted({(_plain(here), _plain(there)) for here, there in pairs}, key=lambda p: (p[0] == p[1], p))
        self._earlier: list[tuple[re.Pattern[str], str, str]] = []
        for here, there in self.pairs:
            root, current, place = there.rpartition(_CURRENT)
            if current:
                real = os.path.realpath(root)
                roots = "|".join(re.escape(each) for each in dict.fromkeys((root, real)))
                pattern = re.compile(rf"(?:{roots}){_RESOLVED}{re.escape(place)}(?=/|$)")
                self._earlier.append((pattern, here, there))

    def at_client(self, path: str) -> str | None:
        """Return the client's path of a file; None if it is not in the workspace."""
        for here, there in self.pairs:
            rest = _below(path, there)
            if rest is not None:
                return here + rest
        for pattern, here, _there in self._earlier:
            found = pattern.match(path)
            if found is not None:
                return here + path[found.end() :]
        for here, _there in self.pairs:
            if _below(path, here) is not None:
                return path
        return None

    def outside(self, paths: Iterable[str]) -> str:
        """Return the first folder of the client with one of these paths although the host has its own; else ""."""
        for path in paths:
            if any(_below(path, there) is not None for _here, there in self.pairs):
                continue
            for here, there in self.pairs:
                if here != there and _below(path, here) is not None:
                    return here
        return ""

    def now(self, path: str) -> str:
        """Return the path of a file in the host's current tree; unchanged if the file is not in a former tree."""
        for pattern, _here, there in self._earlier:
            found = pattern.match(path)
            if found is not None:
                return there + path[found.end() :]
        return path


def _plain(folder: str) -> str:
    return folder.rstrip("/") or "/"


def _below(path: str, folder: str) -> str | None:
    if path == folder:
        return ""
    return path[len(folder) :] if path.startswith(folder + "/") else None


# Reloading the modules that do the reload is not sound.
_OURS = frozenset({"monarch_kernel", "workspace_sync"})
_PREFIXES = frozenset({sys.prefix, sys.base_prefix, sys.exec_prefix})


@dataclass(slots=True)
class Loaded:
    """Source of a loaded module.

    Attributes:
        path: the path of the file in the module.
        client: the path of the file at the client.
        digest: of the loaded source; empty if unknown.
        source: the text of the source; empty if unknown, or if the module has no source.
        certain: whether the digest is certain, and not only likely.
    """

    path: str
    client: str
    digest: bytes = b""
    source: bytes = b""
    certain: bool = True


class _Recording(SourceFileLoader):
    """Loader that loads a module from its source, never from a compiled file, and records the source."""

    def get_code(self, fullname: str) -> CodeType:
        """See ``importlib.abc.InspectLoader``."""
        path = self.get_filename(fullname)
        data = self.get_data(path)
        code = self.source_to_code(data, path)
        client = loaded_modules.folders.at_client(path)
        if client is not None:
            loaded_modules.note(fullname, Loaded(path, client, digest_of(data), data))
        return code


class _Finder:
    """Finder just before the standard file finder, with the same results."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or type(spec.loader) is not SourceFileLoader:
            return spec
        if loaded_modules.folders.at_client(spec.origin) is not None and not is_left_out(name, spec.origin):
            spec.loader = _Recording(name, spec.origin)
        return spec

    @staticmethod
    def invalidate_caches() -> None:
        """Do nothing: the next finder handles this."""


class LoadedModules:
    """The imports of this process. See ``loaded_modules``."""

    def __init__(self) -> None:
        self.folders = Folders(())
        self._known: dict[str, Loaded] = {}
        self._finder: Any = None
        self._lock = threading.RLock()

    def watch(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Record imports from these folders (client, host), in addition to earlier ones."""
        with self._lock:
            both = {*self.folders.pairs, *pairs}
            if len(both) != len(self.folders.pairs):
                self.folders = Folders(both)
            if self._finder is None or self._finder not in sys.meta_path:
                self._finder = _Finder()
                at = next((i for i, each in enumerate(sys.meta_path) if each is PathFinder), len(sys.meta_path))
                sys.meta_path.insert(at, self._finder)
            self.look()

    def close(self) -> None:
        """Stop recording imports, and drop the records."""
        with self._lock:
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            self.folders = Folders(())
            self._known.clear()

    def note(self, name: str, loaded: Loaded) -> None:
        """Record the source that a module is loaded from."""
        self._known[name] = loaded

    def forget(self, names: Iterable[str]) -> None:
        """Drop the records of modules that are removed."""
        for name in names:
            self._known.pop(name, None)

    def look(self) -> dict[str, Loaded]:
        """Return all modules of the workspace that are imported now, by name."""
        with self._lock:
            found: dict[str, Loaded] = {}
            unknown: dict[str, tuple[ModuleType, str, str]] = {}
            for name, module in list(sys.modules.items()):
                path = source_path(module)
                client = self.folders.at_client(path) if path else None
                if path is None or client is None or is_left_out(name, path):
                    continue
                known = self._known.get(name)
                if known is not None and known.path == path:
                    found[name] = known
                else:
                    unknown[name] = module, path, client
            if unknown:
                began = _process_began()
                functions = functions_of(vars(module) for module, _, _ in unknown.values())
                for name, (module, path, client) in unknown.items():
                    codes = {each.__code__ for each in functions[id(vars(module))]}
                    self._known[name] = found[name] = _compared(module, path, client, codes, began)
            return found


loaded_modules = LoadedModules()
"""The record of this process: there is one, as there is one ``sys.modules``."""


def source_path(module: ModuleType) -> str | None:
    """Return the absolute path of the file that a module was loaded from; None for a namespace package."""
    spec = getattr(module, "__spec__", None)
    path = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    if not isinstance(path, str) or not os.path.isabs(path):  # built in, frozen, or created by a program
        return None
    if path.endswith((".pyc", ".pyo")):  # without its source
        return None
    return os.path.normpath(path)


def is_left_out(name: str, path: str) -> bool:
    """Return whether a module is installed or of this package, even if its file is in a workspace."""
    if name.partition(".")[0] in _OURS or "/site-packages/" in path or "/dist-packages/" in path:
        return True
    return any(path.startswith(os.path.join(prefix, "lib") + os.sep) for prefix in _PREFIXES)


def is_extension(path: str) -> bool:
    """Return whether a file is an extension module."""
    return path.endswith(tuple(EXTENSION_SUFFIXES))


def _compared(module: ModuleType, path: str, client: str, codes: set[CodeType], began: float) -> Loaded:
    """Compare a module that was imported earlier with its file, and return its record."""
    unknown = Loaded(path, client)
    try:
        changed = os.stat(path).st_ctime
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return unknown
    certain = changed < began - 0.1  # file system clocks tick in steps
    if is_extension(path):
        return Loaded(path, client, digest_of(data), certain=certain)
    try:
        same = _is_from(module, compile(data, path, "exec", dont_inherit=True), data, codes)
    except (SyntaxError, ValueError):
        return unknown
    return Loaded(path, client, digest_of(data), data, certain) if same else unknown


def _is_from(module: ModuleType, code: CodeType, data: bytes, live: set[CodeType]) -> bool:
    known = {each for same in codes_of(code).values() for each in same}
    names = {each.co_qualname for each in known}
    mine = {each for each in live if each.co_qualname in names and each.co_filename == module.__file__}
    return mine <= known and all(vars(module).get(name, value) == value for name, value in _constants(data))


def _constants(data: bytes) -> list[tuple[str, object]]:
    """Return the names of a source that are set once, to a constant."""
    values: dict[str, list[object]] = {}
    for node in ast.parse(data).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = node.value.value if isinstance(node.value, ast.Constant) else Ellipsis
            values.setdefault(node.targets[0].id, []).append(value)
    return [(name, found[0]) for name, found in values.items() if len(found) == 1 and found[0] is not Ellipsis]


def _process_began() -> float:
    """Return the start time of this process (seconds since the epoch)."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


def enter_new_tree(folders: Folders) -> str:
    """Enter the host's current tree: reset the working directory, and the caches of imports and source lines.

    Returns:
        Why the working directory could not be re-entered; "" on success, or if it is not in the workspace.
    """
    importlib.invalidate_caches()
    for path in [path for path in sys.path_importer_cache if folders.at_client(path) is not None]:
        del sys.path_importer_cache[path]
    for path in [path for path in linecache.cache if folders.at_client(path) is not None]:
        linecache.checkcache(path)
    try:
        here = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    except OSError:
        return ""
    there = folders.now(here)
    client = folders.at_client(here)
    if there == here or client is None:
        return ""
    try:
        os.chdir(there)
    except OSError as e:
        return f"its working directory {here} is of an earlier tree, and {there} cannot be entered: {e.strerror}"
    return ""
