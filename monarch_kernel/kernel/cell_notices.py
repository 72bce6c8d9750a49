"""Notices below an ordinary cell: packages that hosts lack, actors of a redefined class, and costs on meshes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from IPython.display import display

from monarch_kernel.actor import ActorMesh
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.workers import placement_of
from workspace_sync.receipt import names

if TYPE_CHECKING:
    from workspace_sync.environment.kinds import Installed

# A line that may change an environment: `%pip install x`, `!uv pip install x`, `%conda update x`, `!python -m pip ...`.
_INSTALLS = re.compile(
    r"^\s*[%!]{1,2}.*\b(?:pip|uv|conda|mamba|micromamba|pixi)3?\b.*\b"
    r"(?:install|uninstall|remove|update|upgrade|add|sync|create)\b",
    re.MULTILINE,
)


class EnvironmentChanges:
    """Offers a sync below a cell that has installed packages, because hosts do not receive them automatically.

    Args:
        session: the notebook's meshes.
    """

    def __init__(self, session: MeshSession) -> None:
        self._session = session
        self._before: dict[str, Installed] | None = None

    def before(self, cell: str) -> None:
        """Record the installed packages before a cell whose text may change them."""
        self._before = _installed() if _INSTALLS.search(cell) and self._concerned() else None

    def notice(self) -> str:
        """Return the line to print below the cell; empty if nothing has changed, or no host has a synced tree."""
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
        """Return the meshes with hosts that have a synced tree."""
        if "sync" not in tool_runtime().OFFERS:
            return []
        return [name for name, mesh in self._session.proc_meshes().items() if any(placement_of(mesh))]


def _installed() -> dict[str, Installed] | None:
    """Return the packages installed in the environment of this kernel; None if it has no environment."""
    from workspace_sync.environment import distributions, environment
    from workspace_sync.model.errors import ScanError
    from workspace_sync.model.workspace import CondaEnvironment

    try:
        return distributions(environment(CondaEnvironment()))
    except (ValueError, ScanError):
        return None


class StaleClasses:
    """Warns once about each actor named in a cell whose class was redefined: the actor keeps the old definition.

    Args:
        names: the variables of the notebook.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._told: set[tuple[str, int]] = set()

    def notices(self, cell: str) -> list[str]:
        """Return the warnings to print below a cell with this text."""
        said: list[str] = []
        for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", cell)):
            mesh = self._names.get(name)
            if not isinstance(mesh, ActorMesh):
                continue
            old = mesh._cls_or_pickle
            new = self._names.get(old.__qualname__) if isinstance(old, type) else None
            if not isinstance(old, type) or not isinstance(new, type) or not _differ(old, new):
                continue
            if (mesh._actor, id(new)) not in self._told:
                self._told.add((mesh._actor, id(new)))
                said.append(
                    f"{name}: these actors run the class {old.__qualname__} as it was when they were spawned; spawn "
                    "them again to use the new definition."
                )
        return said


def _differ(old: type, new: type) -> bool:
    """Return whether the code of two classes differs. Rerunning an unchanged cell makes no difference."""
    return old is not new and old.__module__ == new.__module__ == "__main__" and _code(old) != _code(new)


def _code(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, member in vars(cls).items():
        function = getattr(member, "__wrapped__", None) or member
        code = getattr(function, "__code__", None)
        if code is not None:
            found[name] = code
        elif isinstance(member, int | float | str | bytes | tuple) and not name.startswith("__"):
            found[name] = member
    return found


class CellPlans:
    """Shows the cost of mesh operations below each cell while `%mesh plan on` is active.

    Attributes:
        is_on: whether it is active.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._plan: Any = None

    def before_cell(self) -> None:
        """Start recording a plan for the cell."""
        self._plan = None
        if self.is_on:
            from monarch_kernel.tensor import Explanation

            self._plan = Explanation().__enter__()

    def after_cell(self) -> None:
        """Show the plan of the cell that has ended."""
        plan, self._plan = self._plan, None
        if plan is not None and self.is_on:
            plan.__exit__(None, None, None)
            if plan.lines:
                display(plan)
