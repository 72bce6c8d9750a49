"""The manifest of an environment: its files, with what is to be done to each on a host.

An environment is scanned without ignore rules. Left out are conda's package cache and the other environments of a
base environment (``pkgs``, ``envs``, ``conda-bld``), and compiled modules that no installer's record lists, so that an
import at the client does not change the environment. Hosts compile those when they import them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workspace_sync.environment.base import base_scan, with_base
from workspace_sync.environment.contents import Contents
from workspace_sync.environment.editables import editables, places
from workspace_sync.environment.facts import Needs, python_id
from workspace_sync.environment.kinds import Environment, NamedPrefix, environment
from workspace_sync.environment.memory import Judged, recall, recall_contents, remember
from workspace_sync.environment.prefixes import (
    Decisions,
    Records,
    applied,
    compiled_of,
    decide,
    glibc_floor,
    index_records,
    read_record,
    read_records,
)
from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import Folder, Manifest, Rewrite, delta, printable, seal
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, Scan, scan

#: What is left out of an environment; its own ``.meshignore`` may say more.
RULES = b"""\
!*
/pkgs/
/envs/
/conda-bld/
/.cache/
"""


@dataclass
class EnvironmentScan:
    """An environment as it is to be on hosts.

    Attributes:
        environment: what it is.
        manifest: its files.
        needs: what a host must have.
        notes: what a person should know.
        scans: the scans of its folder, and perhaps of its Python, which read content.
    """

    environment: Environment
    manifest: Manifest
    needs: Needs
    notes: list[str]
    scans: list[Scan]

    @property
    def hashed(self) -> int:
        """Bytes that had to be read to know it."""
        return sum(each.hashed for each in self.scans)

    def read(self, digest: bytes, into: memoryview) -> None:
        """Read one piece of content by its digest.

        Raises:
            KeyError: the environment has no such piece.
            ScanError: the file has changed since the scan.
        """
        reader(self.scans)(digest, into)


def reader(scans: Sequence[Scan]) -> Callable[[bytes, memoryview], None]:
    """Reads a piece of content from the first of some scans that has it."""

    def read(digest: bytes, into: memoryview) -> None:
        for each in scans[:-1]:
            try:
                each.read(digest, into)
            except KeyError:
                continue
            return
        scans[-1].read(digest, into)

    return read


def joined(tree: Manifest, sources: Manifest) -> Manifest:
    """The tree of a workspace with the folder of its environment's editable installs.

    Raises:
        ScanError: the tree has something of that name.
    """
    root, more = tree.folders[b""], sources.folders[b""]
    for name in more.folders:
        if name in root.folders or name in root.files or name in root.links:
            raise ScanError(
                f"the tree has {printable(name)!r}, which is where the editable installs of the environment go: "
                "rename it, or give its folder another place in the workspace"
            )
    folders = {**tree.folders, **{path: folder for path, folder in sources.folders.items() if path}}
    folders[b""] = Folder(root.mode, root.files, root.links, {**root.folders, **more.folders})
    return seal(folders, [b""])


def environment_manifest(
    env: Environment | NamedPrefix | str | os.PathLike[str],
    index: Index,
    *,
    dirs: Mapping[str, str] | None = None,
    with_python: bool = False,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> EnvironmentScan:
    """Scan an environment.

    Args:
        env: which one: its prefix, a uv project, or a ``CondaEnvironment``.
        index: remembers what it was, apart from the index of the workspace's folders.
        dirs: the folders of the workspace (absolute, links resolved) and their places in its tree, with those that
            ``follow`` asks for. Editable installs in them lead to the tree on hosts.
        with_python: send the Python of a venv along, for hosts that do not have it (``needs.base``).
        progress: as of ``scan``.
        cancelled: as of ``scan``.

    Raises:
        ScanError: it is none, cannot be read, or does not hold still.
        IncompatibleError: its Python cannot be sent along.
    """
    about = environment(env)
    workspace = Workspace({about.folder: ""}, links="keep")
    scanned = scan(workspace, index, rules=RULES, progress=progress, cancelled=cancelled)
    prefix = os.fsencode(about.prefix)
    found = recall(index, prefix, scanned.manifest.digest)
    if found is None:
        found = _judge(about, prefix, scanned.manifest, index)
    manifest = _leading_to_tree(about, found.manifest, prefix, dirs or {})
    if with_python and about.base:
        own = Index(os.path.basename(index.path) + "-python", os.path.dirname(os.path.dirname(index.path)))
        base, python = base_scan(about, own, progress=progress, cancelled=cancelled)
        manifest = with_base(manifest, python.manifest, about)
        native, glibc = found.native or python.native, max(found.glibc, python.glibc)
        needs = Needs(about.prefix, native, glibc, version=about.version)
        return EnvironmentScan(about, manifest, needs, list(found.notes), [scanned, base])
    base_id = python_id(about.base) if about.base else ""
    needs = Needs(about.prefix, found.native, found.glibc, about.base, base_id, about.version)
    return EnvironmentScan(about, manifest, needs, list(found.notes), [scanned])


def _judge(about: Environment, prefix: bytes, scanned: Manifest, index: Index) -> Judged:
    contents = Contents(about.folder, prefix, recall_contents(index, prefix))
    found = read_records(scanned, contents)
    _check_linked(about, scanned, found)
    decisions = decide(about, scanned, contents, found)
    manifest = applied(scanned, decisions, prefix, os.fsencode(about.folder))
    floor, machines = glibc_floor(manifest, contents)
    judged = Judged(prefix, scanned.digest, delta(None, manifest), decisions.notes, bool(machines), floor)
    remember(index, judged, scanned, contents.known)
    return judged


def _check_linked(about: Environment, scanned: Manifest, found: Records) -> None:
    """Raise if files of packages are links to an installer's cache, which hosts do not have."""
    linked = [
        path + b"/" + name
        for path, folder in scanned.folders.items()
        for name, target in folder.links.items()
        if target.startswith(b"/") and path + b"/" + name in found.rows
        if not target.startswith((os.fsencode(about.prefix) + b"/", os.fsencode(about.folder) + b"/"))
    ]
    if linked:
        raise ScanError(
            f"{len(linked)} files of packages in {about.prefix} are links to a cache, such as {printable(linked[0])}, "
            "and hosts do not have that: install them again as files, by `uv sync --reinstall --link-mode=copy`"
        )


def _leading_to_tree(about: Environment, manifest: Manifest, prefix: bytes, dirs: Mapping[str, str]) -> Manifest:
    """The manifest with editable installs that lead to the workspace's tree."""
    made = Decisions()
    contents = Contents(about.folder, prefix)
    for install in editables(about):
        path = os.fsencode(install.file)
        there = places(install, dirs)
        if not there or manifest.file(path) is None:
            continue
        made.rewrites[path] = Rewrite("text", prefix, 0, (), there)
        made.dropped |= compiled_of(path, manifest)
    if not made.rewrites:
        return manifest
    found = Records()
    sites = {path.rpartition(b"/")[0] for path in made.rewrites if not path.endswith(b".json")}
    for path in manifest.folders:
        # Only wheels have a RECORD, and an editable one says where it was installed from.
        if path.rpartition(b"/")[0] in sites and path + b"/direct_url.json" in made.rewrites:
            read_record(path + b"/RECORD", manifest, contents, found)
    index_records(manifest, contents, found, made)
    return applied(manifest, made, prefix, os.fsencode(about.folder))
