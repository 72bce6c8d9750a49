"""What sources tell a board: each fact names what it is about, and the fields of its view that it knows."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from monarch_kernel.watch.model import ActorView, JobView, RankState, StopView


class MeshFact(msgspec.Struct, frozen=True):
    """A mesh with its ranks, which is new, or has others in the places of dead ones.

    Attributes:
        procs, hosts: of each rank: the identifier of its process, and the key of its host.
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
    """A mesh was stopped, or belongs to another controller now."""

    key: str


class MeshMark(msgspec.Struct, frozen=True):
    """Fields of a ``MeshView``: ``current``, ``kept`` or ``hang``. Unknown meshes are ignored."""

    key: str
    fields: dict[str, Any]


class CurrentMesh(msgspec.Struct, frozen=True):
    """The one mesh on which ``%%mesh`` cells run; an empty key: none."""

    key: str


class HostFact(msgspec.Struct, frozen=True):
    """Fields of a ``HostView``. Unknown hosts are ignored."""

    key: str
    fields: dict[str, Any]


class ProcFact(msgspec.Struct, frozen=True):
    """Fields of the ``RankView`` of a process, except those that follow from others, such as ``state`` and ``doing``.

    Unknown processes are ignored, and so are those that are dead.
    """

    proc: str
    fields: dict[str, Any]


class ActorsFact(msgspec.Struct, frozen=True):
    """Actors of a process that are new or differ, by the unique names of their meshes, and those that are gone."""

    proc: str
    actors: dict[str, ActorView]
    gone: tuple[str, ...] = ()


class StopFact(msgspec.Struct, frozen=True):
    """Where a rank is stopped in the debugger; None: nowhere any more.

    Attributes:
        mesh, rank: the ``key`` of the mesh, and the rank.
        since: when it stopped.
    """

    mesh: str
    rank: int
    stop: StopView | None
    since: float = 0.0


class CellFact(msgspec.Struct, frozen=True):
    """The notebook cell that runs on a process itself; ``cell`` is empty if none does."""

    proc: str
    cell: str
    since: float


class CellName(msgspec.Struct, frozen=True):
    """What people call a cell, such as ``cell [7]``.

    Attributes:
        cell: its id or the beginning of it up to a dot, or the file that its code is compiled under.
    """

    cell: str
    name: str


class Condition(msgspec.Struct, frozen=True):
    """A condition of a process begins or ends; several may hold, and the worst is its state.

    Attributes:
        state: ``STARTING``, ``DEAD``, ``ENDED``, ``UNRESPONSIVE`` or ``HEALING``.
        holds: whether it begins.
        since: when it began.
        cause: why.
    """

    proc: str
    state: RankState
    holds: bool
    since: float = 0.0
    cause: str = ""


class FailureFact(msgspec.Struct, frozen=True):
    """Something went wrong; ``kind`` as in ``FailureView``.

    Attributes:
        procs: that it concerns; if there are none, ``mesh`` names the mesh, and all its ranks are meant.
        time: when (seconds since 1970); 0: now.
    """

    kind: str
    text: str
    procs: tuple[str, ...] = ()
    mesh: str = ""
    time: float = 0.0


class JobsFact(msgspec.Struct, frozen=True):
    """All jobs whose hosts are waited for."""

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
