"""Offers a sync below a cell that has installed something, as hosts do not get it by themselves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from monarch_kernel.engines import engine
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.workers import placement_of

if TYPE_CHECKING:
    from workspace_sync.environment.kinds import Installed
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
        self._before: dict[str, Installed] | None = None

    def before(self, cell: str) -> None:
        """Note what is installed, if the cell with this text may change it."""
        self._before = _installed() if _INSTALLS.search(cell) and self._concerned() else None

    def notice(self) -> str:
        """The line to print below the cell; empty if nothing has changed, or no host has a synced tree."""
        before, self._before = self._before, None
        if before is None:
            return ""
        from workspace_sync.environment import changed_distributions

        after, meshes = _installed(), self._concerned()
        if after is None or not meshes:
            return ""
        found = changed_distributions(before, after)
        new = [f"{name} {version}" for name, version in found.added.items()]
        new += [f"{name} {now}" for name, (_, now) in found.changed.items()]
        parts = [f"installed {names(new)}"] if new else []
        parts += [f"removed {names(list(found.removed))}"] if found.removed else []
        if not parts:
            return ""
        return f"{'; '.join(parts)}: %mesh sync --env brings this to the hosts of {names(meshes)}"

    def _concerned(self) -> list[str]:
        """The meshes with hosts that have a synced tree."""
        if "sync" not in engine().OFFERS:
            return []
        return [name for name, mesh in self._session.proc_meshes().items() if any(placement_of(mesh))]


def _installed() -> dict[str, Installed] | None:
    """What is installed in the environment that this kernel runs in; None if it is in none."""
    from workspace_sync.environment import distributions, environment
    from workspace_sync.model.errors import ScanError
    from workspace_sync.model.workspace import CondaEnvironment

    try:
        return distributions(environment(CondaEnvironment()))
    except (ValueError, ScanError):
        return None
