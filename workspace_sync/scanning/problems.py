"""What keeps a workspace from being scanned, gathered so that one error names all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import printable

#: How many paths an error names.
_NAMED = 10


@dataclass(slots=True)
class Problems:
    """Paths of the client by what is wrong with them; links with their targets."""

    unreadable: list[bytes] = field(default_factory=list[bytes])
    outside: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    loops: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    unsteady: list[bytes] = field(default_factory=list[bytes])
    failed: list[tuple[bytes, str]] = field(default_factory=list[tuple[bytes, str]])

    def check(self) -> None:
        """Raise if there are any.

        Raises:
            ScanError: there are; the message names up to 10 of each kind, and what to do.
        """
        parts: list[str] = []
        if self.unreadable:
            parts.append(
                f"{_counted(self.unreadable, 'cannot be read', 'cannot be read')} by you: "
                f"{_listed([printable(path) for path in self.unreadable])}. "
                "Change their permissions, or leave them out with lines in a .meshignore file."
            )
        if self.outside:
            parts.append(
                f"{_counted(self.outside, 'is a link that leads', 'are links that lead')} out of the workspace: "
                f"{_listed(_arrows(self.outside))}. Leave them out with lines in a .meshignore file, copy what they "
                'lead to with Workspace(links="follow") (--links follow), or keep them with Workspace(links="keep") '
                "(--links keep) if every host has what they lead to."
            )
        if self.loops:
            parts.append(
                f"{_counted(self.loops, 'is a link that leads', 'are links that lead')} back to a folder that holds "
                f"it: {_listed(_arrows(self.loops))}. Leave them out with lines in a .meshignore file."
            )
        if self.unsteady:
            parts.append(
                f"{_counted(self.unsteady, 'changes', 'change')} without pause while being read: "
                f"{_listed([printable(path) for path in self.unsteady])}. Wait until what writes them is done, or "
                "leave them out with lines in a .meshignore file."
            )
        if self.failed:
            parts.append(
                f"{_counted(self.failed, 'cannot be read', 'cannot be read')}: "
                f"{_listed([f'{printable(path)} ({why})' for path, why in self.failed])}."
            )
        if parts:
            raise ScanError(" ".join(parts) + " Nothing was synced.")


def _counted(paths: Sequence[object], one: str, more: str) -> str:
    return f"1 path {one}" if len(paths) == 1 else f"{len(paths)} paths {more}"


def _arrows(links: list[tuple[bytes, bytes]]) -> list[str]:
    return [f"{printable(path)} -> {printable(target)}" for path, target in links]


def _listed(texts: list[str]) -> str:
    rest = len(texts) - _NAMED
    return ", ".join(sorted(texts)[:_NAMED]) + (f", and {rest} more" if rest > 0 else "")
