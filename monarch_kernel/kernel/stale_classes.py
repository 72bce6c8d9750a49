"""Warns once about actors whose class a cell has redefined: they continue with the old definition."""

from __future__ import annotations

import re
from typing import Any

from monarch_kernel.actor import ActorMesh


class StaleClasses:
    """Checks the actor meshes that a cell names.

    Args:
        names: the variables of the notebook.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._told: set[tuple[str, int]] = set()

    def notices(self, cell: str) -> list[str]:
        """The warnings to print below a cell with this text."""
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
    """Whether the code of two classes of the same name differs. Rerunning an unchanged cell makes no difference."""
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
