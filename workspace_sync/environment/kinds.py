"""What an environment is: its kind, its prefix, and the Python in it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from workspace_sync.environment.text import interpreter
from workspace_sync.model.errors import ScanError

Kind = Literal["conda", "venv", "uv"]


class NamedPrefix(Protocol):
    """What names an environment by its folder, as ``CondaEnvironment`` does."""

    @property
    def conda_prefix(self) -> str:
        """The folder, absolute."""
        ...


@dataclass(frozen=True)
class Environment:
    """An environment at the client.

    Attributes:
        kind: "conda"; "venv" (also virtualenv, and uv without a project); "uv" (the ``.venv`` of a uv project).
        prefix: its folder, as its own files name it.
        folder: the same with links resolved.
        version: of its Python, as "3.11"; empty if it has none.
        base: the prefix of the Python that a venv was made from; empty for conda, whose Python is inside.
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


def environment(env: Environment | NamedPrefix | str | os.PathLike[str]) -> Environment:
    """Find out what an environment is.

    Args:
        env: its prefix, a uv project with a ``.venv``, or what names it.

    Raises:
        ScanError: there is none, or it is a Python that is in no environment.
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


def _path_of(env: NamedPrefix | os.PathLike[str]) -> str:
    return os.fspath(env) if isinstance(env, os.PathLike) else env.conda_prefix


def active_prefix() -> str:
    """The prefix of the environment that this process runs in."""
    return sys.prefix


def read_config(prefix: str) -> dict[str, str] | None:
    """The entries of ``pyvenv.cfg``, or None if the folder is no venv."""
    try:
        with open(os.path.join(prefix, "pyvenv.cfg"), encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    pairs = (line.partition("=") for line in lines)
    return {key.strip().lower(): value.strip() for key, sep, value in pairs if sep}


def _version(prefix: str) -> str:
    """The newest Python that has a folder of modules in a prefix."""
    try:
        names = os.listdir(os.path.join(prefix, "lib"))
    except OSError:
        return ""
    found = [match for name in names if (match := re.fullmatch(r"python(\d+)\.(\d+)", name))]
    if not found:
        return ""
    return max(found, key=lambda m: (int(m[1]), int(m[2])))[0].removeprefix("python")


def _named(given: str) -> str:
    """The prefix as the environment's own files name it: the path may lead there through links."""
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
