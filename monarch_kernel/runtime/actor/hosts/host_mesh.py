"""`HostMesh`: an array of hosts, on which processes are started."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel import aliases, environment
from monarch_kernel.protocol.messages import Bootstrap, Launch, ProcRef, ProcSpec, Shutdown, SpawnProcs, StopProcs
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import dumps, explain
from monarch_kernel.runtime.actor import extensions
from monarch_kernel.runtime.actor.calls.pending import ManyCall, ask_agent
from monarch_kernel.runtime.actor.calls.target import Target
from monarch_kernel.runtime.actor.context import current
from monarch_kernel.runtime.actor.healing.healed import HostSource
from monarch_kernel.runtime.actor.hosts.bootstrap_command import BootstrapCommand, checked_env, command_of, launch_of
from monarch_kernel.runtime.actor.ids import unique
from monarch_kernel.runtime.actor.meshes.actor_mesh import settled
from monarch_kernel.runtime.actor.meshes.proc_mesh import STOP_GRACE, ProcMesh
from monarch_kernel.runtime.actor.meshes.tool_methods import ViewMethods, WorkspaceMethods
from monarch_kernel.runtime.actor.mocks import bootstrap_with_stand_ins
from monarch_kernel.runtime.actor.process import System, get_system
from monarch_kernel.runtime.mesh.shape import SINGLE, Extent, MeshTrait, Point, Region
from monarch_kernel.runtime.node.future import Future, gathered, nothing, resolved, true
from monarch_kernel.runtime.supervision import OwnedMesh, RestartPolicy

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.wire_types import Body, Buffers


_BINDS = ("cpunodebind", "membind", "physcpubind", "cpus")
#: More procs than this on one host are treated as a mistake.
MAX_PROCS_PER_HOST = 4096
#: How long a host agent may take to start (seconds).
START_TIMEOUT = 30.0
#: How long a proc may take to start (seconds); 0: the limit in its host agent's environment.
START_LIMIT = 0.0
#: Loaded once before ranks are forked, if the process that spawns them has loaded it: they will probably use it too.
SHARED = ("torch", "numpy")


class HostRef(msgspec.Struct, frozen=True):
    """One host: its agent."""

    agent: ProcRef
    name: str


class HostUse:
    """The state that a host mesh shares with its slices and other views.

    Attributes:
        down: whether it was shut down.
        spawned: the ids of running proc meshes that were spawned through any of these views.
        unreached: why no use of it is possible, if its workers have not answered.
    """

    def __init__(self, unreached: Exception | None = None) -> None:
        self.down = False
        self.unreached = unreached
        self.spawned: set[str] = set()


class HostMesh(ViewMethods, WorkspaceMethods, MeshTrait):
    """A mesh of hosts. ``this_host()`` returns the mesh of this machine, ``attach_to_workers`` one of several hosts."""

    def __init__(
        self,
        system: System,
        hosts: tuple[HostRef, ...],
        region: Region,
        command: BootstrapCommand | None = None,
        use: HostUse | None = None,
        name: str = "",
        part: bool = False,
    ) -> None:
        self._system = system
        self._hosts = hosts
        self._shape = region
        self._command = command  # starts procs, unless ``spawn_procs`` gets another command
        self._use = use  # None for a reference from another process
        self._name = name
        self._part = part  # a slice, or derived from some procs: this handle may not stop the hosts

    @property
    def _region(self) -> Region:
        return self._shape

    def _new_with_region(self, region: Region) -> HostMesh:
        return HostMesh(self._system, self._hosts, region, self._command, self._use, self._name, True)

    @property
    def region(self) -> Region:
        """The selected hosts of the mesh that this is a part of."""
        return self._shape

    @property
    def stream_logs(self) -> bool:
        """Whether hosts stream the output of ranks on their own, as in Monarch. Here the controller requests it."""
        return False

    @property
    def is_fake_in_process(self) -> bool:
        """Whether the hosts are parts of this process, as in tests of Monarch. Always false."""
        return False

    @property
    def _is_local(self) -> bool:
        """Whether this is the host of this process's own agent."""
        own = self._system.agent
        return own is not None and any(host.agent.id == own.id for host in self._hosts)

    @property
    def _down(self) -> bool:
        return self._use is not None and self._use.down

    # -- procs ----------------------------------------------------------------------------------

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        proc_bind: Sequence[Mapping[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
        *,
        env: Mapping[str, str | None] | None = None,
        preload: Sequence[str] = (),
        restart: RestartPolicy | str = "never",
        spares: HostMesh | HostSource | None = None,
        devices: int = 0,
    ) -> ProcMesh:
        """Start processes on every host.

        Returns immediately. Await the result (or its ``initialized``) to wait until they run.

        Args:
            per_host: dimensions and sizes of the processes on each host, as in ``{"gpus": 4}``; None starts one.
            bootstrap: a callable (sync or async) that every process runs before anything else.
            name: a label, any string.
            proc_bind: for each process of a host, the resources that it may use, as lists such as "0-3,8": the NUMA
                nodes of its CPUs (``cpunodebind``) and of its memory (``membind``), and the CPUs (``physcpubind`` or
                ``cpus``).
            bootstrap_command: start an interpreter with this command instead of forking; a function returns a command
                for each point. Processes that these start with ``this_host()`` start in the same way.
            env: environment variables to set in the processes; None removes one.
            preload: modules to import before forking, once for all ranks (torch and numpy are always preloaded if this
                process has imported them).
            restart: "on_failure" replaces dead procs, like ``heal``; a ``RestartPolicy`` sets how often, after which
                delay, and whether one rank or all together are replaced. "never": the owner is notified.
            spares: hosts that stay empty until one of the other hosts is gone, or a job, which then requests a
                replacement from its provider.
            devices: how many GPUs each process sees, of those that the provider assigned to its host
                (``CUDA_VISIBLE_DEVICES`` and similar variables in the environment of the worker, or all of the host);
                0: all of them. If there are fewer GPUs than the processes need, the mesh fails with an error.

        Raises:
            ValueError: a dimension of the hosts is repeated, or a size is not a positive integer.
            RuntimeError: a host is gone, or the host mesh was shut down.
        """
        self._check_usable()
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name={name!r} must be a string")
        if isinstance(preload, str) or not all(isinstance(module, str) for module in preload):
            raise TypeError(f"preload={preload!r} must be a sequence of names of modules")
        per_host = {} if per_host is None else per_host
        labels, sizes = _checked(per_host, self._shape.labels)
        count = 1
        for size in sizes:
            count *= size
        if count > MAX_PROCS_PER_HOST:
            raise ValueError(
                f"per_host={per_host} asks for {count} processes on one host; at most {MAX_PROCS_PER_HOST} are allowed"
            )
        if proc_bind is not None and len(proc_bind) != count:
            raise ValueError(
                f"proc_bind has {len(proc_bind)} entries, but per_host={per_host} makes {count} processes on each host"
            )
        extra = checked_env(env)
        if aliases.enabled():
            extra.setdefault(aliases.VARIABLE, "1")
        if extensions.display_module:
            extra.setdefault(environment.DISPLAY, extensions.display_module)
        body: Any = b""
        buffers: tuple[int, ...] = ()
        if bootstrap is not None and not callable(bootstrap):
            raise TypeError(f"bootstrap must be callable, not {type(bootstrap).__name__}")
        bootstrap = bootstrap_with_stand_ins(bootstrap)
        if bootstrap is not None:
            try:
                body, buffers = dumps(bootstrap)
            except Exception as e:
                explain(e, f"bootstrap {bootstrap!r}")
                raise
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 0:
            raise ValueError(f"devices={devices!r} must be a whole number: the GPUs that each process sees, 0 for all")
        hosts = self._selected()
        for host in hosts:
            death = self._system.node.deaths.get(host.agent.id)
            if death is not None:
                raise RuntimeError(
                    f"host {host.name} is gone ({death.cause}): slice the host mesh without it, or attach to it again"
                )
        extent = Extent(self._shape.labels + labels, self._shape.sizes + sizes)
        per_proc = self._per_proc(bootstrap_command, extent)
        binds = [_checked_bind(index, bind) for index, bind in enumerate(proc_bind or ())]
        policy = RestartPolicy(restart) if isinstance(restart, str) else restart
        hosts_env = bootstrap_command is not None
        mesh = self._spawn(
            name, hosts, count, extent, extra, (body, buffers), per_proc, binds, preload, policy, devices, hosts_env
        )
        if spares is not None:
            self._system.healer.add_spares(mesh, spares)
        return mesh

    def _spawn(
        self,
        name: str | None,
        hosts: list[HostRef],
        count: int,
        extent: Extent,
        env: dict[str, str | None],
        bootstrap: tuple[Body, Buffers],
        per_proc: list[Launch],
        binds: list[dict[str, str]],
        preload: Sequence[str],
        policy: RestartPolicy | None,
        devices: int = 0,
        hosts_env: bool = False,
    ) -> ProcMesh:
        """Start procs; without a policy they are a tool's. ``hosts_env``: in the environment of other hosts."""
        system = self._system
        node = system.node
        uid = unique(name or "procs")
        name = name or uid
        refs: list[ProcRef] = []
        for at, host in enumerate(hosts):
            folder = os.path.dirname(host.agent.address)
            for rank in range(at * count, (at + 1) * count):
                proc = f"{uid}.{rank}"
                refs.append(host.agent.beside(proc, os.path.join(folder, proc + ".sock")))
                if host.agent.site == node.ref.site:
                    node.expect(refs[-1])
        tool = policy is None
        here = current.get()
        owner = here.actor_instance if here is not None and not tool else system.client
        modules = list(preload)
        if not tool:
            modules += (m for m in SHARED if m in sys.modules and m not in preload)
        call = ManyCall(node, f"{name}.setup", Target(name, uid, extent, tuple(refs), system.reported), True)
        mesh = ProcMesh(
            system,
            uid,
            name,
            tuple(refs),
            Region.from_extent(extent),
            Region.from_extent(self._shape.extent),
            owner.mesh_id,
            call.then(true),
        )
        mesh._shared["hosts"] = self._use
        mesh._shared["tool"] = tool
        system.proc_meshes[uid] = mesh
        if self._use is not None:
            self._use.spawned &= system.proc_meshes.keys()
            self._use.spawned.add(uid)
        system.tree.spawned_procs(OwnedMesh(uid, name, owner.mesh_id, extent, tuple(refs), tool))
        owner.owned.append(mesh)
        # In a rank, these are folders of its host; and the import system ignores entries that are no strings.
        cwd = system.placements.at_controller(os.getcwd())
        sys_path = [system.placements.at_controller(entry) for entry in sys.path if isinstance(entry, str)]
        messages: list[SpawnProcs] = []
        for at, host in enumerate(hosts):
            node.learn(host.agent)
            chosen = refs[at * count : (at + 1) * count]
            message = SpawnProcs(
                mesh=name,
                procs=[ProcSpec(ref.id, ref.address, at * count + k) for k, ref in enumerate(chosen)],
                owner=node.ref,
                root=system.root,
                env=env if tool and host.agent.site != node.ref.site else _inherited_env(system, host, hosts_env) | env,
                cwd="/" if tool else cwd,
                sys_path=_tool_path(system, host) if tool else sys_path,
                labels=extent.names,
                sizes=extent.shape,
                preload=modules,
                per_proc=per_proc[at * count : (at + 1) * count],
                binds=binds,
                start_limit=START_LIMIT,
                tool=tool,
                devices=devices,
                slots=list(range(count)) if devices else [],
                asyncio="asyncio" in sys.modules,
            )
            messages.append(message)
            if not node.send(host.agent.id, message):
                death = node.deaths[host.agent.id]
                for ref in chosen:
                    node.declare_dead(ref.id, death)
            elif host.agent.site != node.ref.site:
                for ref in chosen:
                    node.expect(ref)  # not earlier: its agent must know the proc first
        if policy is not None:
            system.healer.spawned(mesh, messages, bootstrap, policy)
        body, buffers = bootstrap
        for rank, ref in enumerate(refs):
            link = node.link_to(ref.id)
            if link is not None:
                link.send(encode_header(Bootstrap(call._number, rank, extent.names, extent.shape, buffers)), body)
        system.changed()
        return mesh

    def _spawn_tool(self, name: str) -> ProcMesh:
        """Start one process on every host for a tool (``introspection.spawn_tool``)."""
        self._check_usable()
        hosts, extent = self._selected(), self._shape.extent
        return self._spawn(name, hosts, 1, extent, {}, (b"", ()), [], [], (), None)

    def _per_proc(
        self, command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None, extent: Extent
    ) -> list[Launch]:
        """Return the command of each proc; empty if all are forked."""
        if command is None:
            command = self._command
        if command is None:
            return []
        return [launch_of(command(point) if callable(command) else command) for point in extent.points()]

    # -- life -----------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[bool]:
        """A future that resolves to True when the hosts' agents answer.

        It fails if workers have not answered ``attach_to_workers`` in time.
        """
        if self._use is not None and self._use.unreached is not None:
            failed: Future[bool] = Future(self._system.node.poller, "host mesh")
            failed._reject(self._use.unreached)
            return failed
        answers = self._system.agent_answers if self._is_local else None
        return answers or resolved(self._system.node.poller, "host mesh", True)

    def __await__(self) -> Generator[Any, None, HostMesh]:
        yield from self.initialized.__await__()
        return self

    def with_python_executable(self, python: str) -> HostMesh:
        """Return the same hosts, with procs that run in this interpreter, which must have monarch_kernel installed.

        Procs that these procs start with ``this_host()`` use the same interpreter.
        """
        command = BootstrapCommand(python)
        launch_of(command)  # raises if the command is invalid
        return HostMesh(self._system, self._hosts, self._shape, command, self._use, self._name, self._part)

    def stop(self, reason: str = "host mesh stopped") -> Future[None]:
        """Stop the procs spawned through this mesh and its slices. The hosts stay, and can be used again.

        Other meshes of the same hosts, from another ``attach_to_workers`` or ``job.state()``, keep their procs.
        Processes that ranks have left on a worker, in separate sessions, end with the last of this controller's ranks
        there.

        Raises:
            RuntimeError: this is a slice, or a reference from another process.
        """
        self._must_be_whole("stop")
        assert self._use is not None
        system, what = self._system, "host mesh stop"
        meshes = [system.proc_meshes[uid] for uid in self._use.spawned if uid in system.proc_meshes]
        self._use.spawned.clear()
        stopping = [mesh._stop(reason) for mesh in meshes]
        theirs: dict[str, list[str]] = {host.agent.id: [] for host in self._hosts}
        for ref in (ref for mesh in meshes for ref in mesh._procs):
            theirs.get(ref.agent, []).append(ref.id)
        for host in self._hosts:  # each answers when the procs and all processes that they started are gone
            fields = (theirs[host.agent.id], reason, STOP_GRACE, True)
            stopping.append(settled(ask_agent(system.node, host.agent, what, StopProcs, *fields)))
        return gathered(system.node.poller, stopping, what).then(nothing)

    def shutdown(self) -> Future[None]:
        """Stop everything on these hosts and end their workers. The handle cannot be used afterwards.

        This process's own host agent keeps running, because it ends with this process.

        Raises:
            RuntimeError: this is a slice or a reference from another process, or was already shut down.
        """
        self._must_be_whole("shutdown")
        assert self._use is not None
        self._use.down = True
        reason = "host mesh shut down"
        if self._is_local:
            return self._everywhere("shutdown", reason, lambda call: StopProcs(call, None, reason, STOP_GRACE))
        for host in self._hosts:
            self._system.workers.pop(host.agent.id, None)
        return self._everywhere("shutdown", reason, lambda call: Shutdown(call, STOP_GRACE))

    def _check_usable(self) -> None:
        if self._use is not None and self._use.unreached is not None:
            raise self._use.unreached
        if self._down:
            raise RuntimeError("HostMesh has already been shut down")

    def _must_be_whole(self, what: str) -> None:
        self._check_usable()
        if self._use is None or self._part:
            raise RuntimeError(
                f"{what}() is for the handle that attach_to_workers() or this_host() gave, in its own process: "
                f"{self!r} is a reference to those hosts, or to some of them (a slice)"
            )

    def _everywhere(self, what: str, reason: str, message: Callable[[int], object]) -> Future[None]:
        """Drop all meshes that this process has started on these hosts, and send each live agent one request."""
        system = self._system
        agents = {host.agent.id: host.agent for host in self._hosts}
        for mesh in list(system.proc_meshes.values()):
            there = [ref.id for ref in mesh._procs if ref.agent in agents]
            if len(there) == len(mesh._procs):
                mesh._forget()
            else:
                system.tree.ending(there)
        asked = [settled(ask_agent(system.node, agent, what, message)) for agent in agents.values()]
        system.changed()
        return gathered(system.node.poller, asked, what).then(nothing)

    async def __aenter__(self) -> HostMesh:
        return await self

    async def __aexit__(self, *_exc: object) -> None:
        if not self._down:
            await self.shutdown()

    def __reduce__(self) -> Any:
        self.initialized.get(START_TIMEOUT)  # a reference must not exist before its hosts
        return (_rebuild_host_mesh, (self._hosts, self._shape, self._command, self._name))

    def _selected(self) -> list[HostRef]:
        return [self._hosts[rank] for rank in self._shape.ranks()]

    def __repr__(self) -> str:
        names = sorted({host.name for host in self._selected()})
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        sizes = ", ".join(f"{label}={size}" for label, size in self.sizes.items())
        shown = f"{self._name}: {shown}" if self._name else shown
        return f"<HostMesh {shown}{f' ({sizes})' if sizes else ''}>"


def _rebuild_host_mesh(
    hosts: tuple[HostRef, ...], region: Region, command: BootstrapCommand | None, name: str
) -> HostMesh:
    return HostMesh(get_system(), hosts, region, command, name=name)


def _inherited_env(system: System, host: HostRef, hosts_env: bool) -> dict[str, str | None]:
    """Return the part of this process's environment that ranks of a host inherit in addition to their agent's own.

    This process's agent has the environment that this process had when it started the agent; later changes are sent. A
    worker gets the changes since the start of this process, unless its ranks have a command of their own.
    """
    own = system.agent is not None and host.agent.id == system.agent.id
    if not system.is_root or (hosts_env and not own):
        return {}
    known = system.agent_env if own else _environment_at_start()
    changed: dict[str, str | None] = {key: value for key, value in os.environ.items() if known.get(key) != value}
    if own:
        changed.update((key, None) for key in known if key not in os.environ)
    return changed


def _tool_path(system: System, host: HostRef) -> list[str]:
    """Return the import path of a tool's procs: on another site, its own; here, that of this process.

    The working directory is not included.
    """
    if host.agent.site != system.node.ref.site:
        return []
    return [entry for entry in sys.path if isinstance(entry, str) and entry]


def _environment_at_start() -> dict[str, str]:
    """Return the environment of this process when it was started."""
    with open("/proc/self/environ", "rb") as file:
        entries = file.read().split(b"\0")
    known = {os.fsdecode(name): os.fsdecode(value) for name, _, value in (e.partition(b"=") for e in entries)}
    # The interpreter itself sets this variable if the locale is "C".
    return {"LC_CTYPE": os.environ.get("LC_CTYPE", ""), **known}


def _checked(per_host: Mapping[str, int], taken: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if not isinstance(per_host, Mapping):
        raise TypeError(f"per_host={per_host!r} must map names of dimensions to sizes, as in {{'gpus': 4}}")
    for label, size in per_host.items():
        if not isinstance(label, str) or not label.isidentifier():
            raise ValueError(f"per_host: {label!r} cannot name a dimension: use an identifier, such as 'gpus'")
        if label in taken:
            raise ValueError(f"per_host: the hosts have a dimension {label!r} already: choose another name")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"per_host: {label}={size!r} must be a whole number of at least 1")
    return tuple(per_host), tuple(per_host.values())


def _checked_bind(index: int, bind: Mapping[str, str]) -> dict[str, str]:
    for name, value in bind.items():
        if name not in _BINDS:
            raise ValueError(f"proc_bind[{index}]={dict(bind)}: {name!r} is none of {', '.join(map(repr, _BINDS))}")
        if not isinstance(value, str) or not re.fullmatch(r"all|[!+]?\d+(-\d+)?(,\d+(-\d+)?)*", value):
            what = "nodes" if name in ("cpunodebind", "membind") else "CPUs"
            raise ValueError(
                f"proc_bind[{index}]: {value!r} is not a list of {what} such as '0-3,8', '+0-1' (of those that the "
                "worker may use), '!0' (all others) or 'all'"
            )
    return dict(bind)


def this_host() -> HostMesh:
    """Return this machine, as a mesh of one host."""
    return get_system().this_host()


def this_proc() -> ProcMesh:
    """Return this process, as a mesh of one proc; actors spawned on it live here."""
    return get_system().this_proc()


def host_mesh_of_this_host(system: System) -> HostMesh:
    """Return the mesh that ``this_host()`` returns."""
    agent = system.ensure_agent()
    region = SINGLE.region
    return HostMesh(system, (HostRef(agent, agent.host),), region, command_of(system.launch), HostUse())


def proc_mesh(
    env: Mapping[str, str | None] | None = None, setup: Callable[[], object] | None = None, **sizes: int
) -> ProcMesh:
    """Start processes on this host: ``proc_mesh(gpus=4, env={...})``. The result is awaitable, like all handles."""
    return this_host().spawn_procs(per_host=sizes, env=env, bootstrap=setup)


def local_proc_mesh(**sizes: int) -> ProcMesh:
    """Do the same as ``proc_mesh``."""
    return proc_mesh(None, None, **sizes)
