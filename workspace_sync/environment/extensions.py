"""Compiled extensions in folders of a workspace that are not what the sources beside them say."""

from __future__ import annotations

import re

from workspace_sync.model.manifest import Manifest, printable

_SOURCES = (b".c", b".cc", b".cpp", b".cxx", b".pyx", b".cu", b".rs", b".f90")
_ABI = re.compile(rb"\.cpython-(\d)(\d+)[a-z]*-[^.]*\.so\Z")

#: The digests of folders that have no extension: most have none, and are the same in the next sync.
_without: set[bytes] = set()
_MOST_KNOWN = 1 << 16


def stale_extensions(sources: Manifest, version: str) -> list[str]:
    """Sentences on extensions that are older than a source beside them, or for another Python.

    Args:
        sources: the folders with the sources.
        version: of the environment's Python, as "3.11".
    """
    notes: list[str] = []
    for path, folder in sources.folders.items():
        if folder.digest in _without:
            continue
        if not any(name.endswith(b".so") for name in folder.files):
            if len(_without) >= _MOST_KNOWN:
                _without.clear()
            _without.add(folder.digest)
            continue
        newest = max((entry.mtime for name, entry in folder.files.items() if name.endswith(_SOURCES)), default=0)
        for name, entry in folder.files.items():
            if not name.endswith(b".so"):
                continue
            shown = printable(path + b"/" + name)
            found = _ABI.search(name)
            if found is not None and f"{int(found[1])}.{int(found[2])}" != version:
                notes.append(
                    f"{shown} is for Python {int(found[1])}.{int(found[2])}, and the environment has {version}"
                )
            elif entry.mtime < newest:
                notes.append(f"{shown} is older than a source beside it: build it again")
    return notes
