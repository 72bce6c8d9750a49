"""`WorldGroup`: the process group of all ranks of an engine, the groups within it, and groups among arguments."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.spmd.groups import Group, ProcessGroups
from monarch_kernel.runtime.tensor.controller.stream import MAIN
from monarch_kernel.runtime.tensor.rank import groups
from monarch_kernel.runtime.tensor.rank.groups import RankGroups

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.healing.healed import HostSource
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.controller.stream import Stream
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


Partition = tuple[tuple[int, ...], ...]

#: How long all ranks may take to join a group (seconds), and how often one is formed until they have.
JOIN_PATIENCE = 30.0
JOINS = 3


class WorldGroup:
    """Process groups, formed when a collective first needs them.

    All are made on the ranks' main stream, so all ranks make them in one order. A group of all ranks that their program
    has already joined is used as it is. After a collective that broke, all are formed anew.
    """

    def __init__(self, engine: TensorEngine) -> None:
        self._engine = engine
        self._groups: ProcessGroups | None = None
        self._made: set[tuple[int, Partition]] = set()
        self._formed = False
        self._failures = 0
        self._lock = threading.RLock()
        #: Called when all ranks have joined a group.
        self.after_joining: list[Callable[[], None]] = []

    def need(self, stream: Stream, partition: Partition) -> None:
        """See that the groups of a collective exist.

        Args:
            partition: the ranks of the world that meet.

        Raises:
            DeviceMeshError: a rank has died.
        """
        self._need(stream.number, partition, alone=False)

    def need_own(self, own: groups.RankGroups) -> None:
        """See that groups of the program exist.

        Raises:
            DeviceMeshError: a rank has died.
        """
        self._need(own.stream, own.partition, alone=True)

    def _need(self, stream: int, partition: Partition, alone: bool) -> None:
        with self._lock:
            self.ensure()
            if (stream, partition) not in self._made:
                everywhere(self._engine, groups.make, stream, partition, alone)
                self._made.add((stream, partition))

    def ensure(self) -> None:
        """See that the group of all ranks exists, and that no failure has broken it.

        Raises:
            DeviceMeshError: a rank has died.
        """
        with self._lock:
            engine = self._engine
            if self._formed and engine.failures != self._failures:
                self._failures = engine.failures
                if not all(everywhere(engine, groups.default_group)):
                    self._formed = False
            if not self._formed:
                self.form()

    def form(self, hosts: HostMesh | HostSource | None = None) -> Group | None:
        """Form the group of all ranks; ranks that wait in the one before are released, and dead ones replaced.

        Args:
            hosts: spare hosts, as for ``ProcMesh.heal``.

        Returns:
            The group; None if the program's own is used.

        Raises:
            HealError: ranks cannot be replaced.
        """
        with self._lock, _disable_current_modes():
            engine = self._engine
            self._made.clear()
            if engine.lost_workers:
                engine.world.heal(hosts).get()
                engine.bring_back()
            if self._groups is None:
                engine.world.heal(hosts).get()
                engine.note_replaced()
                size = len(engine.world._procs)
                if everywhere(engine, groups.default_group) == [(rank, size) for rank in range(size)]:
                    self._formed = True
                    self._joined()
                    return None
                gpus = [gpu for gpu in everywhere(engine, groups.gpu) if gpu]
                # NCCL refuses ranks that share a GPU.
                on_gpu = "nccl" if len(gpus) == len(set(gpus)) else "gloo"
                self._groups = ProcessGroups(engine.world, f"cpu:gloo,cuda:{on_gpu}" if gpus else "gloo")
            left = JOINS
            while True:
                left -= 1
                group = self._groups.form(hosts).get()
                engine.note_replaced()
                try:
                    everywhere(engine, groups.form, group, timeout=JOIN_PATIENCE)
                    break
                except TimeoutError:
                    # A rank that began a collective of the old group just after it was released may wait there: the
                    # next release frees it, or it is replaced.
                    if not left:
                        raise
            self._formed = True
            self._joined()
            return group

    def _joined(self) -> None:
        for joined in self.after_joining:
            joined()

    def release(self) -> None:
        """Free the ranks from collectives of the group, which is not usable then."""
        self.broken()
        if self._groups is not None:
            self._groups.release().get()

    def broken(self) -> None:
        """The group is formed anew when it is next needed."""
        self._formed = False


def everywhere(engine: TensorEngine, function: Any, *args: Any, timeout: float | None = None) -> list[Any]:
    """Call a function on all ranks of the engine's world, in order with the main stream; answers in rank order.

    Raises:
        TimeoutError: a rank has not answered in time.
    """
    mesh = engine.mesh_of(engine.world)
    with engine.lock, _disable_current_modes():
        mesh.check_alive()
        engine.flush()
        call = MAIN.workers_of(engine).ask.call(
            b"", b"", engine.record, cloudpickle.dumps(functools.partial(function, *args)), []
        )
    return list(engine.answer(mesh, call, timeout).values())


class GroupArgument(ABC):
    """Process groups of a mesh; `RemoteProcessGroup` is what programs have."""

    @abstractmethod
    def on_ranks(self, mesh: TensorMesh) -> RankGroups:
        """What ranks get in its place, of which they make their group. Sees to it that the groups exist."""


def groups_on_ranks(mesh: TensorMesh, flat: list[Any]) -> bool:
    """Put what ranks get in the places of process groups among arguments; returns whether there were any."""
    found = [k for k, x in enumerate(flat) if isinstance(x, GroupArgument)]
    for k in found:
        flat[k] = flat[k].on_ranks(mesh)
    return bool(found)
