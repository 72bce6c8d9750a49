"""Identify an environment: its kind, prefix, Python, and installed distributions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from workspace_sync.environment.rewriting import interpreter
from workspace_sync.model.errors import ScanError

if TYPE_CHECKING:
    from workspace_sync.model.workspace import CondaEnvironment

Kind = Literal["conda", "venv", "uv"]


@dataclass(frozen=True)
class Environment:
    """An environment at the client.

    Attributes:
        kind: "conda"; "venv" (also virtualenv, and uv without a project); "uv" (the ``.venv`` of a uv project).
        prefix: its folder, as written in its files.
        folder: the same with links resolved.
        version: of its Python, such as "3.11"; empty if it has none.
        base: the prefix of the Python that a venv was created from; empty for conda, whose Python is inside.
        project: the folder of the uv project; empty for others.
    """

    kind: Kind
    prefix: str
    folder: str
    version: str
    base: str = ""
    project: str = ""

    @property
    def python(self) -> str:
        """The path of its interpreter."""
        return os.path.join(self.prefix, "bin", "python")

    @property
    def site_packages(self) -> list[str]:
        """Its folders of installed packages, relative to the prefix."""
        names = [f"lib/python{self.version}/site-packages"] if self.version else []
        if os.path.isdir(os.path.join(self.prefix, "lib64")) and not os.path.islink(os.path.join(self.prefix, "lib64")):
            names.append(f"lib64/python{self.version}/site-packages")
        return [name for name in names if os.path.isdir(os.path.join(self.prefix, name))]


def environment(env: Environment | CondaEnvironment | str | os.PathLike[str]) -> Environment:
    """Identify an environment.

    Args:
        env: its prefix, a uv project with a ``.venv``, or an object that names it.

    Raises:
        ScanError: there is no environment, or it is a Python outside any environment.
    """
    if isinstance(env, Environment):
        return env
    given = os.path.abspath(os.path.expanduser(env if isinstance(env, str) else _path_of(env)))
    if not os.path.isdir(given):
        raise ScanError(f"there is no environment at {given}: that is no folder")
    if os.path.isdir(os.path.join(given, "conda-meta")):
        prefix = _named(given)
        return Environment("conda", prefix, os.path.realpath(given), _version(given))
    config = read_config(given)
    if config is not None:
        base = os.path.dirname(config.get("home", ""))
        version = _version(given) or ".".join(config.get("version_info", config.get("version", "")).split(".")[:2])
        project = os.path.dirname(given)
        uv = os.path.basename(given) == ".venv" and os.path.isfile(os.path.join(project, "uv.lock"))
        prefix = _named(given)
        return Environment(
            "uv" if uv else "venv", prefix, os.path.realpath(given), version, base, project if uv else ""
        )
    if read_config(os.path.join(given, ".venv")) is not None:
        return environment(os.path.join(given, ".venv"))
    if any(os.path.exists(os.path.join(given, "bin", name)) for name in ("python", "python3")):
        raise ScanError(
            f"{given} is a Python installation and not an environment, so hosts get no copy of it: make one with "
            f"`{given}/bin/python -m venv`, conda or uv, install into that, and run the notebook's kernel in it"
        )
    raise ScanError(f"{given} is no environment: it has no conda-meta and no pyvenv.cfg")


def _path_of(env: CondaEnvironment | os.PathLike[str]) -> str:
    return os.fspath(env) if isinstance(env, os.PathLike) else env.conda_prefix


def read_config(prefix: str) -> dict[str, str] | None:
    """Return the entries of ``pyvenv.cfg``; None if the folder is not a venv."""
    try:
        with open(os.path.join(prefix, "pyvenv.cfg"), encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    pairs = (line.partition("=") for line in lines)
    return {key.strip().lower(): value.strip() for key, sep, value in pairs if sep}


def _version(prefix: str) -> str:
    """Return the newest Python version that has a folder of modules in a prefix."""
    try:
        names = os.listdir(os.path.join(prefix, "lib"))
    except OSError:
        return ""
    found = [match for name in names if (match := re.fullmatch(r"python(\d+)\.(\d+)", name))]
    if not found:
        return ""
    return max(found, key=lambda m: (int(m[1]), int(m[2])))[0].removeprefix("python")


def _named(given: str) -> str:
    """Return the prefix as the environment's own files write it. The given path may lead there through links."""
    folder = os.path.realpath(given)
    if folder == given:
        return given
    for head in _heads(os.path.join(given, "bin")):
        found = interpreter(head)
        if found is None:
            continue
        named = os.fsdecode(os.path.dirname(os.path.dirname(found[0])))
        if named and os.path.realpath(named) == folder:
            return named
    return given


def _heads(folder: str) -> Iterable[bytes]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                head = file.read(4096)
        except OSError:
            continue
        if head.startswith(b"#!"):
            yield head


#: The identity of an installed distribution: its version, and size and time of its list of files.
Installed = tuple[str, int, int]


@dataclass(frozen=True)
class Changed:
    """Changes by an installer.

    Attributes:
        added: new distributions, with their versions.
        changed: distributions of another version, or installed again: (old version, new version).
        removed: removed distributions, with their versions.
    """

    added: dict[str, str]
    changed: dict[str, tuple[str, str]]
    removed: dict[str, str]

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


def distributions(environment: Environment) -> dict[str, Installed]:
    """Return the distributions of an environment by name, from metadata in ``site-packages`` and conda's records."""
    found: dict[str, Installed] = {}
    for site in environment.site_packages:
        folder = os.path.join(environment.prefix, site)
        for entry in os.scandir(folder):
            stem, suffix = os.path.splitext(entry.name)
            if suffix not in (".dist-info", ".egg-info"):
                continue
            name, _, version = stem.partition("-")
            found[name.replace("_", "-").lower()] = version, *_stamp(os.path.join(entry.path, "RECORD"), entry.path)
    conda = os.path.join(environment.prefix, "conda-meta")
    for entry in os.scandir(conda) if os.path.isdir(conda) else ():
        parts = entry.name.removesuffix(".json").rsplit("-", 2)
        if entry.name.endswith(".json") and len(parts) == 3:
            found.setdefault(parts[0], (parts[1], *_stamp(entry.path, entry.path)))
    return found


def _stamp(path: str, otherwise: str) -> tuple[int, int]:
    for each in (path, otherwise):
        try:
            about = os.stat(each)
        except OSError:
            continue
        return about.st_size, about.st_mtime_ns
    return 0, 0


def changed_distributions(before: Mapping[str, Installed], after: Mapping[str, Installed]) -> Changed:
    """Compare the distributions at two moments."""
    return Changed(
        {name: after[name][0] for name in sorted(after.keys() - before.keys())},
        {
            name: (before[name][0], after[name][0])
            for name in sorted(before.keys() & after.keys())
            if before[name] != after[name]
        },
        {name: before[name][0] for name in sorted(before.keys() - after.keys())},
    )
