"""Find the content of a workspace at the client, and cache it between syncs."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from workspace_sync.environment.editables import Followed, editables, follow
from workspace_sync.environment.kinds import environment
from workspace_sync.environment.manifests import EnvironmentScan, environment_manifest, with_sources
from workspace_sync.model.manifest import Manifest, entry_path, printable
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import ContentTaker, Index, Scan, read_first, scan
from workspace_sync.transfer.blocks import Part

#: The parts of a workspace, as named on hosts.
TREE, ENVIRONMENT = "tree", "env"
# Only the name of an index: on hosts, editable installs are in the tree.
SOURCES = "sources"
#: The delay after a sync before the cache is written (seconds): ranks that follow the sync have priority.
_SAVE_DELAY = 0.5
#: The longest time by which the next sync may postpone the writing of the cache (seconds).
_SAVE_PATIENCE = 10.0


@dataclass
class ScannedWorkspace:
    """A workspace as found now.

    Attributes:
        parts: its tree and environment, as far as it has them.
        tree: the scan of its folders.
        sources: the scan of the editable installs of its environment.
        environment: the scan of its environment.
        notes: sentences for the user about the folders.
    """

    parts: list[Part] = field(default_factory=list[Part])
    tree: Scan | None = None
    sources: Scan | None = None
    environment: EnvironmentScan | None = None
    notes: list[str] = field(default_factory=list[str])

    @property
    def hashed(self) -> int:
        """The number of bytes that had to be read."""
        return sum(each.hashed for each in (self.tree, self.sources, self.environment) if each is not None)

    def digest(self, part: str) -> str:
        """Return the digest of a part (hex); empty if there is none."""
        return next((each.manifest.digest.hex() for each in self.parts if each.name == part), "")


class WorkspaceSource:
    """Source of one workspace at the client. Only one sync at a time uses it.

    Args:
        workspace: its id.
    """

    def __init__(self, workspace: str) -> None:
        self.lock = threading.Lock()
        self._indexes = {
            TREE: Index(workspace),
            ENVIRONMENT: Index(f"{workspace}-env"),
            SOURCES: Index(f"{workspace}-sources"),
        }
        self._last: dict[str, Manifest] = {}
        self._unsaved: dict[str, Manifest] = {}
        self._saver: threading.Thread | None = None

    def knows_nothing(self, workspace: Workspace) -> bool:
        """Return whether the workspace's folders are not cached, so that a scan reads all of them."""
        self._indexes[TREE].load(workspace.roots(), workspace.links)
        return not self._indexes[TREE].records

    def find(
        self,
        workspace: Workspace,
        progress: Callable[[int, int], None] | None,
        taker: ContentTaker | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> ScannedWorkspace:
        """Scan the folders and the environment.

        Args:
            workspace: the workspace to scan.
            progress: called with the number of bytes read, and their total, on any thread.
            taker: receives the content of the folders' files while they are read.
            cancelled: returns whether to stop; polled often.

        Raises:
            ScanError: they cannot be read, or keep changing; or the tree already has a folder with the name for
                editable installs.
        """
        found = ScannedWorkspace()
        roots = workspace.roots()
        about = environment(workspace.env) if workspace.env is not None else None
        followed = Followed({}, []) if about is None else follow(editables(about), roots)
        scans: list[Scan] = []
        if roots:
            index = self._indexes[TREE]
            found.tree = scan(workspace, index, progress=progress, cancelled=cancelled, save=False, taker=taker)
            scans.append(found.tree)
            found.notes += found.tree.notes
        if followed.dirs:
            # Separate from the workspace's own folders, one of which may be the root of the tree.
            sources = Workspace(followed.dirs, links="keep")
            found.sources = scan(sources, self._indexes[SOURCES], progress=progress, save=False)
            scans.append(found.sources)
        if scans:
            manifest = scans[0].manifest if len(scans) == 1 else with_sources(scans[0].manifest, scans[1].manifest)
            found.parts.append(
                Part(TREE, manifest, partial(read_first, [each.read for each in scans]), self._remembered(TREE))
            )
            found.notes += collisions(manifest, {**roots, **followed.dirs})
            version = about.version if about is not None else f"{sys.version_info[0]}.{sys.version_info[1]}"
            found.notes += stale_extensions(manifest, version)
        if about is not None:
            dirs = {**roots, **followed.dirs}
            with_python = workspace.env is not None and workspace.env.with_python
            index = self._indexes[ENVIRONMENT]
            env = environment_manifest(about, index, dirs=dirs, with_python=with_python, progress=progress)
            env.notes += followed.notes
            found.environment = env
            found.parts.append(Part(ENVIRONMENT, env.manifest, env.read, self._remembered(ENVIRONMENT)))
        return found

    def remember(self, found: ScannedWorkspace) -> None:
        """Keep the manifests that hosts have now, so that the next sync sends only the difference to them."""
        manifests = {part.name: part.manifest for part in found.parts}
        self._last.update(manifests)
        self._unsaved.update(manifests)

    def save_soon(self) -> None:
        """Write the cache in a thread. The caller holds the lock."""
        if self._saver is None and (self._unsaved or any(index.changed for index in self._indexes.values())):
            # Not a daemon thread: a program that ends after a sync still writes the cache.
            self._saver = threading.Thread(target=self._save, name="sync remember")
            self._saver.start()

    def _save(self) -> None:
        threading.main_thread().join(_SAVE_DELAY)
        if not self.lock.acquire(timeout=_SAVE_PATIENCE):
            self._saver = None  # the current holder of the lock calls this again
            return
        try:
            self._saver = None
            saves = [index.to_save() for index in self._indexes.values()]
            manifests, self._unsaved = self._unsaved, {}
        finally:
            self.lock.release()
        for save in saves:
            save()
        for part, manifest in manifests.items():
            self._indexes[part].remember(manifest)

    def _remembered(self, part: str) -> Callable[[bytes], Manifest | None]:
        def remembered(digest: bytes) -> Manifest | None:
            last = self._last.get(part)
            return last if last is not None and last.digest == digest else self._indexes[part].remembered(digest)

        return remembered


_lock = threading.Lock()
_sources: dict[str, WorkspaceSource] = {}


@contextmanager
def source_of(workspace: Workspace) -> Generator[WorkspaceSource]:
    """Hold the source of a workspace, which only one sync of this process uses at a time."""
    with _lock:
        source = _sources.setdefault(workspace.id, WorkspaceSource(workspace.id))
    with source.lock:
        try:
            yield source
        finally:
            source.save_soon()


_SOURCES = (b".c", b".cc", b".cpp", b".cxx", b".pyx", b".cu", b".rs", b".f90")
_ABI = re.compile(rb"\.cpython-(\d)(\d+)[a-z]*-[^.]*\.so\Z")

#: The digests of folders without extension modules: most have none, and are unchanged in the next sync.
_without: set[bytes] = set()
_MOST_KNOWN = 1 << 16


def stale_extensions(sources: Manifest, version: str) -> list[str]:
    """Describe extension modules that are older than a source beside them, or built for another Python.

    Args:
        sources: the folders with the sources.
        version: of the environment's Python, such as "3.11".
    """
    notes: list[str] = []
    for path, folder in sources.folders.items():
        if folder.digest in _without:
            continue
        if not any(name.endswith(b".so") for name in folder.files):
            if len(_without) >= _MOST_KNOWN:
                _without.clear()
            _without.add(folder.digest)
            continue
        newest = max((entry.mtime for name, entry in folder.files.items() if name.endswith(_SOURCES)), default=0)
        for name, entry in folder.files.items():
            if not name.endswith(b".so"):
                continue
            shown = printable(path + b"/" + name)
            found = _ABI.search(name)
            if found is not None and f"{int(found[1])}.{int(found[2])}" != version:
                notes.append(
                    f"{shown} is for Python {int(found[1])}.{int(found[2])}, and the environment has {version}"
                )
            elif entry.mtime < newest:
                notes.append(f"{shown} is older than a source beside it: build it again")
    return notes


# Every project has these, and they are not imported by name.
_EVERYWHERE = frozenset(b"__init__ __main__ conftest doc docs noxfile setup test tests versioneer".split())


def collisions(tree: Manifest, dirs: Mapping[str, str]) -> list[str]:
    """Describe top-level modules that exist in several folders.

    Args:
        tree: of the workspace.
        dirs: its folders (at the client), with their places in the tree.
    """
    if len(dirs) < 2:
        return []
    offered: dict[bytes, list[str]] = {}
    for here, place in sorted(dirs.items()):
        for inner in ("", "src"):
            where = os.fsencode("/".join(filter(None, (place, inner))))
            for name in _modules(tree, where):
                offered.setdefault(name, []).append(os.path.join(here, inner) if inner else here)
    return [
        f"{' and '.join(folders)} have a module {printable(name)} each: ranks import that of the folder that comes "
        "first in sys.path"
        for name, folders in sorted(offered.items())
        if len(folders) > 1
    ]


def _modules(tree: Manifest, place: bytes) -> set[bytes]:
    folder = tree.folders.get(place)
    if folder is None:
        return set()
    found = {name[:-3] for name in folder.files if name.endswith(b".py")}
    found |= {name for name in folder.folders if b"__init__.py" in tree.folders[entry_path(place, name)].files}
    return found - _EVERYWHERE
