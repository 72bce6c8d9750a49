"""How each file of an environment names its prefix: by installers' records where they are true, else by content."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from workspace_sync.environment import binary, hashes, records, text
from workspace_sync.environment.contents import Content, Contents
from workspace_sync.environment.kinds import Environment
from workspace_sync.model.manifest import FileEntry, Folder, Manifest, Rewrite, digest_of, printable, seal

_CACHE = b"__pycache__"
# What INSTALLER says if uv has installed a distribution.
_UV = digest_of(b"uv")


@dataclass
class Records:
    """What the installers of an environment have written down.

    Attributes:
        conda: the files of conda packages by path.
        conda_records: the paths of conda's records, with the packages.
        rows: the (hash, size) of files in RECORDs by path, and the RECORD's own path.
        record_files: the RECORDs' paths.
        by_uv: the RECORDs that uv has written.
    """

    conda: dict[bytes, records.CondaPath] = field(default_factory=dict)
    conda_records: dict[bytes, records.CondaRecord] = field(default_factory=dict)
    rows: dict[bytes, tuple[str, str, bytes]] = field(default_factory=dict)
    record_files: list[bytes] = field(default_factory=list)
    by_uv: set[bytes] = field(default_factory=set)

    def lists(self, path: bytes) -> bool:
        """Whether an installer says that it has made a file."""
        return path in self.conda or path in self.rows


def read_records(manifest: Manifest, contents: Contents) -> Records:
    """Read conda's records, and each RECORD, of an environment."""
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
    for listed, value, size in hashes.rows(contents.data(path, entry), path):
        found.rows[listed] = (value, size, path)


def _read_conda(path: bytes, entry: FileEntry, contents: Contents, found: Records) -> None:
    package = records.conda_record(contents.data(path, entry))
    if package is None:
        return
    found.conda_records[path] = package
    for name in package.files:
        found.conda[name.encode()] = records.CondaPath(name)
    for each in package.paths_data.paths:
        found.conda[each.path.encode()] = each


@dataclass
class Decisions:
    """How the files of an environment are treated.

    Attributes:
        rewrites: by path.
        dropped: compiled modules that are left out: those that no installer made, and those that are out of date.
        notes: what a person should know.
    """

    rewrites: dict[bytes, Rewrite] = field(default_factory=dict)
    dropped: set[bytes] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def decide(environment: Environment, manifest: Manifest, contents: Contents, found: Records) -> Decisions:
    """Decide for each file how its prefix is rewritten, and which compiled modules come along."""
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
            # The prefix may have been too long for the shebang, and was then the only mention.
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
    """How a file that names the prefix is rewritten; None: it is not."""
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


def _as_recorded(data: bytes, prefix: bytes, listed: records.CondaPath) -> Rewrite | None:
    """The rewriting that leads from what is in the package to the file; None: the record is not true of it."""
    if not listed.prefix_placeholder:
        return None
    placeholder = listed.prefix_placeholder.encode()
    if listed.file_mode == "binary":
        package = binary.restored(data, prefix, placeholder)
        if package is not None and hashlib.sha256(package).hexdigest() == listed.sha256:
            return Rewrite("binary", prefix, len(placeholder))
        return None
    for kind, package in text.restored(data, prefix, placeholder):
        if hashlib.sha256(package).hexdigest() == listed.sha256:
            return Rewrite(kind, prefix)
    return None


def _decide_compiled(
    path: bytes, entry: FileEntry, manifest: Manifest, contents: Contents, found: Records, made: Decisions
) -> None:
    content = contents.content(path, entry)
    cached = path.rpartition(b"/")[0].endswith(_CACHE)
    # The compiler puts more than strings of a source that names the prefix into the module.
    if cached and (not found.lists(path) or source_of(path) in made.rewrites or is_stale(path, content, manifest)):
        made.dropped.add(path)
    elif content.mentions:
        made.rewrites[path] = Rewrite("pyc", contents.prefix)


def source_of(path: bytes) -> bytes:
    """The source of a compiled module in a ``__pycache__``."""
    folder, _, name = path.rpartition(b"/")
    return posixpath.join(posixpath.dirname(folder), name.partition(b".")[0] + b".py")


def is_stale(path: bytes, content: Content, manifest: Manifest) -> bool:
    """Whether a compiled module in a ``__pycache__`` is not of the source that is there."""
    if not path.rpartition(b"/")[0].endswith(_CACHE):
        return False
    source = manifest.file(source_of(path))
    return source is None or not _is_current(content.stamp, source)


def _is_current(stamp: tuple[int, ...], source: FileEntry) -> bool:
    if not stamp:
        return True
    return stamp == (source.mtime // 10**9 & 0xFFFFFFFF, source.size & 0xFFFFFFFF)


def _index_conda(path: bytes, package: records.CondaRecord, manifest: Manifest, prefix: bytes, made: Decisions) -> None:
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
    """The compiled modules of a source."""
    folder, _, name = path.rpartition(b"/")
    cache = folder + b"/__pycache__" if folder else b"__pycache__"
    stem = name.removesuffix(b".py") + b"."
    there = manifest.folders.get(cache)
    return set() if there is None else {cache + b"/" + each for each in there.files if each.startswith(stem)}


def index_records(manifest: Manifest, contents: Contents, found: Records, made: Decisions) -> None:
    """Have RECORDs made after the files that they list and that are rewritten."""
    files: dict[bytes, list[bytes]] = {}
    for path, (value, _, record) in found.rows.items():
        entry = manifest.file(path)
        if not value or entry is None or (path not in made.rewrites and entry.rewrite is None):
            continue
        # A hash that is not true now would not be made true by the host.
        if hashes.record_hash(contents.data(path, entry)) == value:
            files.setdefault(record, []).append(path)
    for record in found.record_files:
        entry = manifest.file(record)
        if entry is not None and (record in files or contents.content(record, entry).mentions):
            made.rewrites[record] = Rewrite("record", contents.prefix, 0, tuple(files.get(record, ())))


def _few(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def glibc_floor(manifest: Manifest, contents: Contents) -> tuple[tuple[int, ...], set[str]]:
    """The newest glibc that compiled code of an environment needs, and the machines that it is for."""
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
    """A manifest with the decisions in it; what it shares with the one given is not copied."""
    changed: dict[bytes, Folder] = {}

    def of(path: bytes) -> Folder:
        if path not in changed:
            old = manifest.folders[path]
            changed[path] = Folder(old.mode, dict(old.files), dict(old.links), dict(old.folders))
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
    """The path in the environment that an absolute link leads to; None: it leads elsewhere."""
    for root in (prefix, folder):
        if target == root:
            return b""
        if target.startswith(root + b"/"):
            return target[len(root) + 1 :]
    return None
