"""Manage the process group of all ranks of an engine and its subgroups, and pass groups as arguments: `WorldGroup`."""

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

#: The time for all ranks to join a group (seconds), and the number of attempts to form it.
JOIN_PATIENCE = 30.0
JOINS = 3


class WorldGroup:
    """Process groups, which are formed when a collective first needs them.

    All groups are created on the ranks' main stream, so all ranks create them in the same order. If the program of the
    ranks has already joined a group of all ranks, that group is used. After a failed collective, all groups are formed
    again.
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
        """Form the groups of a collective, if they do not exist yet.

        Args:
            partition: the ranks of the world that meet.

        Raises:
            DeviceMeshError: a rank has died.
        """
        self._need(stream.number, partition, alone=False)

    def need_own(self, own: groups.RankGroups) -> None:
        """Form groups of the program, if they do not exist yet.

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
        """Form the group of all ranks, if it does not exist or a failure has broken it.

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
        """Form the group of all ranks. Ranks that wait in the previous group are released, and dead ranks are replaced.

        Args:
            hosts: spare hosts, as for ``ProcMesh.heal``.

        Returns:
            The group; None if the program's own group is used.

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
                    # A rank that began a collective of the old group just after its release may wait there. The next
                    # release frees it, or it is replaced.
                    if not left:
                        raise
            self._formed = True
            self._joined()
            return group

    def _joined(self) -> None:
        for joined in self.after_joining:
            joined()

    def release(self) -> None:
        """Free the ranks from collectives of the group, which becomes unusable."""
        self.broken()
        if self._groups is not None:
            self._groups.release().get()

    def broken(self) -> None:
        """Mark the group as broken. It is formed again on the next use."""
        self._formed = False


def everywhere(
    engine: TensorEngine, function: Callable[..., object], *args: object, timeout: float | None = None
) -> list[Any]:
    """Call a function on all ranks of the engine's world, in order with the main stream.

    Return the answers in rank order.

    Raises:
        TimeoutError: a rank did not answer in time.
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
    """Process groups of a mesh; the base of `RemoteProcessGroup` for programs."""

    @abstractmethod
    def on_ranks(self, mesh: TensorMesh) -> RankGroups:
        """Return the object that ranks receive and turn into their group. The groups are formed if necessary."""


def groups_on_ranks(mesh: TensorMesh, flat: list[Any]) -> bool:
    """Replace process groups among arguments by the objects for the ranks. Return whether there were any."""
    found = [k for k, x in enumerate(flat) if isinstance(x, GroupArgument)]
    for k in found:
        flat[k] = flat[k].on_ranks(mesh)
    return bool(found)
