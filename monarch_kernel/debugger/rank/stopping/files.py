"""Match a breakpoint's file to the loaded files of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from monarch_kernel.debugger.source_locations import LIBRARY, kind_of, matching_parts

_SAME = 1000

#: The controller's path of a file that was synced to this host; None for others.
ClientPath = Callable[[str], str | None]


def not_synced(_path: str) -> None:
    """Return None; used as the ``ClientPath`` if nothing was synced."""


class Files:
    """The files that breakpoints name, and how well each loaded file matches each of them.

    The same file, or the same name of a cell, matches best. Otherwise, it is the file whose path shares the most
    components with the requested one, counted from the end: a workspace may have another path on this host. A file that
    was synced there also matches like the controller's file that it came from. A library file must match by more than
    its base name.

    Args:
        asked: the files of breakpoints.
        client_path: translates loaded files.
    """

    def __init__(self, asked: Iterable[str], client_path: ClientPath) -> None:
        self._client_path = client_path
        self._asked = sorted(set(asked))
        self._bases = {os.path.basename(name) for name in self._asked}
        self._best = dict.fromkeys(self._asked, 1)
        self._seen: dict[str, tuple[str, ...]] = {}

    def match(self, loaded: str) -> tuple[str, ...]:
        """Return the requested names that a loaded file may match. Check `stands_for` before use."""
        found = self._seen.get(loaded)
        if found is None:
            found = self._seen[loaded] = tuple(self._matches(loaded))
        return found

    def stands_for(self, asked: str, loaded: str) -> bool:
        """Return whether a loaded file still matches best, of all files that are loaded now."""
        return self._score(asked, loaded) >= self._best.get(asked, 1)

    def _matches(self, loaded: str) -> list[str]:
        library = kind_of(loaded) == LIBRARY
        if library and os.path.basename(loaded) not in self._bases:
            return []  # most files end here, so it is cheap
        found: list[str] = []
        for asked in self._asked:
            score = self._score(asked, loaded)
            if score >= self._best[asked]:
                self._best[asked] = score
                found.append(asked)
        return found

    def _score(self, asked: str, loaded: str) -> int:
        score = matching_parts(asked, loaded)
        synced_from = self._client_path(loaded) if score < _SAME else None
        if synced_from is not None:  # the user names the controller's file
            score = max(score, matching_parts(asked, synced_from))
        if 0 < score < _SAME and kind_of(loaded) == LIBRARY:
            whole = asked.strip(os.sep).count(os.sep) + 1
            return score if score > 1 and score == whole else 0
        return score
