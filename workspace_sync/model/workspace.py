"""Content of a sync: folders of the client, and perhaps an environment.

Names and arguments are those of ``monarch.tools.config`` (https://meta-pytorch.org/monarch/).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from monarch_kernel.environment import SYNC_FOLDER
from workspace_sync.model.manifest import digest_of

#: The treatment of symbolic links that lead out of the workspace; see ``Workspace``.
Links = Literal["refuse", "follow", "keep"]


class CondaEnvironment:
    """An environment of conda, ``venv`` or uv.

    Args:
        conda_prefix: its folder. None: that of this interpreter; if this interpreter is in none, the active one.
        with_python: include the Python that a venv was created from, for hosts that do not have it. Conda environments
            contain their own.
        lock: the lock file that it was created from (``uv.lock``, ``pylock.toml``, ``conda-lock.yml``, ``pixi.lock``,
            an ``@EXPLICIT`` list). Hosts install what they can from their own package caches and indexes, and the
            client sends the rest; the result is the same.
    """

    def __init__(
        self,
        conda_prefix: str | os.PathLike[str] | None = None,
        *,
        with_python: bool = False,
        lock: str | os.PathLike[str] | None = None,
    ) -> None:
        self.with_python = with_python
        self.lock = None if lock is None else os.path.abspath(os.path.expanduser(os.fspath(lock)))
        if self.lock is not None and not os.path.isfile(self.lock):
            raise FileNotFoundError(f"there is no lock file {self.lock}")
        if conda_prefix is not None:
            _check_folder(conda_prefix)
        self._conda_prefix = None if conda_prefix is None else os.fspath(conda_prefix)

    @property
    def conda_prefix(self) -> str:
        """The folder of the environment, absolute.

        Raises:
            ValueError: no environment was named, and none is active.
        """
        if self._conda_prefix is not None:
            return os.path.abspath(os.path.expanduser(self._conda_prefix))
        if is_environment(sys.prefix):
            return os.path.abspath(sys.prefix)
        for variable in ("CONDA_PREFIX", "VIRTUAL_ENV"):
            if prefix := os.environ.get(variable):
                return os.path.abspath(prefix)
        raise ValueError(
            "no environment is active: activate one before this process starts, or name its folder as conda_prefix"
        )

    def __repr__(self) -> str:
        given = [] if self._conda_prefix is None else [repr(self._conda_prefix)]
        given += ["with_python=True"] * self.with_python
        given += [] if self.lock is None else [f"lock={self.lock!r}"]
        return f"CondaEnvironment({', '.join(given)})"


def is_environment(folder: str | bytes) -> bool:
    """Return whether a folder is the prefix of an environment: of conda, or of ``venv``."""
    name = os.fsencode(folder)
    return os.path.isdir(name + b"/conda-meta") or os.path.isfile(name + b"/pyvenv.cfg")


class Workspace:
    """Folders of the client that are synced together, and perhaps an environment.

    Args:
        dirs: the folders. In a list, the place of each in the tree is its own name, and the place of the current folder
            (``"."``), if it is the only one, is the root, as in Monarch. A mapping names the place of each; ``""`` is
            the root.
        env: the environment that belongs to them.
        links: the treatment of symbolic links that lead out of the workspace: "refuse" (raise an error that names
            them), "follow" (copy their targets in their place) or "keep" (keep them unchanged, for hosts that have
            their targets, for example on a shared file system). Links within the workspace are always kept.

    Raises:
        FileNotFoundError: a folder does not exist.
        NotADirectoryError: it is a file.
        ValueError: two folders have the same place, a place is outside the tree, or a folder or place is within
            another.
    """

    def __init__(
        self,
        dirs: Iterable[str | os.PathLike[str]] | Mapping[str | os.PathLike[str], str] | None = None,
        env: CondaEnvironment | None = None,
        *,
        links: Links = "refuse",
    ) -> None:
        if isinstance(dirs, str | bytes | os.PathLike):
            raise TypeError(f"dirs is a list of folders, or a mapping to places: write dirs=[{os.fspath(dirs)!r}]")
        if links not in ("refuse", "follow", "keep"):
            raise ValueError(f'links is "refuse", "follow" or "keep", and not {links!r}')
        self.env = env
        self.links: Links = links
        named: list[tuple[str | os.PathLike[str], str]]
        if dirs is None:
            named = []
        elif isinstance(dirs, Mapping):
            named = list(dirs.items())
        else:
            listed = list(dirs)
            named = [(source, _own_place(source, alone=len(listed) == 1)) for source in listed]
        #: The folders as given, and their places in the tree.
        self.dirs: dict[Path, str] = {}
        self._roots: dict[str, str] = {}
        for source, place in named:
            folder = _check_folder(source)
            clean = _clean(source, place)
            if folder in self._roots:
                raise ValueError(f"{os.fspath(source)} is named twice: as {self._roots[folder]!r} and {clean!r}")
            self.dirs[Path(source)] = clean
            self._roots[folder] = clean
        _check_apart(self._roots)

    @classmethod
    def null(cls) -> Workspace:
        """Return a workspace without folders and environment."""
        return cls()

    def merge(self, outdir: str | os.PathLike[str]) -> None:
        """Copy the folders into ``outdir``, each to its place, as in the tree on hosts.

        Raises:
            OSError: a file cannot be read or written.
        """
        for folder, place in self._roots.items():
            shutil.copytree(folder, os.path.join(outdir, place), symlinks=self.links == "keep", dirs_exist_ok=True)

    def set_env_vars(self, appdef: Any) -> None:
        """Set the variables of the tree for all roles of a TorchX ``AppDef`` that do not have them.

        The variables are ``WORKSPACE_DIR`` and, with an environment, ``CONDA_DIR``; the places of the folders are added
        to ``PYTHONPATH``.
        """
        for role in appdef.roles:
            root = role.env.setdefault("WORKSPACE_DIR", "$HOME/.monarch/workspace")
            if self.env is not None:
                role.env.setdefault("CONDA_DIR", os.path.join(root, "conda"))
            known = [entry for entry in role.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
            places = [os.path.join(root, place) if place else root for place in self._roots.values()]
            role.env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*known, *places]))

    def roots(self) -> dict[str, str]:
        """Return the folders (absolute, links resolved) and their places in the tree; ``""`` is the root."""
        return dict(self._roots)

    @property
    def id(self) -> str:
        """16 hexadecimal digits derived from this machine, the user, the folders and their places.

        The environment is included only for a workspace without folders.
        """
        parts = [_machine(), str(os.geteuid())]
        parts += (f"{folder}\0{place}" for folder, place in sorted(self._roots.items()))
        if not self._roots and self.env is not None:
            parts.append(os.path.realpath(self.env.conda_prefix))
        return digest_of("\0\0".join(parts).encode("utf-8", "surrogateescape")).hex()[:16]

    @property
    def name(self) -> str:
        """The name of its first folder, in characters that every file system accepts."""
        first = next(iter(self._roots), "")
        if not first and self.env is not None:
            first = self.env.conda_prefix
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(first)).strip("-.")
        return plain[:40] or "workspace"

    def __repr__(self) -> str:
        return f"Workspace(dirs={self._roots!r}, env={self.env!r}, links={self.links!r})"


def _own_place(source: str | os.PathLike[str], *, alone: bool) -> str:
    path = os.fspath(source)
    if alone and os.path.normpath(path) == ".":
        return ""
    return os.path.basename(os.path.abspath(os.path.expanduser(path)))


def _check_folder(source: str | os.PathLike[str]) -> str:
    """Return the absolute path of a folder, with links resolved."""
    path = os.path.abspath(os.path.expanduser(os.fspath(source)))
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no folder {path}") from None
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(f"{path} is a file: name its folder, {os.path.dirname(path)}")
    return os.path.realpath(path)


def _clean(source: str | os.PathLike[str], place: str) -> str:
    # A place that is absolute or goes up would be outside the tree. Both are mistakes; the intention is not guessed.
    parts = [part for part in place.split("/") if part not in ("", ".")]
    if place.startswith("/") or ".." in parts or "\0" in place:
        raise ValueError(f"the place {place!r} of {os.fspath(source)} is outside the tree: write a relative path")
    return "/".join(parts)


def _check_apart(roots: dict[str, str]) -> None:
    """Raise if one folder or place equals another one or is within it."""
    items = list(roots.items())
    for i, (folder, place) in enumerate(items):
        for other, others_place in items[i + 1 :]:
            if place == others_place:
                raise ValueError(
                    f"{folder} and {other} have one place in the tree, {place!r}: give each its own, as in "
                    f"dirs={{{folder!r}: {place or 'a'!r}, {other!r}: {(place or 'a') + '2'!r}}}"
                )
            for inner, outer in ((folder, other), (other, folder)):
                if inner.startswith(outer.rstrip("/") + "/"):
                    raise ValueError(f"{inner} is within {outer}, which is synced with all that is in it: name one")
            for inner, outer in ((place, others_place), (others_place, place)):
                if not outer or inner.startswith(outer + "/"):
                    raise ValueError(
                        f"the places {inner!r} and {outer!r} of {folder} and {other} are within each other: "
                        "give each a separate place"
                    )


def sync_folder(root: str | None = None) -> str:
    """Return the absolute path of the folder with the stores and indexes of this user."""
    return os.path.abspath(os.path.expanduser(root or SYNC_FOLDER.get() or "~/.cache/monarch_kernel/sync"))


def _machine() -> str:
    """Identify this machine. A container image without a machine id is identified by its host name."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                text = file.read(64).strip()
        except OSError:
            continue
        if re.fullmatch(r"[0-9a-f]{32}", text):
            return text
    return socket.gethostname()
