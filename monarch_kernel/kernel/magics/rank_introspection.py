"""Completion and inspection in `%%mesh` cells, with the names of a rank instead of those of the notebook.

The notebook queries the first rank of the cell that it believes to be idle. If that rank does not answer within a
moment, the notebook continues without an answer and does not query the rank again for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from monarch_kernel.kernel.cell import split_header
from monarch_kernel.kernel.cell_run import CellRun
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay
from monarch_kernel.kernel.rank import name_lookup

if TYPE_CHECKING:
    from monarch_kernel.kernel.rank.lazy_shell import LazyShell
    from monarch_kernel.kernel.session import ManagedMesh, MeshSession

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: The time for ranks to answer (seconds): the first time, when they may have to import IPython, and later.
FIRST, LATER = 3.0, 1.0
#: The delay before a rank that has not answered is queried again (seconds).
REST = 20.0

#: Returns the mesh and the ranks that the first line of a cell addresses, or None.
Addressed = Callable[[str], "tuple[ManagedMesh, Sequence[int]] | None"]


class Introspection:
    """Queries ranks about names in cells that are being typed.

    Args:
        session: the meshes.
        addressed: parses the first line of a cell.
    """

    def __init__(self, session: MeshSession, addressed: Addressed) -> None:
        self._session = session
        self._addressed = addressed
        self._answered: set[tuple[str, int]] = set()
        self._late: dict[tuple[str, int], float] = {}

    def complete(self, code: str, cursor: int) -> tuple[str, list[tuple[str, str]]] | None:
        """Return `name_lookup.completions` at a position in a cell; None if no rank was queried, or none answered."""
        split = split_header(code)
        if split is None or cursor < len(split[0]):
            return None
        header, body = split
        return self._ask(header, name_lookup.completions, body, cursor - len(header))

    def describe(self, code: str, cursor: int, name: str, detail: int, omit: Sequence[str]) -> dict[str, Any] | None:
        """Return the description of a name in a cell as a MIME bundle; None without an answer, or if it is unknown."""
        split = split_header(code)
        if split is None or cursor < len(split[0]):
            return None
        return self._ask(split[0], name_lookup.description, name, detail, tuple(omit))

    def variables(self) -> list[str]:
        """Return the variables of a rank of the mesh in use."""
        return self._ask("%%mesh", name_lookup.variables) or []

    def _ask(self, first_line: str, function: Callable[[LazyShell, *Ts], T], *args: *Ts) -> T | None:
        found = self._addressed(first_line.strip().removeprefix("%%mesh"))
        if found is None:
            return None
        managed, ranks = found
        from monarch_kernel.debugger.controller.query import ask

        for rank in self._order(managed, ranks)[:2]:
            key = (managed.procs.name, rank)
            timeout = LATER if key in self._answered else FIRST
            answers = ask(managed.procs, name_lookup.look_up, function, args, ranks=[rank], timeout=timeout)
            if rank in answers.values:
                self._answered.add(key)
                return answers.values[rank]
            if rank in answers.late:
                self._late[key] = time.monotonic() + REST
                return None
        return None

    def _order(self, managed: ManagedMesh, ranks: Sequence[int]) -> list[int]:
        """Return the ranks to query, best first, without those that recently failed to answer."""
        now = time.monotonic()
        name = managed.procs.name
        runs = [run for run in get_relay().background if isinstance(run, CellRun) and run.managed is managed]
        busy = set[int]().union(*(run.waiting for run in runs))
        silent = managed.procs.unresponsive()
        fit = [rank for rank in ranks if rank not in silent and self._late.get((name, rank), 0.0) <= now]
        return sorted(fit, key=lambda rank: rank in busy)
