"""Process groups of torch.distributed over the procs of a mesh, formed again after the loss of ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.runtime.actor.context import current_rank
from monarch_kernel.runtime.actor.definition import Actor, endpoint
from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from monarch_kernel.runtime.actor.execution.collectives import SETTLING, settle
from monarch_kernel.runtime.actor.healing.healed import HostSource
from monarch_kernel.runtime.actor.healing.healer import TIMEOUT, Healed
from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
from monarch_kernel.runtime.actor.ids import unique
from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.spmd import member
from monarch_kernel.runtime.spmd.member import Meeting

#: The time for a rank to release its group before it counts as stuck (seconds).
PATIENCE = 10.0
#: Extra time for its answer (seconds).
GRACE = 0.5

# The ranks of this process, by the name of the group agents.
_ranks: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Group:
    """A process group to join. Send it to all ranks; its ``join()`` makes it torch's default group.

    Attributes:
        number: 1 for the first group of a mesh; later groups are numbered consecutively.
        healed: the report of the heal that preceded it.
        stuck: the ranks that did not release the last group in time, and were killed and replaced.
        seconds: the duration of each step: "release", "heal", "meet".
    """

    number: int
    backend: str
    meeting: Meeting
    timeout: float | None
    healed: Healed
    stuck: tuple[int, ...]
    seconds: dict[str, float]
    _agents: str = field(repr=False)

    def join(self, timeout: float = TIMEOUT, **options: object) -> None:
        """Leave this rank's current group and join this one. Returns when all ranks have joined.

        Call it in an endpoint, so that it begins after the failed step has ended on this rank.

        Args:
            timeout: limit for the wait for the other ranks (seconds).
            options: passed to ``torch.distributed.init_process_group``, such as ``device_id``.
        """
        rank = _ranks.get(self._agents)
        if rank is None:
            raise RuntimeError(
                "Group.join() is for the ranks: send the group to an endpoint of the ranks, and call it there"
            )
        number = (self._agents, self.number)
        member.join(self.meeting, rank, self.backend, number, timeout, self.timeout, **options)


class GroupAgent(Actor):
    """Runs in each rank beside the training actors.

    It responds while they wait in a collective, and can abort the collective.
    """

    __tool__ = True

    def __init__(self, name: str) -> None:
        self._rank = _ranks[name] = current_rank().rank

    @endpoint
    def reserve(self, world_size: int, local_size: int, local: bool, serve: bool) -> Meeting:
        """Reserve the address at which the ranks meet, on rank 0."""
        return member.reserve(world_size, local_size, local=local, serve=serve)

    @endpoint
    def set_environment(self, meeting: Meeting) -> None:
        """Set torchrun's environment variables."""
        member.set_environment(meeting, self._rank)

    @endpoint
    def settle(self) -> None:
        """Wait until no message of the group is in transit here."""
        settle()

    @endpoint
    def abandon(self, number: tuple[str, int], patience: float) -> bool:
        """Abort the collectives that run here. Return whether they have ended."""
        return member.abandon(number, patience)

    def __cleanup__(self, error: BaseException | None) -> None:
        """Abort the running collectives, so that the stop of the mesh does not wait for them."""
        member.abandon()


class ProcessGroups:
    """The successive process groups of a mesh.

    Form a group, make every rank ``join()`` it, and train. When a step fails because ranks died, form the next group:
    this releases survivors from the collectives in which they wait, heals dead ranks, and lets all ranks meet again.

    ```python
    groups = ProcessGroups(procs)
    await trainers.join.call(await groups.form())  # def join(self, group): group.join(); ...
    ```

    Args:
        procs: the mesh whose ranks are the ranks of the process groups.
        backend: the backend of torch.distributed.
        timeout: limit for each collective (seconds); None keeps torch's default.
    """

    def __init__(self, procs: ProcMesh, backend: str = "gloo", timeout: float | None = None) -> None:
        self._procs = procs
        self._backend = backend
        self._timeout = timeout
        self._name = unique("groups")
        self._agents = _spawn_agents(procs, self._name)
        self._number = 0
        self._lock = threading.Lock()

    def form(self, hosts: HostMesh | HostSource | None = None, patience: float = PATIENCE) -> Future[Group]:
        """Release the ranks from the last group, heal the mesh, and reserve an address for the next group.

        Args:
            hosts: spare hosts for lost hosts, as for ``ProcMesh.heal``.
            patience: ranks that do not release the last group within this time (they are stopped, or hang in it) are
                killed, and replaced like dead ranks (seconds).

        Raises:
            HealError: the mesh cannot be healed.
        """
        return _in_thread(self._procs, f"{self._procs.name}.form", lambda: self._form(hosts, patience))

    def release(self, patience: float = PATIENCE) -> Future[list[int]]:
        """Release the living ranks from the collectives in which they wait. Return the ranks that exceed the limit."""
        return _in_thread(self._procs, f"{self._procs.name}.release", lambda: self._release(patience))

    def _form(self, hosts: HostMesh | HostSource | None, patience: float) -> Group:
        with self._lock:
            ranks = self._procs.flatten("ranks")
            stuck: set[int] = set()
            healed = Healed(self._procs.name)
            seconds = {"release": 0.0, "heal": 0.0, "meet": 0.0}
            while True:
                began = time.monotonic()
                for rank in self._release(patience):
                    stuck.add(rank)
                    ranks.slice(ranks=rank).kill("it did not give up its process group in time").get(TIMEOUT)
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
                    meeting = _meet(self._procs, self._agents, serve=True)
                except SupervisionError:  # another rank died meanwhile
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
        agents = [self._agents.flatten("ranks").slice(ranks=rank) for rank in range(len(self._agents))]
        _answers([agent.settle.call_one() for agent in agents], SETTLING + GRACE)
        number = (self._name, self._number)
        answers = _answers([agent.abandon.call_one(number, patience) for agent in agents], patience + GRACE)
        return [rank for rank, answer in enumerate(answers) if answer is False]


def _answers(calls: list[Future[object]], limit: float) -> list[object]:
    """Return the answer of each rank: False if it does not arrive in time (seconds), None if the rank is dead."""
    deadline = time.monotonic() + limit
    answers: list[object] = []
    for call in calls:
        try:
            answers.append(call.get(max(0.0, deadline - time.monotonic())))
        except TimeoutError:
            answers.append(False)
        except (SupervisionError, ActorError):
            answers.append(None)
    return answers


def setup_torch_elastic_env(
    proc_mesh: ProcMesh, master_addr: str | None = None, master_port: int | None = None, use_ipaddr: object = None
) -> None:
    """Set torchrun's environment variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) in every proc of a mesh.

    The last dimension counts the ranks of a host (LOCAL_RANK).

    Args:
        master_addr: the address of rank 0; by default the address of its host.
        master_port: by default a free port on that host.
        use_ipaddr: accepted for compatibility with Monarch; the default address is an IP address anyway.
    """
    _setup(proc_mesh, master_addr, master_port).get()


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh, master_addr: str | None = None, master_port: int | None = None, use_ipaddr: object = None
) -> None:
    """Do the same as ``setup_torch_elastic_env``, as a coroutine."""
    await _setup(proc_mesh, master_addr, master_port)


def _setup(procs: ProcMesh, address: str | None, port: int | None) -> Future[None]:
    def work() -> None:
        agents = _spawn_agents(procs, unique("torch-env"))
        found = _meet(procs, agents, serve=False)
        meeting = Meeting(address or found.address, port or found.port, found.world_size, found.local_size)
        agents.set_environment.call(meeting).get()
        agents.stop().get()

    return _in_thread(procs, f"{procs.name}.setup_torch_elastic_env", work)


def _spawn_agents(procs: ProcMesh, name: str) -> ActorMesh[GroupAgent]:
    return procs.spawn(name, GroupAgent, name)


def _meet(procs: ProcMesh, agents: ActorMesh[GroupAgent], *, serve: bool) -> Meeting:
    local = len({ref.site for ref in procs._target().procs}) == 1
    local_size = procs.extent.shape[-1] if procs.extent.names else 1
    first = agents.flatten("ranks").slice(ranks=0)
    return first.reserve.call_one(len(procs), local_size, local, serve).get()


def _in_thread(procs: ProcMesh, what: str, work: Callable[[], object]) -> Future[Any]:
    future: Future[object] = Future(procs._system.node.poller, what)

    def run() -> None:
        try:
            future._resolve(work())
        except BaseException as e:
            future._reject(e)

    threading.Thread(target=run, name="monarch-spmd", daemon=True).start()
    return future
