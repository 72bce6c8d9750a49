"""Offers a sync below a cell that has installed something, as hosts do not get it by themselves."""

from __future__ import annotations

import os
import re
import sys

from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.workers import placement_of
from workspace_sync.receipt import names

# A line that may change an environment: `%pip install x`, `!uv pip install x`, `%conda update x`, `!python -m pip ...`.
_INSTALLS = re.compile(
    r"^\s*[%!]{1,2}.*\b(?:pip|uv|conda|mamba|micromamba|pixi)3?\b.*\b"
    r"(?:install|uninstall|remove|update|upgrade|add|sync|create)\b",
    re.MULTILINE,
)


class EnvironmentChanges:
    """Compares what is installed before and after a cell that looks as if it installed something.

    Args:
        session: the notebook's meshes.
    """

    def __init__(self, session: MeshSession) -> None:
        self._session = session
        self._before: dict[str, str] | None = None

    def before(self, cell: str) -> None:
        """Note what is installed, if the cell with this text may change it."""
        self._before = installed() if _INSTALLS.search(cell) and self._concerned() else None

    def notice(self) -> str:
        """The line to print below the cell; empty if nothing has changed, or no host has a synced tree."""
        before, self._before = self._before, None
        if before is None:
            return ""
        after = installed()
        new = [f"{name} {version}" for name, version in after.items() if before.get(name) != version]
        gone = [f"{name} was removed" for name in before if name not in after]
        meshes = self._concerned()
        if not (new or gone) or not meshes:
            return ""
        what = "; ".join(filter(None, (f"installed {names(new)}" if new else "", *gone)))
        return f"{what}: %mesh sync --env brings this to the hosts of {names(meshes)}"

    def _concerned(self) -> list[str]:
        """The meshes with hosts that have a synced tree."""
        return [name for name, mesh in self._session.proc_meshes().items() if any(placement_of(mesh))]


def installed() -> dict[str, str]:
    """The versions of what is installed in this interpreter's environment, by name; reads only names of files."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys([*sys.path, os.path.join(sys.prefix, "conda-meta")]):
        try:
            entries = os.listdir(folder) if folder.startswith(sys.prefix) else []
        except OSError:
            continue
        for entry in entries:
            if entry.endswith((".dist-info", ".egg-info")):
                name, _, version = entry.rpartition(".")[0].partition("-")
                found[name] = version
            elif entry.endswith(".json") and folder.endswith("conda-meta"):
                name, version, _build = [*entry.rsplit("-", 2), "", ""][:3]
                found[name] = version
    return dict(sorted(found.items()))
