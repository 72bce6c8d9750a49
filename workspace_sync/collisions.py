"""Modules that two folders of a workspace offer under one name: ranks import the one whose folder comes first."""

from __future__ import annotations

import os
from collections.abc import Mapping

from workspace_sync.model.manifest import Manifest, printable

# Every project has these, and nobody imports them by name.
_COMMON = frozenset(b"__init__ __main__ conftest doc docs noxfile setup test tests versioneer".split())


def collisions(tree: Manifest, dirs: Mapping[str, str]) -> list[str]:
    """Sentences on top-level modules that several folders have.

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
    prefix = place + b"/" if place else b""
    found |= {name for name in folder.folders if b"__init__.py" in tree.folders[prefix + name].files}
    return found - _COMMON
