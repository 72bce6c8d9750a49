"""Host meshes: where processes come from."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel import aliases
from monarch_kernel.protocol.messages import Bootstrap, ProcRef, ProcSpec, SpawnProcs
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import dumps
from monarch_kernel.runtime.actor.calls import ManyCall, Target
from monarch_kernel.runtime.actor.context import current
from monarch_kernel.runtime.actor.meshes import _NO_EXTENT, ProcMesh, _nothing
from monarch_kernel.runtime.actor.names import unique
from monarch_kernel.runtime.actor.system import System, get_system
from monarch_kernel.runtime.mesh.shape import Extent, MeshTrait, Point, Region
from monarch_kernel.runtime.node.future import Future, gathered, resolved
from monarch_kernel.runtime.supervision.restarts import RestartPolicy
from monarch_kernel.runtime.supervision.tree import OwnedMesh

#: Command line, environment, and whether the environment is inherited, of one proc.
PerProc = tuple[list[str] | None, dict[str, str], bool]

#: More procs than this on one host is taken for a mistake.
MAX_PROCS_PER_HOST = 4096


@dataclass(frozen=True)
class HostRef:
    """One host: its agent."""

    agent: ProcRef
    name: str


@dataclass(frozen=True)
class BootstrapCommand:
    """How to start a proc in an interpreter of its own instead of forking it.

    Attributes:
        program: path of the interpreter; ``-m monarch_kernel.runtime.rank`` is added.
        arg0: accepted as Monarch does; processes are always called by the program's own name.
        args: interpreter options that come before ``-m``.
        env: environment variables to set.
        inherit_env: whether the rest of the environment is kept.
    """

    program: str
    arg0: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    inherit_env: bool = True

    def with_env(self, env: Mapping[str, str]) -> BootstrapCommand:
        """The same command with more environment variables."""
        return BootstrapCommand(self.program, self.arg0, self.args, {**self.env, **env}, self.inherit_env)


def default_bootstrap_cmd() -> BootstrapCommand:
    """The interpreter that runs here."""
    return BootstrapCommand(sys.executable)


class HostMesh(MeshTrait):
    """A mesh of hosts. ``this_host()`` gives the one of this machine."""

    def __init__(self, system: System, hosts: tuple[HostRef, ...], region: Region, python: str | None = None) -> None:
        self._system = system
        self._hosts = hosts
        self._shape = region
        self._python = python
        self._meshes: list[ProcMesh] = []
        self._down = False

    @property
    def _region(self) -> Region:
        return self._shape

    def _new_with_region(self, region: Region) -> HostMesh:
        return HostMesh(self._system, self._hosts, region, self._python)

    # -- procs ----------------------------------------------------------------------------------

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        proc_bind: Sequence[Mapping[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        restart: RestartPolicy | str = "never",
        spares: HostMesh | None = None,
    ) -> ProcMesh:
        """Start processes on every host.

        Returns at once; await the result (or its ``initialized``) to know that they run.

        Args:
            per_host: dimensions and sizes of what is started on each host, as in ``{"gpus": 4}``; None starts one.
            bootstrap: a callable (sync or async) that every process runs before anything else.
            name: for people; any string.
            proc_bind: for each process of a host, a mapping with ``cpus`` (or ``physcpubind``): where it may run.
            bootstrap_command: start an interpreter with this command instead of forking; a function gives one for
            each point. env: environment variables to set in the processes.
            preload: modules to import before forking, once for all ranks (those that this process has imported of torch
                and numpy are preloaded anyway).
            restart: "on_failure" replaces procs that die, as ``heal`` does; a ``RestartPolicy`` says how often, after
                which wait, and whether one rank or all together. "never": the owner is told.
            spares: hosts on which nothing is started until one of the others is gone.

        Raises:
            ValueError: a dimension of the hosts is named again, a size is not a positive whole number.
        """
        if self._down:
            raise RuntimeError("HostMesh has already been shut down")
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
        checked_env = _checked_env(env)
        if self._system.is_root:
            # Ranks are forked by an agent that has the environment of its own start; what changed since goes along.
            known = self._system.agent_env
            checked_env = {k: v for k, v in os.environ.items() if known.get(k) != v} | checked_env
        if aliases.enabled():
            checked_env.setdefault(aliases.VARIABLE, "1")
        body: Any = b""
        buffers: tuple[int, ...] = ()
        if bootstrap is not None:
            if not callable(bootstrap):
                raise TypeError(f"bootstrap must be callable, not {type(bootstrap).__name__}")
            try:
                body, buffers = dumps(bootstrap)
            except Exception as e:
                raise TypeError(f"bootstrap {bootstrap!r} cannot be pickled: {e}") from e
        hosts = self._chosen()
        extent = Extent(self._shape.labels + labels, self._shape.sizes + sizes)
        per_proc = self._per_proc(bootstrap_command, proc_bind, extent, count)
        policy = RestartPolicy(restart) if isinstance(restart, str) else restart
        mesh = self._spawn(name, hosts, count, extent, checked_env, (body, buffers), per_proc, preload, policy)
        if spares is not None:
            self._system.healer.add_spares(mesh, [host.agent for host in spares._chosen()])
        return mesh

    def _chosen(self) -> list[HostRef]:
        return [self._hosts[rank] for rank in self._shape.ranks()]

    def _spawn(
        self,
        name: str | None,
        hosts: list[HostRef],
        count: int,
        extent: Extent,
        env: dict[str, str],
        bootstrap: tuple[Any, tuple[int, ...]],
        per_proc: list[PerProc],
        preload: Sequence[str],
        policy: RestartPolicy,
    ) -> ProcMesh:
        system = self._system
        node = system.node
        uid = unique(name or "procs")
        name = name or uid
        refs: list[ProcRef] = []
        for at, host in enumerate(hosts):
            folder = os.path.dirname(host.agent.address)
            for k in range(count):
                rank = at * count + k
                proc = f"{uid}.{rank}"
                ref = host.agent.beside(proc, os.path.join(folder, proc + ".sock"))
                refs.append(ref)
                node.expect(ref)
        here = current.get()
        owner = here.actor_instance if here is not None else system.client
        # Known to this process already, so probably wanted in the ranks: import once, before forking.
        modules = [*preload, *(m for m in ("torch", "numpy") if m in sys.modules and m not in preload)]
        call = ManyCall(node, f"{name}.setup", Target(name, uid, extent, tuple(refs), system.reported))
        mesh = ProcMesh(
            system,
            uid,
            name,
            tuple(refs),
            Region.from_extent(extent),
            self._shape,
            owner.actor_id,
            call.then(_nothing),
        )
        system.proc_meshes[uid] = mesh
        system.tree.spawned_procs(OwnedMesh(uid, name, owner.actor_id, extent, tuple(refs)))
        owner.owned.append(mesh)
        self._meshes.append(mesh)
        messages: list[SpawnProcs] = []
        for at, host in enumerate(hosts):
            node.learn(host.agent)
            chosen = refs[at * count : (at + 1) * count]
            message = SpawnProcs(
                mesh=name,
                procs=[ProcSpec(ref.id, ref.address, at * count + k) for k, ref in enumerate(chosen)],
                owner=node.ref,
                root=system.root,
                env=env,
                cwd=os.getcwd(),
                sys_path=list(sys.path),
                labels=extent.labels,
                sizes=extent.sizes,
                preload=modules,
                per_proc=per_proc[at * count : (at + 1) * count],
            )
            messages.append(message)
            if not node.send(host.agent.id, message):
                death = node.deaths[host.agent.id]
                for ref in chosen:
                    node.declare_dead(ref.id, death)
        system.healer.spawned(mesh, messages, bootstrap, policy)
        body, buffers = bootstrap
        for rank, ref in enumerate(refs):
            link = node.link_to(ref.id)
            if link is not None:
                link.send(encode_header(Bootstrap(call._number, rank, extent.labels, extent.sizes, buffers)), body)
        system.changed()
        return mesh

    def _per_proc(
        self,
        command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None,
        bind: Sequence[Mapping[str, str]] | None,
        extent: Extent,
        count: int,
    ) -> list[PerProc]:
        """How each proc differs from the others; nothing if none does."""
        if command is None and self._python is not None:
            command = BootstrapCommand(self._python)
        if command is None and bind is None:
            return []
        per_proc: list[PerProc] = []
        for point in extent.points():
            chosen = command(point) if callable(command) else command
            env: dict[str, str] = {}
            argv: list[str] | None = None
            inherit = True
            if chosen is not None:
                argv = [chosen.program, *chosen.args]
                env.update(chosen.env)
                inherit = chosen.inherit_env
            if bind is not None:
                env["MONARCH_KERNEL_CPUS"] = _checked_cpus(point.rank % count, bind[point.rank % count])
            per_proc.append((argv, env, inherit))
        return per_proc

    # -- life -----------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[None]:
        """Done when the hosts' agents answer."""
        return resolved(self._system.node.poller, "host mesh")

    def __await__(self) -> Generator[Any, None, HostMesh]:
        yield from self.initialized.__await__()
        return self

    def with_python_executable(self, python: str) -> HostMesh:
        """The same hosts, where procs run in this interpreter (which must have monarch_kernel installed)."""
        return HostMesh(self._system, self._hosts, self._shape, python)

    def stop(self, reason: str = "host mesh stopped") -> Future[None]:
        """Stop every proc that was started through this handle; the hosts stay usable."""
        return self._stop(reason)

    def _stop(self, reason: str) -> Future[Any]:
        meshes, self._meshes = self._meshes, []
        futures = [mesh._stop(reason) for mesh in meshes if not mesh._stopped]
        return gathered(self._system.node.poller, futures, "host mesh stop").then(_nothing)

    def shutdown(self) -> Future[None]:
        """Stop everything on these hosts, for good: the handle cannot be used afterwards."""
        if self._down:
            raise RuntimeError("HostMesh has already been shut down")
        self._down = True
        return self._stop("host mesh shut down")

    async def __aenter__(self) -> HostMesh:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if not self._down:
            await self.shutdown()

    def __reduce__(self) -> Any:
        return (_rebuild_host_mesh, (self._hosts, self._shape, self._python))

    def __repr__(self) -> str:
        names = sorted({self._hosts[rank].name for rank in self._shape.ranks()})
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"<HostMesh {shown}>"


def _rebuild_host_mesh(hosts: tuple[HostRef, ...], region: Region, python: str | None) -> HostMesh:
    return HostMesh(get_system(), hosts, region, python)


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


def _checked_cpus(index: int, bind: Mapping[str, str]) -> str:
    cpus = bind.get("cpus") or bind.get("physcpubind")
    if not cpus:
        raise ValueError(f"proc_bind[{index}]={dict(bind)}: only 'cpus' and 'physcpubind' are supported here")
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cpus):
        raise ValueError(f"proc_bind[{index}]: {cpus!r} is no list of CPUs, such as '0-3,8'")
    return cpus


def _checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    checked: dict[str, str] = {}
    for key, value in (env or {}).items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise ValueError(f"env: {key!r} cannot name an environment variable")
        if not isinstance(value, str):
            raise TypeError(f"env: {key}={value!r} must be a string")
        checked[key] = value
    return checked


def this_host() -> HostMesh:
    """This machine, as a mesh of one host."""
    return get_system().this_host()


def this_proc() -> ProcMesh:
    """This process, as a mesh of one proc; actors spawned on it live here."""
    return get_system().this_proc()


def host_mesh_of_this_host(system: System) -> HostMesh:
    """The mesh behind ``this_host()``."""
    agent = system.ensure_agent()
    return HostMesh(system, (HostRef(agent, agent.host),), Region.from_extent(_NO_EXTENT))


def proc_mesh(env: Mapping[str, str] | None = None, setup: Callable[[], Any] | None = None, **sizes: int) -> ProcMesh:
    """Processes on this host: ``proc_mesh(gpus=4, env={...})``. Awaitable, as all handles."""
    return this_host().spawn_procs(per_host=sizes, env=env, bootstrap=setup)


def local_proc_mesh(**sizes: int) -> ProcMesh:
    """The same as ``proc_mesh``."""
    return proc_mesh(None, None, **sizes)
