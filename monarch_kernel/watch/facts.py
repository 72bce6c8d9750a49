"""Facts that sources report to a board. Each has the key of an object and the known fields of its view."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from monarch_kernel.watch.model import ActorView, JobView, RankState, StopView


class MeshFact(msgspec.Struct, frozen=True):
    """A mesh with its ranks. The mesh is new, or dead ranks were replaced.

    Attributes:
        procs, hosts: for each rank, the identifier of its process and the key of its host.
        host_names: names of these hosts, by their keys.
    """

    key: str
    name: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    procs: tuple[str, ...]
    hosts: tuple[str, ...]
    host_names: dict[str, str]
    kept: str = ""


class MeshGone(msgspec.Struct, frozen=True):
    """A mesh was stopped, or now belongs to another controller."""

    key: str


class MeshMark(msgspec.Struct, frozen=True):
    """Fields of a ``MeshView``: ``current``, ``kept`` or ``hang``. Unknown meshes are ignored."""

    key: str
    fields: dict[str, Any]


class CurrentMesh(msgspec.Struct, frozen=True):
    """The mesh on which ``%%mesh`` cells run; an empty key if there is none."""

    key: str


class HostFact(msgspec.Struct, frozen=True):
    """Fields of a ``HostView``. Unknown hosts are ignored."""

    key: str
    fields: dict[str, Any]


class ProcFact(msgspec.Struct, frozen=True):
    """Fields of the ``RankView`` of a process, except derived fields such as ``state`` and ``doing``.

    Unknown and dead processes are ignored.
    """

    proc: str
    fields: dict[str, Any]


class ActorsFact(msgspec.Struct, frozen=True):
    """New, changed and ended actors of a process, by the unique names of their meshes."""

    proc: str
    actors: dict[str, ActorView]
    gone: tuple[str, ...] = ()


class StopFact(msgspec.Struct, frozen=True):
    """Where a rank is stopped in the debugger; None: it is no longer stopped.

    Attributes:
        mesh, rank: the ``key`` of the mesh, and the rank.
        since: when it stopped.
    """

    mesh: str
    rank: int
    stop: StopView | None
    since: float = 0.0


class CellFact(msgspec.Struct, frozen=True):
    """The notebook cell that runs directly on a process; ``cell`` is empty if there is none."""

    proc: str
    cell: str
    since: float


class CellName(msgspec.Struct, frozen=True):
    """The display name of a cell, such as ``cell [7]``.

    Attributes:
        cell: its id or the prefix of the id up to a dot, or the file that its code is compiled under.
    """

    cell: str
    name: str


class Condition(msgspec.Struct, frozen=True):
    """A condition of a process begins or ends. Several may hold; the worst determines the state.

    Attributes:
        state: ``STARTING``, ``DEAD``, ``ENDED``, ``UNRESPONSIVE`` or ``HEALING``.
        holds: whether it begins.
        since: when it began.
        cause: the reason.
    """

    proc: str
    state: RankState
    holds: bool
    since: float = 0.0
    cause: str = ""


class FailureFact(msgspec.Struct, frozen=True):
    """A failure; ``kind`` as in ``FailureView``.

    Attributes:
        procs: the affected processes; if empty, all ranks of ``mesh``.
        time: when it happened (seconds since 1970); 0: now.
    """

    kind: str
    text: str
    procs: tuple[str, ...] = ()
    mesh: str = ""
    time: float = 0.0


class JobsFact(msgspec.Struct, frozen=True):
    """All jobs whose hosts are awaited."""

    jobs: tuple[JobView, ...]


Fact: TypeAlias = (
    MeshFact
    | MeshGone
    | MeshMark
    | CurrentMesh
    | HostFact
    | ProcFact
    | ActorsFact
    | StopFact
    | CellFact
    | CellName
    | Condition
    | FailureFact
    | JobsFact
)
