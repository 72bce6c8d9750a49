"""Records of how the procs and actors of a mesh were created, so that healing can create them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel.protocol.messages import ProcRef, SpawnProcs
from monarch_kernel.runtime.actor.healing.report import HostSource

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh


class SpawnedActors(msgspec.Struct):
    """How the actors of one mesh were created."""

    mesh: ActorMesh[Any]
    owner: str
    body: bytes
    buffers: tuple[int, ...]
    ports: Sequence[Any] = ()  # the ports in that pickle; each successor gets them again


class SpawnedProcs(msgspec.Struct):
    """How the procs of one mesh were started."""

    messages: dict[int, tuple[SpawnProcs, int]]  # by rank: the message, and the index of the rank's proc in it
    bootstrap: tuple[Any, tuple[int, ...]]
    spares: list[ProcRef]  # agents of hosts that stay empty until another host is gone
    incarnations: dict[int, int] = msgspec.field(default_factory=dict)
    source: HostSource | None = None  # where further hosts come from
