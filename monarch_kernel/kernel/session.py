"""The meshes of a notebook: those that `%mesh up` started, and those that user code spawned."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

from IPython.core.error import UsageError

from monarch_kernel.actor import HostMesh, ProcMesh
from monarch_kernel.engines import tool_runtime
from monarch_kernel.job import EngineJob
from monarch_kernel.kernel.interrupts.interrupt_relay import Interruption
from monarch_kernel.kernel.managed_mesh import ManagedMesh, recall, remember
from monarch_kernel.launchers.base import HostPhase, JobStatus, LaunchError
from monarch_kernel.launchers.host_request import nearest
from monarch_kernel.meshes import taken_over
from monarch_kernel.runtime.host.devices import DeviceError
from monarch_kernel.subscriptions import Subscribers

# The hosts of a provider for a mesh of the notebook: request them, wait for them, and divide their devices.


def devices_each(hosts: Sequence[tuple[str, Sequence[str] | None]], ranks: int) -> int:
    """Return how many devices each rank gets: the same number for all, using all devices where possible.

    A process can use only one MIG slice.

    Args:
        hosts: the name of each host, and the devices that the provider assigned there; None: it named none.
        ranks: the number of ranks on each host.

    Raises:
        DeviceError: a host has fewer devices than ranks; the message has the host and both numbers.
    """
    each: list[int] = []
    for host, given in hosts:
        names = given or ()
        if len(names) < ranks:
            has = f"{len(names)} ({', '.join(names)})" if names else "none"
            raise DeviceError(
                f"{ranks} rank{'s' * (ranks != 1)} on each host need a device each, and the engine gave {host} {has}: "
                "start fewer ranks on each host, or ask the engine for more GPUs"
            )
        even = len(names) % ranks == 0 and not any(name.startswith("MIG-") for name in names)
        each.append(len(names) // ranks if even else 1)
    return min(each, default=0)


class ProviderHosts:
    """The hosts of a job, used by one mesh.

    Args:
        job: the job; it may be applied already.
        engine: the name of its launcher.
        gpus: whether devices were requested, so that each rank gets its own.
        shared: whether the ranks of a host see all its devices anyway.
        has_variables: whether its workers already have the environment variables of the mesh.
    """

    def __init__(self, job: EngineJob, engine: str, *, gpus: bool, shared: bool, has_variables: bool = False) -> None:
        self.job = job
        self.engine = engine
        self.has_variables = has_variables
        self._own = gpus and not shared
        self._hosts: HostMesh | None = None
        self._status: JobStatus | None = None
        #: Called when the provider reports a new status.
        self.on_status: Callable[[], None] = lambda: None
        self._ended = threading.Event()

    @property
    def waiting(self) -> bool:
        """Whether its hosts are not available yet."""
        return self._hosts is None

    @property
    def status(self) -> JobStatus | None:
        """The last status from the provider; None if there is none yet."""
        return self._status

    @property
    def ended(self) -> bool:
        """Whether the notebook has ended the job."""
        return self._ended.is_set()

    def ask(self) -> None:
        """Request the hosts, unless the job is already applied.

        Raises:
            LaunchError: the provider rejects the request.
        """
        self.job.apply()

    def wait(self, tell: Callable[[str], None]) -> None:
        """Wait for the hosts, and attach to them. If that fails, or is interrupted, the job is ended.

        Args:
            tell: called with a line for each new status from the provider.

        Raises:
            LaunchError: a host could not start, not all were up in time, or the job was ended meanwhile.
        """

        def progress(status: JobStatus) -> None:
            self._status = status
            self.on_status()
            tell(f"{self.engine}: {status}")

        self.job.on_progress = progress
        try:
            meshes = self.job.attached()
            self._hosts = getattr(meshes, next(iter(self.job.meshes)))
            self._status = self.job.status()
            self.on_status()
        except BaseException:
            self.end()
            raise

    def hosts(self) -> HostMesh:
        """The hosts, which must be available."""
        assert self._hosts is not None
        return self._hosts

    def devices_each(self, dims: Mapping[str, int]) -> int:
        """Return how many devices each rank gets exclusively; 0: it sees all devices of its host.

        Raises:
            DeviceError: there are more ranks on a host than devices.
        """
        if not self._own or self._status is None:
            return 0
        up = self._status.of(HostPhase.UP)
        named = [(host.name or f"host {host.host}", host.devices) for host in up]
        return devices_each(named, math.prod(dims.values()))

    def describe(self) -> str:
        """Return where the mesh is, or what it waits for, as part of a line."""
        if self.waiting:
            return f"{self.engine}: {self._status}" if self._status is not None else f"{self.engine} was asked"
        count = len(self.hosts())
        return f"on {count} host{'s' * (count != 1)} of {self.engine} (job {self.job.job_id})"

    def end(self) -> str:
        """End the job, even if it is in use.

        Returns:
            A clause for the user.
        """
        self._ended.set()
        job = self.job.job_id
        try:
            self.job.kill()
        except (LaunchError, OSError) as error:
            return f"job {job} of {self.engine} could not be ended: {error}; %mesh jobs kill {job} tries it again"
        return f"job {job} of {self.engine} ended" if job else f"there is no job of {self.engine} left"


class ProviderPlacements(MutableMapping[str, ProviderHosts]):
    """The hosts of providers for meshes of the notebook, by the names of the meshes. It is thread-safe."""

    def __init__(self) -> None:
        self._places: dict[str, ProviderHosts] = {}
        #: Notified when hosts are added or removed, and of each new status of awaited hosts.
        self.changed: Subscribers[[]] = Subscribers("a callback on the hosts of engines")

    def awaited(self) -> dict[str, JobStatus]:
        """Return the last status of awaited hosts, by the ids of their jobs."""
        waiting = [place for place in self.values() if place.waiting]
        return {place.job.job_id: place.status for place in waiting if place.status is not None}

    def __getitem__(self, name: str) -> ProviderHosts:
        return self._places[name]

    def __setitem__(self, name: str, place: ProviderHosts) -> None:
        self._places[name] = place
        place.on_status = self.changed.notify
        self.changed.notify()

    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self.changed.notify()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._places))

    def __len__(self) -> int:
        return len(self._places)


class MeshSession:
    """The named meshes of one notebook, and which of them is in use."""

    def __init__(self) -> None:
        self._managed: dict[str, ManagedMesh] = {}
        self._current: str | None = None
        #: The provider hosts of meshes, by the names of the meshes, including hosts that are awaited.
        self.provider_hosts = ProviderPlacements()
        #: The last interruption of each mesh by `%mesh interrupt`.
        self.interrupted: weakref.WeakKeyDictionary[ProcMesh, Interruption] = weakref.WeakKeyDictionary()
        #: Notified when another mesh is chosen.
        self.changed: Subscribers[[]] = Subscribers("a callback on the mesh in use")

    # -- lookup --------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all meshes of this process, oldest first."""
        return list(self.proc_meshes())

    def proc_meshes(self) -> dict[str, ProcMesh]:
        """Return all meshes of this process by name; of two with the same name, the newer one."""
        self._forget_stopped()
        return {mesh.name: mesh for mesh in tool_runtime().list_proc_meshes()}

    def managed(self, name: str) -> ManagedMesh | None:
        """Return the mesh of that name if it runs cells: `%mesh up` started it, or a cell has run on it."""
        self._forget_stopped()
        return self._managed.get(name)

    @property
    def current(self) -> str | None:
        """Return the name of the mesh in use: the chosen one, or the only one."""
        names = self.names()
        if self._current not in names:
            self._current = None
        return self._current or (names[0] if len(names) == 1 else None)

    def current_mesh(self) -> ProcMesh:
        """Return the mesh in use; raise LookupError if there is none."""
        name = self.current
        if name is None:
            known = ", ".join(self.names()) or "none"
            raise LookupError(f"no mesh is in use; choose one with %mesh use NAME (there are: {known})")
        return self.proc_meshes()[name]

    def get(self, name: str | None, command: str) -> ManagedMesh:
        """Return the mesh of that name, or the one in use; it is prepared for cells if necessary.

        Raises:
            UsageError: there is no such mesh; the message lists those that exist.
        """
        wanted = name or self.current
        found = self.find(wanted, command)
        managed = self._managed.get(found.name)
        if managed is None or managed.procs is not found:
            managed = recall(found)
            if managed is None:
                managed = ManagedMesh(found)
                managed.get_ready()
                remember(managed)
            self.adopt(managed)
        return managed

    def find(self, name: str | None, command: str) -> ProcMesh:
        """Return the proc mesh of that name, or the one in use; see `get`."""
        meshes = self.proc_meshes()
        wanted = name or self.current
        if wanted is not None and wanted in meshes:
            return meshes[wanted]
        self._check_not_lost(wanted, command)
        if not meshes:
            which = f"no mesh {name!r}" if name else "no mesh"
            raise UsageError(f"{command}: there is {which}; start one with %mesh up --procs 4")
        known = ", ".join(meshes)
        if wanted is None:
            raise UsageError(f"{command}: no mesh is in use; choose one of {known} with %mesh use NAME")
        raise UsageError(f"{command}: there is no mesh {wanted!r}{nearest(wanted, meshes)}; there are {known}")

    def _check_not_lost(self, name: str | None, command: str) -> None:
        """Raise UsageError if this was a kept mesh that another process has taken over."""
        for lost, why in taken_over().items():
            if name in (None, lost):
                raise UsageError(f"{command}: {why}; %mesh attach {lost} --force takes it back")

    def use(self, name: str, command: str = "%mesh use") -> ManagedMesh:
        """Run the following cells on that mesh."""
        managed = self.get(name, command)
        self.choose(managed.name)
        return managed

    # -- changes -----------------------------------------------------------------

    def adopt(self, managed: ManagedMesh) -> None:
        """Add a mesh that runs cells."""
        self._managed[managed.name] = managed

    def choose(self, name: str) -> None:
        """Use the mesh of that name from now on."""
        self._current = name
        self.changed.notify()

    @property
    def chosen(self) -> str | None:
        """Return the mesh that was chosen last, if any."""
        return self._current

    def let_go(self, name: str) -> None:
        """Forget a mesh. If it was in use, the newest remaining mesh is used next."""
        self._managed.pop(name, None)
        if self._current == name:
            names = self.names()
            self._current = names[-1] if names else None
            self.changed.notify()

    def _forget_stopped(self) -> None:
        for name, managed in list(self._managed.items()):
            if not managed.is_alive:
                self._managed.pop(name, None)  # other threads may do this too


_session: MeshSession | None = None


def session() -> MeshSession:
    """Return the session of this process."""
    global _session
    if _session is None:
        _session = MeshSession()
    return _session
