"""Find editable installs: packages whose code is in a folder outside the environment.

An editable install leaves a file in ``site-packages`` that points to its source: a ``.pth`` file with a path, a
``.pth`` file that imports a finder with the paths (setuptools, scikit-build-core, meson-python), or an egg-link. The
source folders become folders of the workspace, and the paths in these files are rewritten for each host.

Source: PEP 660; https://setuptools.pypa.io/en/latest/userguide/development_mode.html; site (the standard library).
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import msgspec

from workspace_sync.environment.kinds import Environment

#: Names in the tree for source folders that are not in a folder of the workspace already.
PLACE = "editables"
_LARGEST = 8 << 20
_IMPORT = re.compile(r"\s*import\s+([A-Za-z_]\w*)")
# Finders that rebuild the package when it is imported.
_BUILDING = re.compile(r"_editable_loader\.py\Z|_editable\.py\Z")


@dataclass(frozen=True)
class EditableInstall:
    """A file of an environment that points to code outside the environment.

    Attributes:
        name: of the distribution if known, else of the file.
        file: its path in the environment.
        paths: its paths: (as written, with links resolved).
        project: the folder that was installed, if the installer has recorded it; otherwise empty.
        rebuilds: whether importing the package builds it, which needs compilers.
    """

    name: str
    file: str
    paths: tuple[tuple[str, str], ...]
    project: str = ""
    rebuilds: bool = False


@dataclass(frozen=True)
class Followed:
    """Places in the tree for the sources of editable installs.

    Attributes:
        dirs: the additional folders that the workspace needs, with their places in the tree.
        notes: installs that cannot be followed, and ambiguous names.
    """

    dirs: dict[str, str]
    notes: list[str]


class _DirInfo(msgspec.Struct):
    editable: bool = False


class _DirectUrl(msgspec.Struct):
    url: str
    dir_info: _DirInfo | None = None


def editables(environment: Environment) -> list[EditableInstall]:
    """Return the editable installs of an environment."""
    found: list[EditableInstall] = []
    for site in environment.site_packages:
        folder = os.path.join(environment.prefix, site)
        names = sorted(os.listdir(folder))
        projects = _projects(folder, names)
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith((".pth", ".egg-link")):
                paths, modules = _lines(path, folder)
                found += _install(environment, site, name, paths, projects)
                for module in modules:
                    finder = os.path.join(folder, f"{module}.py")
                    found += _install(environment, site, f"{module}.py", _constants(finder), projects)
            elif name.endswith(".dist-info") and name in projects:
                project = projects[name]
                file = f"{site}/{name}/direct_url.json"
                found.append(
                    EditableInstall(_distribution(name), file, ((project, os.path.realpath(project)),), project)
                )
    return found


def _install(
    environment: Environment, site: str, name: str, paths: Iterable[str], projects: Mapping[str, str]
) -> list[EditableInstall]:
    folder = os.path.join(environment.folder, site)
    real = {path: os.path.realpath(os.path.join(folder, path)) for path in paths}
    outside = {path: to for path, to in real.items() if not _within(to, environment.folder)}
    if not outside:
        return []
    holders = [
        (dist, project)
        for dist, project in projects.items()
        if any(_within(to, os.path.realpath(project)) for to in outside.values())
    ]
    dist, project = max(holders, key=lambda each: len(each[1]), default=("", ""))
    rebuilds = bool(_BUILDING.search(name))
    return [
        EditableInstall(_distribution(dist) or _stem(name), f"{site}/{name}", tuple(outside.items()), project, rebuilds)
    ]


def _projects(folder: str, names: Iterable[str]) -> dict[str, str]:
    """Return the folders that editable distributions were installed from, by the names of their ``.dist-info``."""
    found: dict[str, str] = {}
    for name in names:
        if not name.endswith(".dist-info"):
            continue
        data = _read(os.path.join(folder, name, "direct_url.json"))
        if not data:
            continue
        try:
            url = msgspec.json.decode(data, type=_DirectUrl)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if url.dir_info is not None and url.dir_info.editable and url.url.startswith("file:"):
            found[name] = os.path.normpath(unquote(urlsplit(url.url).path))
    return found


def _lines(path: str, folder: str) -> tuple[list[str], list[str]]:
    """Parse a ``.pth`` file or egg-link; return (folders outside the environment, modules that it imports)."""
    paths: list[str] = []
    modules: list[str] = []
    for line in _read(path).decode("utf-8", "surrogateescape").splitlines():
        text = line.rstrip()
        if not text or text.startswith("#"):
            continue
        if found := _IMPORT.match(text):
            modules.append(found[1])
        elif text != "." and os.path.isdir(os.path.join(folder, text)):
            paths.append(text)
    return paths, modules


def _constants(path: str) -> list[str]:
    """Return the absolute paths in a finder that exist."""
    try:
        tree = ast.parse(_read(path))
    except (SyntaxError, ValueError):
        return []
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in strings if os.path.isabs(text) and "\0" not in text and os.path.exists(text)]


def follow(installs: Iterable[EditableInstall], roots: Mapping[str, str]) -> Followed:
    """Decide where the sources of editable installs go in the tree.

    Args:
        installs: of the environment.
        roots: the folders of the workspace (absolute, links resolved) and their places in the tree.
    """
    dirs: dict[str, str] = {}
    refused: dict[str, str] = {}
    # The project of a uv workspace contains its members: outer ones first, so that one folder has them all.
    for install in sorted(installs, key=lambda each: (not each.project, each.project.count("/"))):
        for _, path in install.paths:
            wanted = path if os.path.isdir(path) else os.path.dirname(path)
            if any(_within(wanted, root) for root in (*roots, *dirs)):
                continue
            candidates = [os.path.realpath(install.project)] if install.project else []
            for folder in (*candidates, wanted):
                if not _may_be_taken(folder) or not _within(wanted, folder):
                    continue
                if any(_within(root, folder) for root in (*roots, *dirs)):
                    continue
                dirs[folder] = _place(folder, install.name, {*roots.values(), *dirs.values()})
                break
            else:
                refused.setdefault(wanted, _not_followed(install, wanted, [*roots, *dirs]))
    return Followed(dirs, [*refused.values(), *_rebuilding(installs)])


def _is_installed(folder: str) -> bool:
    """Return whether a folder was filled by an installer: the packages of another environment."""
    return not {"site-packages", "dist-packages"}.isdisjoint(folder.split(os.sep))


def _may_be_taken(folder: str) -> bool:
    return (
        not _is_installed(folder)
        and folder not in ("/", os.path.realpath(os.path.expanduser("~")))
        and os.path.isdir(folder)
    )


def _place(folder: str, name: str, taken: set[str]) -> str:
    place = f"{PLACE}/{os.path.basename(folder)}"
    number = 2
    while place in taken:
        place = f"{PLACE}/{name if number == 2 else f'{name}-{number}'}"
        number += 1
    return place


def _not_followed(install: EditableInstall, wanted: str, roots: list[str]) -> str:
    if _is_installed(wanted):
        return f"{install.file} leads to {wanted}, which is another environment's: hosts have what they have there"
    inside = [root for root in roots if _within(root, wanted)]
    if inside:
        return (
            f"the editable install {install.name} is in {wanted}, which also holds {inside[0]}: sync {wanted} itself, "
            "or hosts do not get it"
        )
    return f"the editable install {install.name} is in {wanted}, which is too much to sync: hosts do not get it"


def _rebuilding(installs: Iterable[EditableInstall]) -> list[str]:
    return [
        f"the editable install {each.name} builds itself when it is imported ({each.file}): hosts need its compilers, "
        "or install it as a wheel"
        for each in installs
        if each.rebuilds
    ]


def tree_paths(install: EditableInstall, dirs: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the places in the tree of an editable install's paths, longest path first: (path as in the file, place).

    Args:
        dirs: all folders of the workspace (absolute, links resolved) and their places.
    """
    found: dict[bytes, bytes] = {}
    for path, real in install.paths:
        for root, place in dirs.items():
            if _within(real, root):
                inner = os.path.relpath(real, root)
                parts = [part for part in (place, inner) if part not in ("", ".")]
                found[os.fsencode(path)] = os.fsencode("/".join(parts))
    return tuple(sorted(found.items(), key=lambda each: -len(each[0])))


def _within(path: str, *folders: str) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders if folder)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_LARGEST)
    except OSError:
        return b""


def _distribution(dist_info: str) -> str:
    return dist_info.removesuffix(".dist-info").partition("-")[0]


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
