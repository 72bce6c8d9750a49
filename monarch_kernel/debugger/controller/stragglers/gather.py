"""Query the ranks of a mesh for the times at which they entered their latest collectives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from monarch_kernel.actor import ActorMesh, ProcMesh
from monarch_kernel.debugger.controller.query import ask, chosen_ranks
from monarch_kernel.debugger.controller.stragglers.stragglers_report import LAST, StragglerReport
from monarch_kernel.debugger.model.collective_times import CollectiveTimes
from monarch_kernel.debugger.rank.hang.entry_times import collective_times
from monarch_kernel.debugger.source_locations import Label, SourceLocation
from monarch_kernel.engines import tool_runtime
from monarch_kernel.meshes import format_ranks
from monarch_kernel.workers import client_path

#: How many collectives of each group a rank reports: all that PyTorch keeps by default.
DEPTH = 2000


def stragglers(
    mesh: ProcMesh | ActorMesh[Any],
    *,
    last: int = LAST,
    ranks: Iterable[int] | None = None,
    timeout: float = 10.0,
    label: Label | None = None,
    each: bool = False,
) -> StragglerReport:
    """Find ranks that arrive late at collectives, how long others wait for them, and at which lines.

    Reads existing records: PyTorch's Flight Recorder keeps the latest 2,000 collectives of a process.

    Args:
        mesh: a proc mesh or an actor mesh, or a slice of one.
        last: how many of the latest collectives of each line to examine.
        ranks: the ranks of the mesh; all by default.
        timeout: how long to wait for ranks that do not answer (seconds).
        label: labels files, such as `Cell In[3]`.
        each: also show when each rank arrived at each of the latest collectives.

    Raises:
        ValueError: the mesh has no such rank, or `last` is not positive.
        TypeError: `mesh` is not a mesh.
        RuntimeError: the mesh was stopped.
    """
    if last < 1:
        raise ValueError(f"last is a number of at least 1, not {last}")
    whole = tool_runtime().whole_of(mesh)
    chosen = chosen_ranks(ranks, len(whole.ranks))
    answers = ask(mesh, collective_times, DEPTH, ranks=chosen, timeout=timeout)
    hosts = tool_runtime().hosts_of(whole.procs)
    records = [
        _at_client(msgspec.structs.replace(each, rank=rank, host=hosts[whole.ranks[rank]] or each.host))
        for rank, each in answers.values.items()
    ]
    notes = (
        [f"Ranks {format_ranks(answers.late, limit=8)} did not answer within {timeout:g} s."] if answers.late else []
    )
    notes += [f"Rank {rank} is dead: {why}." for rank, why in sorted(answers.dead.items())]
    notes += [f"Rank {rank} could not report: {answers.error_of(rank)}" for rank in sorted(answers.errors)]
    return StragglerReport(f"mesh {whole.procs.name}", records, last, notes=notes, label=label, each=each)


def _at_client(record: CollectiveTimes) -> CollectiveTimes:
    """Return a copy of a record that uses the controller's file names, so that records of all hosts are comparable."""
    names: dict[str, str] = {}

    def named(place: SourceLocation | None) -> SourceLocation | None:
        if place is None:
            return None
        if place.file not in names:
            names[place.file] = client_path(place.file) or place.file
        return place._replace(file=names[place.file])

    calls = tuple(msgspec.structs.replace(call, place=named(call.place)) for call in record.calls)
    return msgspec.structs.replace(record, calls=calls)
