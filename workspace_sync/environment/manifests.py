"""Scan an environment: its files, and how each of them is rewritten on a host.

An environment is scanned without ignore rules. The scan leaves out conda's package cache and the other environments of
a base environment (``pkgs``, ``envs``, ``conda-bld``). It also leaves out compiled modules that no installer's record
lists, so that an import at the client does not change the environment. Hosts compile these modules on import.

The Python that a venv was created from is outside the venv, whose links and ``home`` point to it. Either a host has the
same Python at the same path (``python_id``), or the Python is sent too, in the folder ``.python`` of the environment.
Pythons of uv, pyenv and conda can be moved in this way; the system's Python cannot.

Results are cached in two files beside the index of the scan, so that an unchanged environment is neither read nor
analyzed again. Without these files, everything is analyzed again.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from workspace_sync.environment.editables import editables, tree_paths
from workspace_sync.environment.facts import Needs, python_id
from workspace_sync.environment.kinds import Environment, environment, read_config
from workspace_sync.environment.prefixes import (
    Content,
    Contents,
    Decisions,
    Records,
    applied,
    compiled_of,
    decide,
    glibc_floor,
    index_records,
    is_stale,
    read_record,
    read_records,
)
from workspace_sync.model.errors import IncompatibleError, ScanError
from workspace_sync.model.manifest import Folder, Manifest, ManifestDelta, Rewrite, delta, entry_path, printable, seal
from workspace_sync.model.workspace import CondaEnvironment, Workspace
from workspace_sync.scanning import Index, Scan, read_first, scan

#: Entries left out of an environment; its ``.meshignore`` may change this.
RULES = b"""\
!*
/pkgs/
/envs/
/conda-bld/
/.cache/
"""


@dataclass
class EnvironmentScan:
    """An environment in the form that hosts get.

    Attributes:
        environment: its identity.
        manifest: its files.
        needs: the requirements on a host.
        notes: sentences for the user.
        scans: the scans of its folder and, if it is sent, of its Python; they read content.
    """

    environment: Environment
    manifest: Manifest
    needs: Needs
    notes: list[str]
    scans: list[Scan]

    @property
    def hashed(self) -> int:
        """The number of bytes that had to be read for the scan."""
        return sum(each.hashed for each in self.scans)

    def read(self, digest: bytes, into: memoryview) -> None:
        """Read one piece of content by its digest.

        Raises:
            KeyError: the environment has no such piece.
            ScanError: the file has changed since the scan.
        """
        read_first([each.read for each in self.scans], digest, into)


def with_sources(tree: Manifest, sources: Manifest) -> Manifest:
    """Add the folder with the sources of the environment's editable installs to the tree of a workspace.

    Raises:
        ScanError: the tree already has an entry of that name.
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
    env: Environment | CondaEnvironment | str | os.PathLike[str],
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
        index: the cache of scans; a separate one from the index of the workspace's folders.
        dirs: the folders of the workspace (absolute, links resolved), including those added by ``follow``, and their
            places in its tree. On hosts, editable installs of these folders point to the tree.
        with_python: include the Python of a venv, for hosts that do not have it (``needs.base``).
        progress: as for ``scan``.
        cancelled: as for ``scan``.

    Raises:
        ScanError: it is not an environment, cannot be read, or keeps changing.
        IncompatibleError: its Python cannot be included.
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
    """Raise if files of packages are links into an installer's cache, which hosts do not have."""
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
    """Return the manifest with editable installs that point into the workspace's tree."""
    made = Decisions()
    contents = Contents(about.folder, prefix)
    for install in editables(about):
        path = os.fsencode(install.file)
        there = tree_paths(install, dirs)
        if not there or manifest.file(path) is None:
            continue
        made.rewrites[path] = Rewrite("text", prefix, 0, (), there)
        made.dropped |= compiled_of(path, manifest)
    if not made.rewrites:
        return manifest
    found = Records()
    sites = {path.rpartition(b"/")[0] for path in made.rewrites if not path.endswith(b".json")}
    for path in manifest.folders:
        # Only wheels have a RECORD; that of an editable one records where it was installed from.
        if path.rpartition(b"/")[0] in sites and path + b"/direct_url.json" in made.rewrites:
            read_record(path + b"/RECORD", manifest, contents, found)
    index_records(manifest, contents, found, made)
    return applied(manifest, made, prefix, os.fsencode(about.folder))


# -- cache between runs --------------------------------------------------------------------------

# Increased with every change of the rules, so that older caches are ignored.
_MEMORY_VERSION = 2
_RESULT, _CONTENTS = "environment", "contents"


class Judged(msgspec.Struct, array_like=True):
    """Results of the analysis of an environment.

    Attributes:
        prefix: as written in its files.
        scanned: the digest of its folder at the scan.
        change: the complete manifest, with the rewrite of each file.
        notes: sentences for the user.
        native: whether it has compiled code.
        glibc: the version of glibc that its compiled code needs.
    """

    prefix: bytes
    scanned: bytes
    change: ManifestDelta
    notes: list[str]
    native: bool
    glibc: tuple[int, ...]
    version: int = _MEMORY_VERSION

    @property
    def manifest(self) -> Manifest:
        """The complete manifest."""
        return Manifest(self.change.folders)


class _Contents(msgspec.Struct, array_like=True):
    prefix: bytes
    known: dict[bytes, Content]
    version: int = _MEMORY_VERSION


# Results found by this process, by index.
_last: weakref.WeakKeyDictionary[Index, Judged] = weakref.WeakKeyDictionary()


def recall(index: Index, prefix: bytes, scanned: bytes) -> Judged | None:
    """Return the cached analysis of an environment; None if the environment has changed."""
    found = _last.get(index)
    if found is None:
        data = index.load_file(_RESULT)
        if data is None:
            return None
        try:
            found = msgspec.msgpack.decode(data, type=Judged)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if found.version != _MEMORY_VERSION:
            return None
        _last[index] = found
    return found if (found.prefix, found.scanned) == (prefix, scanned) else None


def recall_contents(index: Index, prefix: bytes) -> dict[bytes, Content]:
    """Return the cached facts about the content of files, by digest."""
    data = index.load_file(_CONTENTS)
    if data is None:
        return {}
    try:
        found = msgspec.msgpack.decode(data, type=_Contents)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found.known if (found.prefix, found.version) == (prefix, _MEMORY_VERSION) else {}


def remember(index: Index, judged: Judged, scanned: Manifest, known: dict[bytes, Content]) -> None:
    """Cache the findings about the files that exist now."""
    _last[index] = judged
    index.save_file(_RESULT, msgspec.msgpack.encode(judged))
    present = {entry.digest for _, entry in scanned.files()}
    kept = {digest: content for digest, content in known.items() if digest in present}
    index.save_file(_CONTENTS, msgspec.msgpack.encode(_Contents(judged.prefix, kept)))


# -- the Python that a venv was created from ------------------------------------------------------

#: Its folder in the environment on hosts.
_PYTHON = b".python"
# Tests and static libraries are not needed to run anything.
_PYTHON_RULES = """\
!*
/pkgs/
/envs/
/conda-bld/
/share/doc/
/share/man/
/lib/*.a
/lib/python{version}/test/
/lib/python{version}/config-*/*.a
"""


def base_scan(
    environment: Environment,
    index: Index,
    *,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> tuple[Scan, Judged]:
    """Scan the Python of a venv.

    Args:
        index: the cache of scans; a separate one from that of the environment.

    Raises:
        IncompatibleError: it cannot be included; the message names the reason.
        ScanError: it cannot be read, or keeps changing.
    """
    base = os.path.realpath(environment.base)
    _check_relocatable(environment, base)
    rules = _PYTHON_RULES.format(version=environment.version)
    config = read_config(environment.prefix) or {}
    if config.get("include-system-site-packages", "").lower() != "true":
        rules += f"/lib/python{environment.version}/site-packages/*\n"
    scanned = scan(
        Workspace({base: ""}, links="keep"), index, rules=rules.encode(), progress=progress, cancelled=cancelled
    )
    prefix = os.fsencode(base)
    judged = recall(index, prefix, scanned.manifest.digest)
    if judged is None:
        contents = Contents(base, prefix, recall_contents(index, prefix))
        manifest = applied(scanned.manifest, _decide_python(scanned.manifest, contents), prefix, prefix)
        floor, machines = glibc_floor(manifest, contents)
        judged = Judged(prefix, scanned.manifest.digest, delta(None, manifest), [], bool(machines), floor)
        remember(index, judged, scanned.manifest, contents.known)
    return scanned, judged


def _check_relocatable(environment: Environment, base: str) -> None:
    what = f"the venv {environment.prefix} was made from the Python at {environment.base}"
    if base in ("/", "/usr", "/usr/local"):
        raise IncompatibleError(
            f"{what}, which belongs to the system and cannot be sent along: install the same Python on the hosts, or "
            "make the environment from a Python of uv, pyenv or conda"
        )
    if not os.path.isdir(os.path.join(base, "lib", f"python{environment.version}")):
        raise IncompatibleError(
            f"{what}, which has no lib/python{environment.version}: make the environment anew from a Python that is "
            "there"
        )


def _decide_python(manifest: Manifest, contents: Contents) -> Decisions:
    made = Decisions()
    for path, entry in manifest.files():
        content = contents.content(path, entry)
        if content.form == "pyc":
            if is_stale(path, content, manifest):
                made.dropped.add(path)
        elif content.runpath:
            made.rewrites[path] = Rewrite("runpath", contents.prefix, 0, (), ((contents.prefix, _PYTHON),))
    return made


def with_base(manifest: Manifest, base: Manifest, environment: Environment) -> Manifest:
    """Return the manifest of a venv with its Python included."""
    folders = {entry_path(_PYTHON, path) if path else _PYTHON: folder.copy() for path, folder in base.folders.items()}
    folders.update(manifest.folders)
    root = folders[b""] = folders[b""].copy()
    root.folders[_PYTHON] = base.digest
    changed = [b"", _PYTHON]
    prefix = os.fsencode(environment.prefix)
    named = [os.fsencode(path) for path in dict.fromkeys((environment.base, os.path.realpath(environment.base)))]
    if (entry := root.files.get(b"pyvenv.cfg")) is not None:
        how = Rewrite("home", prefix, 0, (), tuple((path, _PYTHON) for path in named))
        root.files[b"pyvenv.cfg"] = msgspec.structs.replace(entry, rewrite=how)
    for path, folder in manifest.folders.items():
        for name, target in folder.links.items():
            for each in named:
                if target.startswith(each + b"/"):
                    if path not in changed:
                        changed.append(path)
                        folders[path] = folders[path].copy()
                    up = b"../" * (path.count(b"/") + 1) if path else b""
                    folders[path].links[name] = up + _PYTHON + target[len(each) :]
                    break
    return seal(folders, changed)
