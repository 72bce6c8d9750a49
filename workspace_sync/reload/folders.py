"""Names of a file: at the client, in the tree that its host has now, and in a tree that its host had before."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

_CURRENT = "/current/tree"
# What stands in the place of `current/tree` where symbolic links were resolved, in this tree and in earlier ones.
_RESOLVED = r"/(?:generations/[^/]+/tree|slots/[^/]+)"


class Folders:
    """The folders of a workspace.

    Args:
        pairs: each folder of the client with the folder that a host has for it. One that is given alone (equal names)
            is used in place, as by ranks on the client's own host before any sync.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        # The host's own folders first: a path in one of them is not looked for among those of the client.
        self.pairs = sorted({(_plain(here), _plain(there)) for here, there in pairs}, key=lambda p: (p[0] == p[1], p))
        self._earlier: list[tuple[re.Pattern[str], str, str]] = []
        for here, there in self.pairs:
            root, current, place = there.rpartition(_CURRENT)
            if current:
                real = os.path.realpath(root)
                roots = "|".join(re.escape(each) for each in dict.fromkeys((root, real)))
                pattern = re.compile(rf"(?:{roots}){_RESOLVED}{re.escape(place)}(?=/|$)")
                self._earlier.append((pattern, here, there))

    def at_client(self, path: str) -> str | None:
        """The client's name of a file; None if it is not in the workspace."""
        for here, there in self.pairs:
            rest = _below(path, there)
            if rest is not None:
                return here + rest
        for pattern, here, _there in self._earlier:
            found = pattern.match(path)
            if found is not None:
                return here + path[found.end() :]
        for here, _there in self.pairs:
            if _below(path, here) is not None:
                return path
        return None

    def outside(self, paths: Iterable[str]) -> str:
        """The first folder of the client that has one of these paths, although the host has its own; else ""."""
        for path in paths:
            if any(_below(path, there) is not None for _here, there in self.pairs):
                continue
            for here, there in self.pairs:
                if here != there and _below(path, here) is not None:
                    return here
        return ""

    def now(self, path: str) -> str:
        """The name that a file has in the tree that its host has now; the same if it is not in a former one."""
        for pattern, _here, there in self._earlier:
            found = pattern.match(path)
            if found is not None:
                return there + path[found.end() :]
        return path


def _plain(folder: str) -> str:
    return folder.rstrip("/") or "/"


def _below(path: str, folder: str) -> str | None:
    if path == folder:
        return ""
    return path[len(folder) :] if path.startswith(folder + "/") else None
