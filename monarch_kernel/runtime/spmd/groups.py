"""Process groups of torch.distributed over the procs of a mesh, formed anew whenever ranks were lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.runtime.actor.context import current_rank
from monarch_kernel.runtime.actor.definition import Actor, endpoint
from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from monarch_kernel.runtime.actor.healing.healer import TIMEOUT, Healed
from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.actor.names import unique
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.spmd import member
from monarch_kernel.runtime.spmd.member import Meeting

#: How long a rank may take to give up its group, before it is taken for stuck (seconds).
PATIENCE = 10.0
#: How long its answer may take beyond that (seconds).
GRACE = 0.5

# The ranks of this process, by the name of the keepers.
_ranks: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Group:
    """A process group to be: hand it to all ranks, where ``join()`` makes it torch's default group.

    Attributes:
        number: 1 for the first group of a mesh, counted up by each that is formed.
        healed: what had to be healed for it.
        stuck: the ranks that did not give up the last group in time, and were killed and replaced.
        seconds: how long each part of forming it took: "release", "heal", "meet".
    """

    number: int
    backend: str
    meeting: Meeting
    timeout: float | None
    healed: Healed
    stuck: tuple[int, ...]
    seconds: dict[str, float]
    _keepers: str = field(repr=False)

    def join(self, timeout: float = TIMEOUT, **options: Any) -> None:
        """Leave the group that this rank is in, and join this one; done when all ranks have.

        Call it in an endpoint, so that it begins when the step that failed has ended here.

        Args:
            timeout: how long to wait for the other ranks (seconds).
            options: for ``torch.distributed.init_process_group``, such as ``device_id``.
        """
        rank = _ranks.get(self._keepers)
        if rank is None:
            raise RuntimeError(
                "Group.join() is for the ranks: send the group to an endpoint of theirs, and call it there"
            )
        number = (self._keepers, self.number)
        member.join(self.meeting, rank, self.backend, number, timeout, self.timeout, **options)


class Keeper(Actor):
    """Beside the actors that train: it answers while those wait in a collective, and breaks the group's connections."""

    __tool__ = True

    def __init__(self, name: str) -> None:
        self._rank = _ranks[name] = current_rank().rank

    @endpoint
    def reserve(self, world_size: int, local_size: int, local: bool, serve: bool) -> Meeting:
        """On rank 0: choose where the ranks meet."""
        return member.reserve(world_size, local_size, local=local, serve=serve)

    @endpoint
    def set_environment(self, meeting: Meeting) -> None:
        """Set torchrun's variables."""
        member.set_environment(meeting, self._rank)

    @endpoint
    def abandon(self, number: tuple[str, int], patience: float) -> bool:
        """End whatever collectives run here; gives whether they have ended."""
        return member.abandon(number, patience)

    def __cleanup__(self, error: BaseException | None) -> None:
        """So that a mesh that is stopped need not wait for those."""
        member.abandon()


class ProcessGroups:
    """The process groups of a mesh, one after the other.

    Form one, have every rank ``join()`` it, and train. When a step fails because ranks died, form the next: survivors
    are freed from the collectives they wait in, dead ranks are healed, and all meet anew.

    ```python
    groups = ProcessGroups(procs)
    await trainers.join.call(await groups.form())  # def join(self, group): group.join(); ...
    ```

    Args:
        procs: the ranks of the process groups are those of this mesh.
        backend: of torch.distributed.
        timeout: of collectives (seconds); None leaves torch's.
    """

    def __init__(self, procs: ProcMesh, backend: str = "gloo", timeout: float | None = None) -> None:
        self._procs = procs
        self._backend = backend
        self._timeout = timeout
        self._name = unique("groups")
        self._keepers = _spawn_keepers(procs, self._name)
        self._number = 0
        self._lock = threading.Lock()

    def form(self, hosts: HostMesh | None = None, patience: float = PATIENCE) -> Future[Group]:
        """Free the ranks from the last group, heal the mesh, and agree on where the next group meets.

        Args:
            hosts: spare hosts for those that are gone, as for ``ProcMesh.heal``.
            patience: ranks that have not given up the last group within so many seconds (they stand still, or hang in
                it) are killed, and replaced like dead ones.

        Raises:
            HealError: the mesh cannot be healed.
        """
        return _in_thread(self._procs, f"{self._procs.name}.form", lambda: self._form(hosts, patience))

    def release(self, patience: float = PATIENCE) -> Future[list[int]]:
        """Free the living ranks from the collectives they wait in; gives those that did not come free in time."""
        return _in_thread(self._procs, f"{self._procs.name}.release", lambda: self._release(patience))

    def _form(self, hosts: HostMesh | None, patience: float) -> Group:
        with self._lock:
            ranks = self._procs.flatten("ranks")
            stuck: set[int] = set()
            healed = Healed(self._procs.name)
            seconds = {"release": 0.0, "heal": 0.0, "meet": 0.0}
            while True:
                began = time.monotonic()
                for rank in self._release(patience):
                    stuck.add(rank)
                    ranks.slice(ranks=rank).kill("it did not give up its process group").get(TIMEOUT)
                released = time.monotonic()
                done = self._procs.heal(hosts).get()
                healed.replaced += done.replaced
                healed.respawned = [*dict.fromkeys([*healed.respawned, *done.respawned])]
                healed.restored = [*dict.fromkeys([*healed.restored, *done.restored])]
                healed.seconds += done.seconds
                after = time.monotonic()
                seconds["release"] += released - began
                seconds["heal"] += after - released
                try:
                    meeting = _meet(self._procs, self._keepers, serve=True)
                except SupervisionError:  # another one died meanwhile
                    continue
                seconds["meet"] += time.monotonic() - after
                self._number += 1
                return Group(
                    self._number,
                    self._backend,
                    meeting,
                    self._timeout,
                    healed,
                    tuple(sorted(stuck)),
                    seconds,
                    self._name,
                )

    def _release(self, patience: float) -> list[int]:
        if self._number == 0:
            return []
        keepers = self._keepers.flatten("ranks")
        deadline = time.monotonic() + patience + GRACE
        number = (self._name, self._number)
        calls = [keepers.slice(ranks=rank).abandon.call_one(number, patience) for rank in range(len(keepers))]
        stuck: list[int] = []
        for rank, call in enumerate(calls):
            try:
                if not call.get(max(0.0, deadline - time.monotonic())):
                    stuck.append(rank)
            except TimeoutError:
                stuck.append(rank)
            except (SupervisionError, ActorError):  # it is dead
                continue
        return stuck


def setup_torch_elastic_env(
    proc_mesh: ProcMesh, master_addr: str | None = None, master_port: int | None = None, use_ipaddr: Any = None
) -> None:
    """Set the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, ...) in every proc of a mesh.

    The last dimension counts the ranks of a host (LOCAL_RANK).

    Args:
        master_addr: where rank 0 is reached; by default its host's address.
        master_port: by default one that is free there.
        use_ipaddr: accepted as Monarch does; what is found by default is an IP address anyway.
    """
    _setup(proc_mesh, master_addr, master_port).get()


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh, master_addr: str | None = None, master_port: int | None = None, use_ipaddr: Any = None
) -> None:
    """``setup_torch_elastic_env``, to be awaited."""
    await _setup(proc_mesh, master_addr, master_port)


def _setup(procs: ProcMesh, address: str | None, port: int | None) -> Future[None]:
    def work() -> None:
        keepers = _spawn_keepers(procs, unique("torch-env"))
        found = _meet(procs, keepers, serve=False)
        meeting = Meeting(address or found.address, port or found.port, found.world_size, found.local_size)
        keepers.set_environment.call(meeting).get()
        keepers.stop().get()

    return _in_thread(procs, f"{procs.name}.setup_torch_elastic_env", work)


def _spawn_keepers(procs: ProcMesh, name: str) -> ActorMesh[Keeper]:
    return procs.spawn(name, Keeper, name)


def _meet(procs: ProcMesh, keepers: ActorMesh[Keeper], *, serve: bool) -> Meeting:
    local = len({ref.site for ref in procs._target().procs}) == 1
    local_size = procs.extent.shape[-1] if procs.extent.names else 1
    first = keepers.flatten("ranks").slice(ranks=0)
    return first.reserve.call_one(len(procs), local_size, local, serve).get()


def _in_thread(procs: ProcMesh, what: str, work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future(procs._system.node.poller, what)

    def run() -> None:
        try:
            future._resolve(work())
        except BaseException as e:
            future._reject(e)

    threading.Thread(target=run, name="monarch-spmd", daemon=True).start()
    return future
