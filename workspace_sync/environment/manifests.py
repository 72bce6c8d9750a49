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

import hashlib
import os
import posixpath
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from workspace_sync.environment.editables import editables, tree_paths
from workspace_sync.environment.elf import Elf, read_elf
from workspace_sync.environment.facts import Needs, python_id
from workspace_sync.environment.kinds import Environment, environment, read_config
from workspace_sync.environment.rewriting import (
    mentions,
    record_hash,
    record_rows,
    restored_binary,
    restored_text,
    source_stamp,
)
from workspace_sync.model.errors import IncompatibleError, ScanError
from workspace_sync.model.manifest import (
    FileEntry,
    Folder,
    Manifest,
    ManifestDelta,
    Rewrite,
    delta,
    digest_of,
    entry_path,
    printable,
    seal,
)
from workspace_sync.model.workspace import CondaEnvironment, Workspace
from workspace_sync.scanning import Index, Scan, read_first, scan

# Decide how each file of an environment contains its prefix: by installers' records if they match, else by content.
#
# Source: conda's records (``conda-meta/*.json``): https://conda.org/learn/ceps/cep-0034/.

_T = TypeVar("_T")

_BLOCK = 4 << 20
# Magic numbers of code other than ELF. Other data, such as archives and databases, must not be changed.
_CODE = (b"!<arch>\n", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


class Content(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Facts about the content of a file.

    Attributes:
        mentions: the number of occurrences of the prefix.
        form: "text", "code" (ELF …), "data" (anything else that contains NULs), or "pyc".
        stamp: the time and size of the source of a .pyc; empty if it has none.
        machine: of an ELF file; empty for others.
        glibc: the version of glibc that an ELF file needs; empty if none.
        hidden: whether all mentions are in parts that are not loaded (debug information).
        runpath: whether all mentions are in search paths for shared libraries.
    """

    mentions: int
    form: str
    stamp: tuple[int, ...] = ()
    machine: str = ""
    glibc: tuple[int, ...] = ()
    hidden: bool = False
    runpath: bool = False


class Contents:
    """Reader of the files of one environment. It reads each content once.

    Args:
        folder: of the environment.
        prefix: as its files name it.
        known: the results of an earlier process, by digest.
    """

    def __init__(self, folder: str, prefix: bytes, known: dict[bytes, Content] | None = None) -> None:
        self.folder = os.fsencode(folder)
        self.prefix = prefix
        self.known = {} if known is None else known
        #: The number of bytes that had to be read.
        self.read_bytes = 0
        self._pattern = mentions(prefix)

    def content(self, path: bytes, entry: FileEntry) -> Content:
        """Return the facts about a file, which is read if necessary.

        Raises:
            ScanError: it cannot be read, or has changed since the scan.
        """
        known = self.known.get(entry.digest)
        if known is None:
            known = self.known[entry.digest] = self._open(path, entry, lambda fd: self._look(fd, path, entry))
        return known

    def data(self, path: bytes, entry: FileEntry) -> bytes:
        """Return the whole content of a small file.

        Raises:
            ScanError: it cannot be read, or has changed since the scan.
        """

        def read(fd: int) -> bytes:
            with os.fdopen(os.dup(fd), "rb") as file:
                return file.read()

        return self._open(path, entry, read)

    def _open(self, path: bytes, entry: FileEntry, use: Callable[[int], _T]) -> _T:
        try:
            fd = os.open(os.path.join(self.folder, path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as e:
            raise ScanError(f"{self._shown(path)} cannot be read: {e.strerror}") from None
        try:
            result = use(fd)
            # The scan has just hashed it. Its time and size show whether it has changed since.
            stat = os.fstat(fd)
        finally:
            os.close(fd)
        if (stat.st_size, stat.st_mtime_ns) != (entry.size, entry.mtime):
            raise ScanError(
                f"{self._shown(path)} changed while it was read: sync again when the environment is at rest"
            )
        self.read_bytes += entry.size
        return result

    def _shown(self, path: bytes) -> str:
        return printable(os.path.join(self.folder, path))

    def _look(self, fd: int, path: bytes, entry: FileEntry) -> Content:
        if not entry.size:
            return Content(0, "text")
        head = os.pread(fd, 16, 0)
        found, zeros = self._found(fd)
        if path.endswith(b".pyc"):
            return Content(len(found), "pyc", source_stamp(head) or ())
        if (elf := read_elf(lambda size, at: os.pread(fd, size, at))) is not None:
            loaded = self._loaded(found, elf)
            hidden = bool(found) and not loaded
            runpath = sum(len(self._pattern.findall(each)) for each in elf.runpaths)
            return Content(len(found), "code", (), elf.machine, elf.glibc, hidden, 0 < runpath == loaded)
        return Content(len(found), "code" if head.startswith(_CODE) else "data" if zeros else "text")

    @staticmethod
    def _loaded(found: list[int], elf: Elf) -> int:
        return sum(any(start <= at < end for start, end in elf.loaded) for at in found)

    def _found(self, fd: int) -> tuple[list[int], bool]:
        """Find the mentions of the prefix in a file, and whether it contains NULs, with the memory of one block.

        Files are read and not mapped: truncating a mapped file would end the process.
        """
        found: list[int] = []
        zeros = False
        keep = len(self.prefix) + 2  # the bytes after a match decide whether it is a mention
        at = 0
        data = b""
        while block := os.pread(fd, _BLOCK, at + len(data)):
            zeros = zeros or b"\0" in block
            data += block
            if self.prefix in data:
                end = len(data) - keep
                found += (at + match.start() for match in self._pattern.finditer(data) if match.start() < end)
            at += max(0, len(data) - keep)
            data = data[-keep:]
        found += (at + match.start() for match in self._pattern.finditer(data))
        return found, zeros


class CondaPath(msgspec.Struct, rename={"path": "_path"}):
    """A file that a conda package has installed.

    Attributes:
        path: in the prefix.
        sha256: of the file in the package (hex).
        size_in_bytes: in the package (conda) or in the prefix (rattler).
        file_mode: "text" or "binary", for a file that names the prefix.
        prefix_placeholder: the prefix at which it was built, for such a file.
    """

    path: str
    sha256: str | None = None
    size_in_bytes: int | None = None
    file_mode: str | None = None
    prefix_placeholder: str | None = None


class _Paths(msgspec.Struct):
    paths: list[CondaPath] = []


class CondaRecord(msgspec.Struct):
    """Record of one package that conda or rattler has installed.

    Attributes:
        name: of the package.
        files: its paths in the prefix.
        paths_data: the same with hashes.
    """

    name: str
    files: list[str] = []
    paths_data: _Paths = msgspec.field(default_factory=_Paths)


def conda_record(data: bytes) -> CondaRecord | None:
    """Decode a record of ``conda-meta``; return None if the file is not one."""
    try:
        return msgspec.json.decode(data, type=CondaRecord)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


_CACHE = b"__pycache__"
# The content of INSTALLER if uv has installed a distribution.
_UV = digest_of(b"uv")


@dataclass
class Records:
    """Records of the installers of an environment.

    Attributes:
        conda: the files of conda packages by path.
        conda_records: the paths of conda's records, with the packages.
        rows: the (hash, size) of files in RECORDs by path, and the RECORD's own path.
        record_files: the paths of the RECORDs.
        by_uv: the paths of RECORDs written by uv.
    """

    conda: dict[bytes, CondaPath] = field(default_factory=dict)
    conda_records: dict[bytes, CondaRecord] = field(default_factory=dict)
    rows: dict[bytes, tuple[str, str, bytes]] = field(default_factory=dict)
    record_files: list[bytes] = field(default_factory=list)
    by_uv: set[bytes] = field(default_factory=set)

    def lists(self, path: bytes) -> bool:
        """Return whether an installer's records list a file."""
        return path in self.conda or path in self.rows


def read_records(manifest: Manifest, contents: Contents) -> Records:
    """Read conda's records, and all RECORDs, of an environment."""
    found = Records()
    for path, folder in manifest.folders.items():
        if path == b"conda-meta":
            for name, entry in folder.files.items():
                if name.endswith(b".json"):
                    _read_conda(path + b"/" + name, entry, contents, found)
        elif path.endswith(b".dist-info") and b"RECORD" in folder.files:
            read_record(path + b"/RECORD", manifest, contents, found)
    return found


def read_record(path: bytes, manifest: Manifest, contents: Contents, found: Records) -> None:
    """Read one RECORD."""
    entry = manifest.file(path)
    if entry is None:
        return
    found.record_files.append(path)
    installer = manifest.file(path.removesuffix(b"RECORD") + b"INSTALLER")
    if installer is not None and installer.digest == _UV:
        found.by_uv.add(path)
    for listed, value, size in record_rows(contents.data(path, entry), path):
        found.rows[listed] = (value, size, path)


def _read_conda(path: bytes, entry: FileEntry, contents: Contents, found: Records) -> None:
    package = conda_record(contents.data(path, entry))
    if package is None:
        return
    found.conda_records[path] = package
    for name in package.files:
        found.conda[name.encode()] = CondaPath(name)
    for each in package.paths_data.paths:
        found.conda[each.path.encode()] = each


@dataclass
class Decisions:
    """Treatment of the files of an environment.

    Attributes:
        rewrites: the rewrites of files, by path.
        dropped: compiled modules that are left out, because no installer created them, or because they are out of date.
        notes: sentences for the user.
    """

    rewrites: dict[bytes, Rewrite] = field(default_factory=dict)
    dropped: set[bytes] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def decide(environment: Environment, manifest: Manifest, contents: Contents, found: Records) -> Decisions:
    """Decide for each file how its prefix is rewritten, and which compiled modules are included."""
    made = Decisions()
    prefix = contents.prefix
    compiled: list[tuple[bytes, FileEntry]] = []
    unchanged: list[str] = []
    for path, entry in manifest.files():
        if path.endswith(b".pyc"):
            compiled.append((path, entry))
            continue
        content = contents.content(path, entry)
        listed = found.conda.get(path)
        if path in found.conda_records or path in found.record_files:
            continue
        if not content.mentions:
            # The prefix may have been too long for the shebang, which was the only mention of it.
            data = contents.data(path, entry) if listed is not None and listed.file_mode == "text" else b""
            if listed is not None and data and (how := _as_recorded(data, prefix, listed)):
                made.rewrites[path] = how
            continue
        if how := _of_file(path, entry, contents, found):
            made.rewrites[path] = how
        elif not content.hidden:
            unchanged.append(printable(path))
    for path, entry in compiled:
        _decide_compiled(path, entry, manifest, contents, found, made)
    for path, package in found.conda_records.items():
        _index_conda(path, package, manifest, prefix, made)
    index_records(manifest, contents, found, made)
    if unchanged:
        made.notes.append(
            f"{len(unchanged)} data files name {printable(prefix)} and are copied as they are: " + _few(unchanged)
        )
    return made


def _of_file(path: bytes, entry: FileEntry, contents: Contents, found: Records) -> Rewrite | None:
    """Return the rewrite of a file that names the prefix; None: the file is copied unchanged."""
    prefix, content = contents.prefix, contents.content(path, entry)
    listed = found.conda.get(path)
    if listed is not None and listed.prefix_placeholder:
        if how := _as_recorded(contents.data(path, entry), prefix, listed):
            return how
        if listed.file_mode == "binary":
            return Rewrite("binary", prefix, len(listed.prefix_placeholder.encode()))
    if content.form == "text":
        if listed is not None or path not in found.rows:
            return Rewrite("text", prefix)
        return Rewrite("uv" if found.rows[path][2] in found.by_uv else "script", prefix)
    if content.form == "code" and not content.hidden:
        return Rewrite("runpath", prefix) if content.runpath else Rewrite("binary", prefix, len(prefix))
    return None


def _as_recorded(data: bytes, prefix: bytes, listed: CondaPath) -> Rewrite | None:
    """Return the rewriting that turns the file of the package into this file; None: the record does not match it."""
    if not listed.prefix_placeholder:
        return None
    placeholder = listed.prefix_placeholder.encode()
    if listed.file_mode == "binary":
        package = restored_binary(data, prefix, placeholder)
        if package is not None and hashlib.sha256(package).hexdigest() == listed.sha256:
            return Rewrite("binary", prefix, len(placeholder))
        return None
    for kind, package in restored_text(data, prefix, placeholder):
        if hashlib.sha256(package).hexdigest() == listed.sha256:
            return Rewrite(kind, prefix)
    return None


def _decide_compiled(
    path: bytes, entry: FileEntry, manifest: Manifest, contents: Contents, found: Records, made: Decisions
) -> None:
    content = contents.content(path, entry)
    cached = path.rpartition(b"/")[0].endswith(_CACHE)
    # If a source names the prefix, the module depends on more than its strings (see ``rewriting``).
    if cached and (not found.lists(path) or source_of(path) in made.rewrites or is_stale(path, content, manifest)):
        made.dropped.add(path)
    elif content.mentions:
        made.rewrites[path] = Rewrite("pyc", contents.prefix)


def source_of(path: bytes) -> bytes:
    """Return the source of a compiled module in a ``__pycache__``."""
    folder, _, name = path.rpartition(b"/")
    return posixpath.join(posixpath.dirname(folder), name.partition(b".")[0] + b".py")


def is_stale(path: bytes, content: Content, manifest: Manifest) -> bool:
    """Return whether a compiled module in a ``__pycache__`` was compiled from another source than the present one."""
    if not path.rpartition(b"/")[0].endswith(_CACHE):
        return False
    source = manifest.file(source_of(path))
    return source is None or not _is_current(content.stamp, source)


def _is_current(stamp: tuple[int, ...], source: FileEntry) -> bool:
    if not stamp:
        return True
    return stamp == (source.mtime // 10**9 & 0xFFFFFFFF, source.size & 0xFFFFFFFF)


def _index_conda(path: bytes, package: CondaRecord, manifest: Manifest, prefix: bytes, made: Decisions) -> None:
    files: list[bytes] = []
    sizes = True
    for each in package.paths_data.paths:
        name = each.path.encode()
        entry = manifest.file(name)
        if name in made.rewrites and entry is not None:
            files.append(name)
            sizes = sizes and each.size_in_bytes == entry.size
    if files:
        made.rewrites[path] = Rewrite("rattler" if sizes else "conda", prefix, 0, tuple(files))


def compiled_of(path: bytes, manifest: Manifest) -> set[bytes]:
    """Return the compiled modules of a source."""
    folder, _, name = path.rpartition(b"/")
    cache = folder + b"/__pycache__" if folder else b"__pycache__"
    stem = name.removesuffix(b".py") + b"."
    there = manifest.folders.get(cache)
    return set() if there is None else {cache + b"/" + each for each in there.files if each.startswith(stem)}


def index_records(manifest: Manifest, contents: Contents, found: Records, made: Decisions) -> None:
    """Make each RECORD depend on the rewritten files that it lists, so that it is rewritten after them."""
    files: dict[bytes, list[bytes]] = {}
    for path, (value, _, record) in found.rows.items():
        entry = manifest.file(path)
        if not value or entry is None or (path not in made.rewrites and entry.rewrite is None):
            continue
        # If a hash is wrong now, the host must not correct it.
        if record_hash(contents.data(path, entry)) == value:
            files.setdefault(record, []).append(path)
    for record in found.record_files:
        entry = manifest.file(record)
        if entry is not None and (record in files or contents.content(record, entry).mentions):
            made.rewrites[record] = Rewrite("record", contents.prefix, 0, tuple(files.get(record, ())))


def _few(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def glibc_floor(manifest: Manifest, contents: Contents) -> tuple[tuple[int, ...], set[str]]:
    """Return the newest glibc that compiled code of an environment needs, and the machines that the code is for."""
    floor: tuple[int, ...] = ()
    machines: set[str] = set()
    for content in _all(manifest, contents):
        if content.machine:
            machines.add(content.machine)
            floor = max(floor, content.glibc)
    return floor, machines


def _all(manifest: Manifest, contents: Contents) -> Iterator[Content]:
    for _, entry in manifest.files():
        if (content := contents.known.get(entry.digest)) is not None:
            yield content


def applied(manifest: Manifest, decisions: Decisions, prefix: bytes, folder: bytes) -> Manifest:
    """Apply the decisions to a manifest; unchanged parts are shared with the given one, not copied."""
    changed: dict[bytes, Folder] = {}

    def of(path: bytes) -> Folder:
        if path not in changed:
            changed[path] = manifest.folders[path].copy()
        return changed[path]

    for path, how in decisions.rewrites.items():
        parent, _, name = path.rpartition(b"/")
        files = of(parent).files
        files[name] = msgspec.structs.replace(files[name], rewrite=how)
    for path in decisions.dropped:
        parent, _, name = path.rpartition(b"/")
        del of(parent).files[name]
    for path, each in manifest.folders.items():
        for name, target in each.links.items():
            if (inside := _inside(target, prefix, folder)) is not None:
                of(path).links[name] = posixpath.relpath(inside or b".", path or b".")
    gone: set[bytes] = set()
    for path in [p for p in changed if p.endswith(b"__pycache__")]:
        each = changed[path]
        if not (each.files or each.links or each.folders):
            parent, _, name = path.rpartition(b"/")
            del of(parent).folders[name]
            gone.add(path)
    folders = {path: changed.get(path, each) for path, each in manifest.folders.items() if path not in gone}
    return seal(folders, [path for path in changed if path not in gone])


def _inside(target: bytes, prefix: bytes, folder: bytes) -> bytes | None:
    """Return the path in the environment that an absolute link leads to; None: it leads elsewhere."""
    for root in (prefix, folder):
        if target == root:
            return b""
        if target.startswith(root + b"/"):
            return target[len(root) + 1 :]
    return None


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
