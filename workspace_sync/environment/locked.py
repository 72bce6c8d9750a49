"""Content of an environment that a host creates by itself, from a lock file and its own package cache.

The client's manifest lists the content of the environment. A host that installs the same packages has most of it, and
only the rest is sent. The installer verifies packages against the hashes of the lock file; the installed files are then
verified against the digests of the client's files. If a host cannot install, or its installer creates other files, the
client sends these files. All hosts get the same environment.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import posixpath
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import msgspec

from monarch_kernel import programs
from workspace_sync.environment.kinds import Environment, distributions, environment
from workspace_sync.environment.manifests import EnvironmentScan, environment_manifest
from workspace_sync.environment.rewriter import Rewriter
from workspace_sync.model.errors import IncompatibleError, ScanError, StoreError
from workspace_sync.model.manifest import FileEntry, Manifest, digest_of
from workspace_sync.scanning import Index

# Create environments from lock files, on a host that has a package cache or can reach the packages.
#
# ``locked.py`` uses this when a sync has a lock file.
#
# Conda environments (``conda-lock.yml``, pixi's lock file, and lists that begin with ``@EXPLICIT``) are installed by
# py-rattler from the cache that it shares with pixi; wheels (``uv.lock``, ``pylock.toml``) by uv, or else by pip, with
# the hashes of the lock file. Nothing is solved or built: a package that the file does not pin exactly is an error.
#
# Source: PEP 751 (pylock.toml); https://docs.astral.sh/uv/concepts/resolution/#lockfile;
# https://conda.github.io/conda-lock/.

#: The maximum size of a lock file (bytes).
_LARGEST = 64 << 20


@dataclass(frozen=True)
class LockedWheel:
    """A wheel of a lock file.

    Attributes:
        name: of the package.
        url: its address.
        hashes: "sha256:…" and the like; one match is enough.
        version: of the package.
        index: the package index that it is from, which is its key in uv's cache; empty if the file does not name one.
    """

    name: str
    url: str
    hashes: tuple[str, ...]
    version: str
    index: str = ""

    def __post_init__(self) -> None:
        """Check that the values are safe to pass to installers, which read lines and TOML, as exactly one wheel.

        Raises:
            IncompatibleError: they are not.
        """
        from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

        try:
            named = parse_wheel_filename(posixpath.basename(unquote(urlsplit(self.url).path)))[0]
        except (InvalidWheelFilename, ValueError) as e:
            raise IncompatibleError(f"the lock file has {self.name!r} at {self.url!r}: {e}") from None
        for text, pattern in (
            (self.name, r"[A-Za-z0-9][A-Za-z0-9._-]*"),
            (self.url, r"(https?|file)://[!-~]+"),
            (self.version, r"[A-Za-z0-9.!+_-]*"),
            (self.index, r"([!-~]*)"),
            *((each, r"[a-z0-9]+:[0-9a-fA-F]+") for each in self.hashes),
        ):
            if not re.fullmatch(pattern, text):
                raise IncompatibleError(f"the lock file has {text!r} for {self.name!r}, which is not used")
        if canonicalize_name(self.name) != named or not self.hashes:
            raise IncompatibleError(f"the lock file has {self.url!r} for {self.name!r}: another package, or no hash")


def create(
    lock: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    *,
    cache: str | None = None,
    python: str | None = None,
    only: Mapping[str, str] | None = None,
    base: str | None = None,
) -> Environment:
    """Create the environment of a lock file for this machine and this version of Python.

    Args:
        lock: ``conda-lock.yml``, ``pixi.lock``, a list that begins with ``@EXPLICIT``, ``uv.lock`` or ``pylock.toml``.
        prefix: a path that does not exist.
        cache: the package cache. None: the installer's default.
        python: the Python to create a venv from, of the same version as this interpreter. None: this interpreter.
        only: install these packages (versions by name) of ``uv.lock`` or ``pylock.toml``, if they have a wheel.
            None: install the dependencies of the file's projects; a package without a wheel is an error.
        base: the folder that relative paths in the file refer to. None: the folder of the file.

    Raises:
        IncompatibleError: the lock file is for other machines or Pythons, or names a package that cannot be installed.
        StoreError: an installer is missing or has failed. The prefix is then incomplete.
    """
    path = os.path.abspath(os.path.expanduser(os.fspath(lock)))
    target = os.path.abspath(os.path.expanduser(os.fspath(prefix)))
    named = path if base is None else os.path.join(base, os.path.basename(path))
    if os.path.lexists(target):
        raise StoreError(f"{target} exists: name a path that does not")
    try:
        if path.endswith(".toml") or os.path.basename(path) == "uv.lock":
            wheels = _locked_wheels(path, named, only)
            _make_venv(target, python)
            _install_wheels(wheels, target, cache)
        else:
            _install_conda(path, target, cache)
    except OSError as e:
        raise StoreError(f"{path} cannot be installed: {e.strerror or e}") from None
    return environment(target)


def _locked_wheels(path: str, named: str, only: Mapping[str, str] | None) -> list[LockedWheel]:
    """Return the wheels of ``uv.lock`` or ``pylock.toml`` for this host.

    Args:
        named: the path of the file at the client, for messages.
        only: see ``create``.
    """
    with open(path, "rb") as file:
        data = file.read(_LARGEST)
    try:
        content = tomllib.loads(data.decode())
        return _of_uv(content, named, only) if "package" in content else _of_pylock(content, named, only)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise StoreError(f"{path} is no lock file: {type(e).__name__}: {e}") from None


def _install_conda(path: str, prefix: str, cache: str | None) -> None:
    if importlib.util.find_spec("rattler") is None:
        raise StoreError(f"{path} needs py-rattler: pip install 'monarch_kernel[environments]'")
    import asyncio

    import rattler

    platform = rattler.Subdir.current()
    with open(path, encoding="utf-8", errors="replace") as file:
        explicit = "@EXPLICIT" in file.read(1 << 16)
    wheels: list[LockedWheel] = []
    if explicit:
        try:
            records = list(_of_explicit(path, platform))
        except ValueError as e:
            raise StoreError(f"{path} is no list of packages: {e}") from None
    else:
        try:
            locked = rattler.LockFile.from_path(Path(path)).default_environment()
        except Exception as e:  # py-rattler raises a different exception for each cause, without a common base
            raise StoreError(f"{path} is no lock file that py-rattler can read: {e}") from None
        names = {str(each.name): each for each in (locked.platforms() if locked is not None else [])}
        if locked is None or str(platform) not in names:
            raise IncompatibleError(
                f"{path} is for {', '.join(sorted(names)) or 'no platform'}, and this host is {platform}: lock for it"
            )
        records = locked.conda_repodata_records_for_platform(names[str(platform)]) or []
        for each in locked.pypi_packages_for_platform(names[str(platform)]) or []:
            hashes = each.hashes
            sha256 = hashes.sha256.hex() if hashes is not None and hashes.sha256 is not None else ""
            if not each.location.endswith(".whl") or not sha256:
                raise IncompatibleError(f"{path} has {each.name} as {each.location}, which is no wheel with a SHA-256")
            wheels.append(LockedWheel(str(each.name), each.location, (f"sha256:{sha256}",), str(each.version)))
    try:
        asyncio.run(rattler.install(records, prefix, cache_dir=Path(cache) if cache else None, show_progress=False))
    except Exception as e:
        raise StoreError(f"{path} could not be installed to {prefix}, which is incomplete now: {e}") from None
    if wheels:
        _install_wheels(wheels, prefix, None)


def _of_explicit(path: str, platform: object) -> Iterator[Any]:
    import rattler

    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    with_python = any("/python-" in line for line in lines)
    for line in lines:
        if not line or line.startswith(("#", "@")):
            continue
        url, _, digest = line.partition("#")
        file_name = posixpath.basename(unquote(urlsplit(url).path))
        subdir = posixpath.basename(posixpath.dirname(urlsplit(url).path))
        stem = file_name.removesuffix(".conda").removesuffix(".tar.bz2")
        parts = stem.rsplit("-", 2)
        if len(parts) != 3 or stem == file_name:
            raise StoreError(f"{path} lists {line!r}, which is no conda package")
        if subdir not in (str(platform), "noarch"):
            raise IncompatibleError(f"{path} lists {file_name} for {subdir}, and this host is {platform}: lock for it")
        digest = digest.removeprefix("sha256:")
        package = rattler.PackageRecord(
            parts[0],
            parts[1],
            rattler.BuildString(parts[2]),
            _build_number(parts[2]),
            subdir,
            md5=bytes.fromhex(digest) if len(digest) == 32 else None,
            sha256=bytes.fromhex(digest) if len(digest) == 64 else None,
            # Only the channel reveals its kind; a package without modules is linked the same way.
            noarch=("python" if with_python else "generic") if subdir == "noarch" else None,
        )
        yield rattler.RepoDataRecord(package, file_name, url, posixpath.dirname(posixpath.dirname(url)))


def _build_number(build: str) -> int:
    tail = build.rpartition("_")[2]
    return int(tail) if tail.isdigit() else 0


def _make_venv(prefix: str, python: str | None) -> None:
    base = python or getattr(sys, "_base_executable", sys.executable)
    done = programs.run([base, "-m", "venv", "--without-pip", prefix], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StoreError(f"{base} could not make a venv at {prefix}: {done.stderr.strip() or done.stdout.strip()}")


def _install_wheels(wheels: list[LockedWheel], prefix: str, cache: str | None) -> None:
    if not wheels:
        return
    python = os.path.join(prefix, "bin", "python")
    with tempfile.TemporaryDirectory() as folder:
        if uv := _uv():
            # By index and not by URL: then uv's cache has them, and they count as installed from the index.
            path = os.path.join(folder, "pylock.toml")
            command = [uv, "pip", "install", "--quiet", "--no-deps", "--no-build", "--preview-features", "pylock"]
            command += ["-r", path]
            command += ["--python", python, *(["--cache-dir", cache] if cache else [])]
            text = _as_pylock(wheels)
        elif importlib.util.find_spec("pip") is not None:
            path = os.path.join(folder, "requirements.txt")
            command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"]
            command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", path]
            command += ["--cache-dir", cache] if cache else []
            options = [" ".join(f"--hash={value}" for value in each.hashes) for each in wheels]
            text = "".join(f"{each.name} @ {each.url} {hashes}\n" for each, hashes in zip(wheels, options))
        else:
            raise StoreError("neither uv nor pip is there to install wheels: install one of them")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        done = programs.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise StoreError(f"wheels could not be installed to {prefix}, which is incomplete now: {said}")


def _as_pylock(wheels: Iterable[LockedWheel]) -> str:
    quoted = json.dumps  # also a valid TOML string
    lines = ['lock-version = "1.0"', 'created-by = "workspace_sync"']
    for each in wheels:
        hashes = ", ".join(f"{kind} = {quoted(value)}" for kind, _, value in (h.partition(":") for h in each.hashes))
        lines += ["[[packages]]", f"name = {quoted(each.name)}", f"version = {quoted(each.version)}"]
        lines += [f"index = {quoted(each.index)}"] * bool(each.index)
        lines.append(f"wheels = [{{ url = {quoted(each.url)}, hashes = {{ {hashes} }} }}]")
    return "\n".join(lines) + "\n"


def _uv() -> str | None:
    """Return the path of uv: the one installed beside this package, or else one on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "uv")
    return beside if os.access(beside, os.X_OK) else shutil.which("uv")


def _of_pylock(content: dict[str, object], path: str, only: Mapping[str, str] | None) -> list[LockedWheel]:
    from packaging.pylock import PackageWheel, Pylock, PylockSelectError, PylockValidationError

    try:
        selected = list(Pylock.from_dict(content).select())
    except PylockValidationError as e:
        raise StoreError(f"{path} is no valid pylock.toml: {e}") from None
    except PylockSelectError as e:
        raise IncompatibleError(f"{path} does not fit this host: {e}") from None
    found: list[LockedWheel] = []
    for package, source in selected:
        version = str(package.version or "")
        if only is not None and (only.get(package.name) != version or not isinstance(source, PackageWheel)):
            continue
        if not isinstance(source, PackageWheel):
            raise IncompatibleError(_no_wheel(path, package.name, version))
        url = source.url or _beside(path, source.path or "")
        hashes = tuple(f"{kind}:{value}" for kind, value in source.hashes.items())
        found.append(LockedWheel(package.name, url, hashes, version, package.index or ""))
    return found


def _no_wheel(path: str, name: str, version: str) -> str:
    return (
        f"{path} has no wheel of {f'{name} {version}'.strip()} for this host, and nothing is built here: build a wheel "
        "of it and lock that, or sync the environment instead"
    )


def _beside(path: str, relative: str) -> str:
    return Path(os.path.normpath(os.path.join(os.path.dirname(path), relative))).as_uri()


def _of_uv(content: dict[str, Any], path: str, only: Mapping[str, str] | None) -> list[LockedWheel]:
    """Return the wheels that the projects of a uv workspace need here. The projects themselves are not installed."""
    from packaging.markers import Marker
    from packaging.specifiers import SpecifierSet

    needed = content.get("requires-python", "")
    here = ".".join(map(str, sys.version_info[:3]))
    if not SpecifierSet(needed).contains(here):
        raise IncompatibleError(f"{path} is for Python {needed}, and this is Python {here}")
    packages: list[dict[str, Any]] = content["package"]
    if only is not None:
        return _fitting((each for each in packages if only.get(each["name"]) == each.get("version")), path)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for package in packages:
        by_name.setdefault(package["name"], []).append(package)
    todo = [package for package in packages if {"editable", "virtual"} & package.get("source", {}).keys()]
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    extras: set[tuple[str, str]] = set()
    while todo:
        package = todo.pop()
        seen[package["name"], package.get("version", "")] = package
        wanted = [*package.get("dependencies", [])]
        for name, extra in extras:
            if name == package["name"]:
                wanted += package.get("optional-dependencies", {}).get(extra, [])
        for edge in wanted:
            if "marker" in edge and not Marker(edge["marker"]).evaluate({"extra": ""}):
                continue
            new = {(edge["name"], extra) for extra in edge.get("extra", [])} - extras
            extras |= new
            for each in by_name.get(edge["name"], []):
                if edge.get("version", each.get("version")) != each.get("version"):
                    continue
                if new or (each["name"], each.get("version", "")) not in seen:
                    todo.append(each)
    return [
        _uv_wheel(package, path)
        for package in seen.values()
        if not {"editable", "virtual"} & package.get("source", {}).keys()
    ]


def _fitting(packages: Iterable[Mapping[str, Any]], path: str) -> list[LockedWheel]:
    """Return the wheels of some packages, without those that have no wheel for this host, or no hash."""
    found: list[LockedWheel] = []
    refused: list[IncompatibleError] = []
    for package in packages:
        if {"editable", "virtual"} & package.get("source", {}).keys():
            continue
        try:
            found.append(_uv_wheel(package, path))
        except IncompatibleError as e:
            refused.append(e)
    if not found and refused:
        raise refused[0]
    return found


def _uv_wheel(package: Mapping[str, Any], path: str) -> LockedWheel:
    from packaging.tags import sys_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    rank = {tag: i for i, tag in enumerate(sys_tags())}
    registry = package.get("source", {}).get("registry", "")
    best: tuple[int, Mapping[str, Any], str] | None = None
    for wheel in package.get("wheels", []):
        where = wheel.get("url") or wheel.get("path") or wheel.get("filename", "")
        try:
            tags = parse_wheel_filename(posixpath.basename(unquote(urlsplit(where).path)))[3]
        except InvalidWheelFilename:
            continue
        order = min((rank[tag] for tag in tags if tag in rank), default=None)
        if order is not None and (best is None or order < best[0]):
            best = order, wheel, where
    if best is None:
        raise IncompatibleError(_no_wheel(path, package["name"], package.get("version", "")))
    if "hash" not in best[1]:
        raise IncompatibleError(
            f"{path} has no hash of {best[2]}, as uv notes none for files of a folder, so it cannot be verified: lock "
            "against an index, or sync the environment instead"
        )
    _, wheel, where = best
    index = registry if urlsplit(registry).scheme else ""
    if "url" not in wheel:
        base = registry if urlsplit(registry).scheme else os.path.join(os.path.dirname(path), registry)
        remote = urlsplit(base).scheme != ""
        where = urljoin(base.rstrip("/") + "/", where) if remote else _beside(path, os.path.join(base, where))
    return LockedWheel(package["name"], where, (wheel["hash"],), package.get("version", ""), index)


_PR_SET_PDEATHSIG = 1
_CHILD = "from workspace_sync.environment.locked import main; main()"


class LockFile(msgspec.Struct, array_like=True):
    """A lock file, as sent to hosts.

    Attributes:
        name: of the file, which determines its format.
        folder: of the file at the client; relative paths in it refer to it.
        data: its content, compressed.
        prefix: of the environment at the client.
        base: the Python that it was created from; empty for conda.
        version: of its Python, such as "3.11".
        packages: the installed packages: versions by name.
    """

    name: str
    folder: str
    data: bytes
    prefix: str
    base: str
    version: str
    packages: dict[str, str]


class _Order(msgspec.Struct, array_like=True):
    lock: str
    prefix: str
    python: str
    only: dict[str, str]


def read_lock(path: str, env: Environment) -> LockFile:
    """Read a lock file to send it to hosts.

    Args:
        path: of the file.
        env: the environment at the client.

    Raises:
        ScanError: it cannot be read, or is too large.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as e:
        raise ScanError(f"the lock file {path} cannot be read: {e.strerror}") from None
    if len(data) > _LARGEST:
        raise ScanError(f"{path} has more than {_LARGEST >> 20} MiB, which no lock file has")
    packages = {re.sub(r"[-_.]+", "-", name): about[0] for name, about in distributions(env).items()}
    folder, name = os.path.split(os.path.realpath(path))
    return LockFile(name, folder, zlib.compress(data), env.prefix, env.base, env.version, packages)


@contextmanager
def made_from_lock(lock: LockFile, folder: str, cancelled: Callable[[], bool]) -> Generator[LockedContent]:
    """Install the packages of a lock file into a folder, whose content is removed afterwards.

    Args:
        lock: the client's lock file.
        folder: an empty folder that only this user can access.
        cancelled: polled often; true: end soon.

    Raises:
        IncompatibleError: the lock file is for other machines or another Python, or has no package that can be
            installed.
        StoreError: the installer is missing or has failed.
    """
    here = "{}.{}".format(*sys.version_info)
    if lock.base and lock.version != here:
        raise IncompatibleError(f"the environment has Python {lock.version}, and its sync agent runs in Python {here}")
    place = os.path.join(folder, secrets.token_hex(8))
    os.mkdir(place, 0o700)
    try:
        prefix = os.path.join(place, "env")
        _install(lock, place, prefix, cancelled)
        yield LockedContent(environment_manifest(prefix, Index("made", place), cancelled=cancelled), lock.prefix)
    finally:
        clear(place)


class LockedContent:
    """Content that a host has installed, by the paths of the client's environment.

    Args:
        scanned: the scan of the installed environment.
        prefix: of the environment at the client.
    """

    def __init__(self, scanned: EnvironmentScan, prefix: str) -> None:
        self._scanned = scanned
        self._original = Rewriter(prefix)
        self._made: dict[bytes, bytes] = {}

    def pieces(self, target: Manifest, wanted: Mapping[bytes, int]) -> Iterator[tuple[bytes, memoryview]]:
        """Yield the wanted pieces of the client's environment that are here, with their verified digests.

        Args:
            target: the client's environment.
            wanted: the pieces that are missing, with their sizes.
        """
        given = set[bytes]()
        for path, entry in target.files():
            here = self._scanned.manifest.file(path)
            if here is None:
                continue
            open_pieces = [piece for piece in entry.pieces() if piece[0] in wanted and piece[0] not in given]
            if not open_pieces:
                continue
            data = memoryview(self._original_of(path, here))
            self._made.clear()
            for digest, offset, size in open_pieces:
                part = data[offset : offset + size]
                if len(part) == size and digest_of(part) == digest:
                    given.add(digest)
                    yield digest, part

    def _original_of(self, path: bytes, entry: FileEntry) -> bytes:
        """Return the content that a file would have at the client."""
        if path not in self._made:
            data = bytearray(entry.size)
            for digest, offset, size in entry.pieces():
                self._scanned.read(digest, memoryview(data)[offset : offset + size])
            self._made[path] = self._original(entry, bytes(data), path=path, read=self._other)
        return self._made[path]

    def _other(self, path: bytes) -> bytes:
        entry = self._scanned.manifest.file(path)
        return b"" if entry is None else self._original_of(path, entry)


def _install(lock: LockFile, place: str, prefix: str, cancelled: Callable[[], bool]) -> None:
    """Run the installer in a separate process that can be terminated and ends with this one."""
    path = os.path.join(place, lock.name)
    with open(path, "xb") as file:
        file.write(zlib.decompress(lock.data))
    python = os.path.join(lock.base, "bin", f"python{lock.version}") if lock.base else ""
    order = _Order(path, prefix, python if os.path.exists(python) else "", lock.packages)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": place}
    child = programs.start(
        [sys.executable, "-c", _CHILD, lock.folder],
        env=variables,
        cwd=place,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with child:
        given: bytes | None = msgspec.msgpack.encode(order)
        while True:
            try:
                said = child.communicate(given, timeout=0.2)[1]
                break
            except subprocess.TimeoutExpired:
                given = None
                if cancelled():
                    child.terminate()
        if child.returncode:
            text = said.decode(errors="replace").strip()
            raise StoreError(text[-2000:] or f"the installer ended with status {child.returncode}")


def main() -> None:
    """Run the installing process, which reads its instructions from standard input."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was ended"))  # the installer ends, too
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Order)
    try:
        create(order.lock, order.prefix, python=order.python or None, only=order.only, base=sys.argv[1])
    except (IncompatibleError, StoreError) as e:
        sys.exit(str(e))


def clear(folder: str) -> None:
    """Remove a folder that was created here, with its content. Links are removed and never followed."""
    for _, folders, files, fd in os.fwalk(folder, topdown=False, follow_symlinks=False):
        for name in files:
            os.unlink(name, dir_fd=fd)
        for name in folders:
            try:
                os.rmdir(name, dir_fd=fd)
            except NotADirectoryError:  # a link to a folder
                os.unlink(name, dir_fd=fd)
    os.rmdir(folder)
