"""The base of all jobs: a job is applied once, found again through a file, and ended on request."""

from __future__ import annotations

import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from monarch_kernel.actor import HostMesh, ProcId, Uid, this_host
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.services import JobServices, MeshAdminConfig, QueryEngineClient, TelemetryConfig
from monarch_kernel.private_files import read_own_file, write_own_file

if TYPE_CHECKING:
    from monarch_kernel.watch.tracing import profile
    from workspace_sync.mounts import MountHandler


#: The file in which ``Job.state`` looks for a job that was applied earlier.
CACHED_PATH = ".monarch/job_state.json"
#: The format and version in a job's file. A job of another version is applied again.
FORMAT = "monarch_kernel job"
VERSION = 1

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class RemoteMount:
    """A folder of the client that hosts mount.

    Attributes:
        source: the folder.
        mntpoint: the mount point on the hosts; None: the same path as at the client.
        meshes: the names of the meshes; None: all.
        python_exe: a path in the folder: the interpreter of ranks; None: they keep theirs.
    """

    source: str
    mntpoint: str | None
    meshes: tuple[str, ...] | None
    python_exe: str | None

    @property
    def interpreter(self) -> str | None:
        """Return the path of the interpreter on hosts; None: ranks keep theirs."""
        if self.python_exe is None or not os.path.lexists(os.path.join(self.source, self.python_exe)):
            return None
        return os.path.join(self.mntpoint or self.source, self.python_exe)


@dataclass(frozen=True)
class GatheredMount:
    """Folders of hosts that the client mounts.

    Attributes:
        remote: the folder on hosts.
        local: the mount point here.
        meshes: the names of the meshes; None: all.
    """

    remote: str
    local: str
    meshes: tuple[str, ...] | None


@dataclass
class JobMounts:
    """The declared mounts, and the open ones."""

    remote: list[RemoteMount] = field(default_factory=list[RemoteMount])
    gathered: list[GatheredMount] = field(default_factory=list[GatheredMount])
    _open: ExitStack = field(default_factory=ExitStack)
    _handles: dict[tuple[RemoteMount, str], MountHandler] = field(
        default_factory=dict["tuple[RemoteMount, str]", "MountHandler"]
    )
    _shown: set[tuple[GatheredMount, str]] = field(default_factory=set["tuple[GatheredMount, str]"])

    def make(self, hosts: Mapping[str, HostMesh]) -> dict[str, HostMesh]:
        """Create the mounts that do not exist yet, and refresh the others to the current contents of their folders.

        Returns:
            The hosts, with the interpreters of their mounts.

        Raises:
            MountError: a host cannot mount the folder; existing mounts stay.
            ValueError: a mount is for a mesh that the job does not have.
        """
        from workspace_sync.mounts import gather_mount, remotemount

        made = dict(hosts)
        for mount in self.remote:
            for name in _chosen(mount.meshes, hosts):
                handle = self._handles.get((mount, name))
                if handle is not None:
                    handle.refresh()
                else:
                    handle = remotemount(hosts[name], mount.source, mount.mntpoint)
                    self._handles[mount, name] = self._open.enter_context(handle)
                if mount.interpreter is not None:
                    made[name] = made[name].with_python_executable(mount.interpreter)
        for shown in self.gathered:
            names = _chosen(shown.meshes, hosts)
            for name in names:
                if (shown, name) not in self._shown:
                    local = shown.local if len(names) == 1 else os.path.join(shown.local, name)
                    os.makedirs(os.path.dirname(os.path.abspath(local)), exist_ok=True)
                    self._open.enter_context(gather_mount(hosts[name], shown.remote, local))
                    self._shown.add((shown, name))
        return made

    def __reduce__(self) -> tuple[type[JobMounts], tuple[list[RemoteMount], list[GatheredMount]]]:
        return JobMounts, (self.remote, self.gathered)  # open mounts belong to this process

    def close(self) -> None:
        """Unmount everything."""
        self._handles.clear()
        self._shown.clear()
        self._open.close()


def _chosen(names: Sequence[str] | None, hosts: Mapping[str, HostMesh]) -> list[str]:
    unknown = [name for name in names or () if name not in hosts]
    if unknown:
        raise ValueError(f"this job has no mesh {unknown[0]!r} to mount on (its meshes: {', '.join(hosts) or 'none'})")
    return list(hosts) if names is None else list(names)


class JobFile(msgspec.Struct):
    """The contents of a job's file, as JSON.

    Attributes:
        kind: the name of its class.
        fields: the data from which that class creates it again.
    """

    format: str
    version: int
    kind: str
    apply_id: str | None
    fields: dict[str, object]


class _OtherJobError(ValueError):
    """The file belongs to a job, but this program does not know its version or kind."""


class JobState:
    """The hosts of an applied job: each of its meshes is an attribute.

    Attributes:
        query_engine_client: queries its telemetry; None: there is none.
        telemetry_url, admin_url, dashboard_url: the addresses of the requested servers; else None.
    """

    def __init__(self, meshes: dict[str, HostMesh], services: JobServices | None = None) -> None:
        self._hosts = meshes
        services = services or JobServices()
        self.telemetry_url = services.telemetry_url
        self.admin_url = services.admin_url
        self.dashboard_url = services.dashboard_url
        url = self.telemetry_url
        self.query_engine_client = None if url is None else QueryEngineClient(url)

    def __getattr__(self, name: str) -> HostMesh:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._hosts[name]
        except KeyError:
            known = ", ".join(self._hosts) or "none"
            raise AttributeError(f"this job has no mesh {name!r} (its meshes: {known})") from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._hosts]

    def __repr__(self) -> str:
        return f"<JobState {', '.join(f'{name}={len(mesh)}' for name, mesh in self._hosts.items())}>"


class Job(ABC):
    """Hosts that a program requests by name.

    Attributes:
        apply_id: identifies the last ``apply``; None before the first.
    """

    _kinds: ClassVar[dict[str, type[Job]]] = {}
    apply_id: str | None = None

    def __init_subclass__(cls) -> None:
        Job._kinds[cls.__name__] = cls

    def __init__(self) -> None:
        self.apply_id = None
        self._mounts = JobMounts()
        self._services = JobServices()

    # -- the methods that a subclass implements -----------------------------------------------------------------

    @abstractmethod
    def _start(self) -> None:
        """Acquire the hosts. Called by ``apply`` of a job that is not active."""

    @abstractmethod
    def _hosts(self) -> dict[str, HostMesh]:
        """Return the hosts by name, attached. Called by ``state`` of an active job."""

    @abstractmethod
    def _end(self) -> None:
        """Release the hosts. Called by ``kill`` of a job that was applied."""

    @abstractmethod
    def _is_alive(self) -> bool:
        """Return whether all hosts still exist. Called for a job that this program or an earlier one has applied."""

    @abstractmethod
    def _spec(self) -> Any:
        """Return the request of this job. A job that was applied earlier is reused if its request is equal."""

    @abstractmethod
    def _fields(self) -> dict[str, object]:
        """Return the job as plain data that JSON can represent, for its file."""

    def _adopt(self, known: Job) -> None:
        """Take over an equal job that an earlier program has applied."""
        vars(self).update(vars(known), _mounts=self._mounts, _services=self._services)

    @classmethod
    @abstractmethod
    def _of(cls, fields: dict[str, object]) -> Job:
        """Create a job from the result of ``_fields``.

        Raises:
            ValueError: the fields do not describe such a job.
        """

    # -- the methods that programs call --------------------------------------------------------------

    def apply(self, client_script: str | None = None) -> None:
        """Acquire the hosts. Does nothing if the job is active.

        Args:
            client_script: the script for batch mode, which these jobs do not support.

        Raises:
            ValueError: a script was given.
            RuntimeError: a host could not be started.
        """
        if client_script is not None:
            raise ValueError(
                f"{type(self).__name__} has no batch mode: run {client_script} yourself, and call state() in it"
            )
        if self.active:
            return
        self._start()
        self.apply_id = secrets.token_hex(8)

    def state(self, cached_path: Path | None = CACHED_PATH) -> JobState:
        """Return the hosts of an equal job that was applied earlier and is still active, or new hosts.

        Args:
            cached_path: the file through which the next run of a script finds the job; None: no file is used.

        Declared mounts are created now; existing mounts are refreshed to the current contents of their folders.
        Requested telemetry and servers are started.

        Raises:
            OSError: the port of the admin server is taken.
            PermissionError: another user wrote that file, or could have written it.
            ValueError: that file does not belong to a job; it is not changed. Or a mount is for an unknown mesh.
            MountError: a host cannot mount.
        """
        self.find_or_apply(cached_path)
        meshes = self._mounts.make(self._hosts())
        self._services.start(self.apply_id or "", cached_path)
        return JobState(meshes, self._services)

    def find_or_apply(self, cached_path: Path | None = CACHED_PATH) -> bool:
        """Take over an equal job that was applied earlier and is still active, or request new hosts without waiting.

        Args:
            cached_path: as for `state`.

        Returns:
            Whether hosts were requested now.

        Raises:
            PermissionError, ValueError: as `state`, for the file.
        """
        new = False
        if not self.active:
            self._mounts.close()
            self._services.stop()
            known = _load_cached(cached_path)
            if known is not None and type(known) is type(self) and known.can_run(self) and known.active:
                self._adopt(known)
            else:
                self.apply()
                new = True
        if cached_path is not None:
            self.dump(cached_path)
        return new

    def can_run(self, spec: Job) -> bool:
        """Return whether this job, which an earlier program applied, satisfies the given one."""
        return self._spec() == spec._spec()

    def remote_mount(
        self,
        source: Path,
        mntpoint: str | None = None,
        meshes: Sequence[str] | None = None,
        python_exe: str | None = ".venv/bin/python",
    ) -> None:
        """Mount a local folder on hosts of this job, read-only and read on demand, from the next ``state`` on.

        Args:
            source: the folder.
            mntpoint: the mount point on the hosts; by default the path of the folder on this machine.
            meshes: the names of the meshes; by default all.
            python_exe: a path in the folder; if it exists, ranks of these meshes run in that interpreter.

        Source: the names are those of ``monarch.job.JobTrait``; ``workspace_sync.remotemount`` does the work.
        """
        path = os.path.abspath(os.path.expanduser(os.fspath(source)))
        self._mounts.remote.append(RemoteMount(path, mntpoint, None if meshes is None else tuple(meshes), python_exe))

    def gather_mount(
        self, remote_mount_point: str, local_mount_point: str, meshes: Sequence[str] | None = None
    ) -> None:
        """Mount a folder of each host of this job on this machine, read-only, from the next ``state`` on.

        Args:
            remote_mount_point: the folder on every host.
            local_mount_point: the mount point on this machine; with several meshes, it has a folder for each.
            meshes: the names of the meshes; by default all.

        Source: the names are those of ``monarch.job.JobTrait``; ``workspace_sync.gather_mount`` does the work.
        """
        names = None if meshes is None else tuple(meshes)
        self._mounts.gathered.append(GatheredMount(remote_mount_point, local_mount_point, names))

    def kill(self) -> None:
        """Release the hosts, and end all processes on them. This removes the mounts, too."""
        self._mounts.close()
        self._services.stop()
        if self.apply_id is not None:
            self._end()
            self.apply_id = None

    def enable_telemetry(
        self,
        config: TelemetryConfig | None = None,
        *,
        mesh_admin_config: MeshAdminConfig | None = None,
        **kwargs: Any,
    ) -> Self:
        """Record the activity of actors for SQL, and serve the job's state, from the next ``state`` on. Return the job.

        Args:
            config: the data to record; by default created from ``kwargs``.
            mesh_admin_config: as for ``enable_admin``; by default the configuration given there.
        """
        self._services.telemetry = config or TelemetryConfig(**kwargs)
        if mesh_admin_config is not None:
            self._services.admin = mesh_admin_config
        return self

    def enable_admin(self, config: MeshAdminConfig | None = None, **kwargs: Any) -> Self:
        """Serve the state of the job to programs of this user, from the next ``state`` on. Return the job.

        Args:
            config: the address; by default created from ``kwargs``.
        """
        self._services.admin = config or MeshAdminConfig(**kwargs)
        return self

    def telemetry_query_client(self) -> QueryEngineClient:
        """Return a client for the telemetry of this job, in this program or in the program of this folder that has it.

        Raises:
            LaunchError: the job is not active, or its telemetry was not requested.
            PermissionError: another user wrote the file with its address, or could have written it.
        """
        if not self.active:
            raise LaunchError("the job is not active: call state()")
        return self._services.client(self.apply_id, CACHED_PATH)

    def profile(self, *, on_trace_ready: Callable[[profile], object] | None = None) -> profile:
        """Trace all ranks for a block: ``with job.profile() as profiled: ...``.

        Args:
            on_trace_ready: called with the profile at the end of the block.

        Raises:
            RuntimeError: ``enable_telemetry`` was not called before ``state``.
        """
        if self._services.telemetry_url is None:
            raise RuntimeError(
                "job.profile() requires distributed telemetry; call job.enable_telemetry() before job.state()"
            )
        from monarch_kernel.watch.tracing import profile

        return profile(self._services.telemetry_url, on_trace_ready=on_trace_ready)

    @property
    def active(self) -> bool:
        """Whether the job was applied and all its hosts still exist."""
        return self.apply_id is not None and self._is_alive()

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (type(self), self.dumps(), self._mounts, self._services)

    def dumps(self) -> bytes:
        """Return the job as bytes (JSON), for ``job_loads``."""
        found = JobFile(FORMAT, VERSION, type(self).__name__, self.apply_id, self._fields())
        return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"

    def dump(self, filename: Path) -> None:
        """Write the job to a file that only this user can read, for ``job_load``.

        Raises:
            ValueError: a file of that name exists and does not belong to a job; it is not changed.
        """
        path = os.path.abspath(filename)
        if os.path.exists(path):
            _read(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_own_file(path, self.dumps())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'active' if self.active else 'not active'}>"


def job_loads(data: bytes) -> Job:
    """Load a job from the result of ``Job.dumps``.

    Raises:
        ValueError: the data does not describe a job.
    """
    return _job(_decode(data, "this"))


def job_load(filename: Path) -> Job:
    """Load a job from the file that ``Job.dump`` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        PermissionError: another user wrote it, or could have written it.
        ValueError: the file does not belong to a job.
    """
    return _job(_read(os.path.abspath(filename)))


def _unpickled(_cls: type[Job], data: bytes, mounts: JobMounts, services: JobServices) -> Job:
    """Load a job whose class has been imported with the pickle."""
    job = job_loads(data)
    job._mounts, job._services = mounts, services
    return job


def _read(path: str) -> JobFile:
    return _decode(read_own_file(path), path)


def _decode(data: bytes, where: str) -> JobFile:
    try:
        found = msgspec.json.decode(data, type=JobFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        found, why = None, str(e)
    else:
        why = f"its format is {found.format!r}"
    if found is None or found.format != FORMAT:
        raise ValueError(
            f"{where} is not the state of a job ({why}), so it is left as it is: name another file, or move it away"
        )
    return found


def _job(found: JobFile) -> Job:
    kind = Job._kinds.get(found.kind)
    if found.version != VERSION:
        raise _OtherJobError(f"this job has version {found.version} of the format, and this is version {VERSION}")
    if kind is None:
        known = ", ".join(sorted(Job._kinds))
        raise _OtherJobError(f"this job is a {found.kind}, which is not known here (known: {known}): import it first")
    try:
        job = kind._of(found.fields)
    except (msgspec.ValidationError, TypeError, ValueError) as e:
        raise ValueError(f"this {found.kind} cannot be read: {e}") from e
    job.apply_id = found.apply_id
    return job


def _load_cached(path: Path | None) -> Job | None:
    if path is None:
        return None
    try:
        return job_load(path)
    except (FileNotFoundError, _OtherJobError):  # a new job replaces it
        return None


def checked_meshes(kind: str, meshes: Mapping[str, int]) -> dict[str, int]:
    """Check the number of hosts of each mesh, and return them.

    Args:
        kind: the kind of the job, for errors.

    Raises:
        ValueError: there is no mesh, a name is not an identifier, or a number is not positive.
    """
    if not meshes:
        raise ValueError(f"{kind} needs at least one mesh, as in {kind}({{'hosts': 2}})")
    for name, count in meshes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{kind}: {name!r} cannot name a mesh: use an identifier, such as 'hosts'")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{kind}: {name}={count!r} must be a whole number of at least 1")
    return dict(meshes)


# ``JobTrait``: jobs whose hosts a program finds itself, written for Monarch.

#: Attributes that every job has, and that no file of a job needs.
_OF_ALL = ("apply_id", "_mounts", "_services")


class JobTrait(Job):
    """The base class for your own jobs, with the methods that Monarch's jobs implement.

    Every job of this package is an instance, too. The next program finds a job through the file of ``state``, which is
    JSON and not a pickle. The attributes of the job must therefore be plain data, or call ``state(cached_path=None)``.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return Job in other.__mro__ if cls is JobTrait else NotImplemented

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Acquire the hosts, or let a script run there as the client. Called by ``apply`` if the job is not active."""

    @abstractmethod
    def can_run(self, spec: Job) -> bool:
        """Return whether this job, which an earlier program applied, has its hosts and satisfies the given one."""

    @abstractmethod
    def _state(self) -> JobState:
        """Return the hosts, attached. Called by ``state`` of an active job."""

    @abstractmethod
    def _kill(self) -> None:
        """Release the hosts. Called by ``kill`` of a job that was applied."""

    # -- as any job ---------------------------------------------------------------------------------

    def apply(self, client_script: str | None = None) -> None:
        """Acquire the hosts. Does nothing if the job is active. See ``_create`` for the script."""
        if client_script is None:
            super().apply()
        elif not self.active:
            self._create(client_script)
            self.apply_id = secrets.token_hex(8)

    def _start(self) -> None:
        self._create(None)

    def _hosts(self) -> dict[str, HostMesh]:
        return self._state()._hosts

    def _end(self) -> None:
        self._kill()

    def _is_alive(self) -> bool:
        return True  # as far as this program knows; for a job found through its file, can_run decides

    def _spec(self) -> Any:
        return None  # can_run compares arbitrary attributes

    def _fields(self) -> dict[str, object]:
        found = {name: value for name, value in vars(self).items() if name not in _OF_ALL}
        for name, value in found.items():
            try:
                plain = msgspec.json.decode(msgspec.json.encode(value)) == value
            except (TypeError, ValueError):
                plain = False
            if not plain:
                kind = type(self).__name__
                raise ValueError(
                    f"a {kind} cannot be kept in a file of JSON, as its {name} is {value!r}: keep numbers, text, lists "
                    "and dictionaries of text there, or call state(cached_path=None)"
                )
        return found

    @classmethod
    def _of(cls, fields: dict[str, object]) -> Self:
        made = cls.__new__(cls)
        Job.__init__(made)
        vars(made).update(fields)
        return made


# Ids of workers, which a launcher passes to them in the environment. The names are those of ``monarch.job``.

SERVICE_PROC_IDS_ENV = "MONARCH_SERVICE_PROC_IDS"
"""The variable with the ids of a launcher's workers, as ``serialize_service_proc_ids`` writes them."""
SERVICE_PROC_RANK_ENV = "MONARCH_SERVICE_PROC_RANK"
"""The variable with the position of one worker among them."""


def new_service_proc_id() -> ProcId:
    """Create a new id of a worker."""
    return ProcId(Uid.instance("service"))


def serialize_service_proc_ids(proc_ids: Sequence[ProcId]) -> str:
    """Encode ids of workers as JSON, for an environment variable."""
    return json.dumps([str(proc_id) for proc_id in proc_ids])


def deserialize_service_proc_ids(serialized: str) -> list[ProcId]:
    """Decode the ids that ``serialize_service_proc_ids`` wrote.

    Raises:
        ValueError: the text is not such JSON.
    """
    return [ProcId.from_string(text) for text in json.loads(serialized)]


def ranked_service_proc_id_from_env(*, rank_env: str = SERVICE_PROC_RANK_ENV) -> ProcId | None:
    """Return this worker's id among those in the environment; None if there are none.

    Args:
        rank_env: the variable with this worker's position.

    Raises:
        IndexError: there are fewer ids.
        ValueError: a variable is invalid.
    """
    ids, rank = os.environ.get(SERVICE_PROC_IDS_ENV), os.environ.get(rank_env)
    return None if ids is None or rank is None else deserialize_service_proc_ids(ids)[int(rank)]


def service_proc_addr(address: str, proc_id: ProcId | None) -> str:
    """Prefix the address of a worker with its id, as ``attach_to_workers`` accepts it."""
    return address if proc_id is None else f"{proc_id}@{address}"


def service_proc_addrs(addresses: Sequence[str], proc_ids: Sequence[ProcId] | None) -> list[str]:
    """Prefix the addresses of workers with their ids.

    Raises:
        ValueError: the numbers of ids and addresses differ.
    """
    if proc_ids is None:
        return list(addresses)
    if len(addresses) != len(proc_ids):
        raise ValueError(f"got {len(addresses)} worker addresses and {len(proc_ids)} service ProcIds")
    return [service_proc_addr(address, proc_id) for address, proc_id in zip(addresses, proc_ids, strict=True)]


# A job whose hosts are all this machine, to test a program that is written for several hosts.


class LocalJob(Job):
    """A job in which every mesh is ``this_host()``. All processes on it end with this process.

    Args:
        hosts: the names of the meshes.
    """

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        if isinstance(hosts, str) or not hosts or not all(isinstance(name, str) and name for name in hosts):
            raise ValueError(f"LocalJob(hosts={hosts!r}): give a list of names, such as ['trainers', 'generators']")
        self._names = tuple(hosts)

    def _start(self) -> None:
        pass

    def _hosts(self) -> dict[str, HostMesh]:
        return dict.fromkeys(self._names, this_host())

    def _end(self) -> None:
        this_host().stop("the job was killed").get()

    def _is_alive(self) -> bool:
        return True

    def _spec(self) -> Any:
        return self._names

    def _fields(self) -> dict[str, object]:
        return {"hosts": list(self._names)}

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> LocalJob:
        return cls(**fields)
