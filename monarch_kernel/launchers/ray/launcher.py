"""Get hosts from Ray: a placement group with a bundle for each host, in which an actor owns the worker."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel.launchers.base import (
    MARKER,
    HostPhase,
    HostStatus,
    InfeasibleError,
    JobStatus,
    KeyWay,
    Launcher,
    LauncherOption,
    LaunchError,
    LaunchRequest,
    Resources,
    SubmissionRefusedError,
    Ticket,
    find_announcement,
)
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.ray import cluster as ray_cluster
from monarch_kernel.launchers.ray import host as ray_host
from monarch_kernel.launchers.ray.cluster import NAMESPACE, STRATEGIES, RayGroup, RayNode, autoscaler_says
from monarch_kernel.launchers.registry import this_user
from monarch_kernel.launchers.tunnel import reaches

if TYPE_CHECKING:
    from types import ModuleType


#: The time limit for actors that have answered before to answer again (seconds).
_ANSWER_TIME = 2.0
#: The same for actors whose workers have not started yet.
_GLANCE = 0.25
#: The time limit for Ray to report why a placement group is infeasible (seconds).
_VERDICT_TIME = 1.0
#: The time limit for the port of a worker to answer (seconds).
_DIAL_TIME = 1.0
#: The time limit for an actor to end its worker (seconds).
_STOP_TIME = 15.0
#: The pattern of the name of a placement group: its job, its number in the job, and the user who requested it.
_NAME = re.compile("monarch_kernel-([0-9a-f]+)-([0-9]+)-(.*)")


class _Place(msgspec.Struct, frozen=True):
    """The placement of a host: the number of its placement group in the ticket, and its bundle in that group."""

    group: int
    bundle: int


class _Group(msgspec.Struct, frozen=True):
    """A placement group of a ticket: its id and the number of its bundles."""

    id: str
    bundles: int


class _Data(msgspec.Struct):
    """The data in tickets of this launcher: the cluster's address, placement groups, and placements of hosts."""

    address: str
    groups: list[_Group]
    places: list[_Place]


class _Told(msgspec.Struct):
    """The report of an actor about its worker; see ``HostActor.told``."""

    node: str
    group: str
    said: bytes
    code: int | None
    last: bytes
    since: float


class RayLauncher(Launcher):
    """Requests a placement group from Ray with a bundle for each host. An actor in each bundle runs a worker.

    A program that is connected to a Ray cluster stays connected to it; otherwise this class connects it.

    Args:
        address: the address of the cluster, as for ``ray.init``; "": that of ``RAY_ADDRESS``, or of this machine's
            cluster.
        strategy: the placement of bundles on nodes: "STRICT_SPREAD" (each on a separate node), "SPREAD", "PACK" or
            "STRICT_PACK".
        spares: the number of additional bundles of the placement group, in which lost hosts are replaced at once.
        port: the port at which workers listen; 0: any free port.
        autoscaling: whether nodes may be added to the cluster. A request that no present node can fulfil then waits,
            instead of being rejected.
        runtime_env: Ray's runtime environment of the actors; by default that of the program.
    """

    name = "ray"
    OPTIONS = (
        LauncherOption(name="address", metavar="ADDRESS", help="of the cluster (default: RAY_ADDRESS, this machine's)"),
        LauncherOption(
            name="strategy", choices=STRATEGIES, help="how hosts lie on nodes (default: each on its own)", plain=True
        ),
        LauncherOption(name="spares", type=int, metavar="N", help="more places, for lost hosts", plain=True),
        LauncherOption(name="port", type=int, metavar="PORT", help="where workers listen (default: any)", plain=True),
        LauncherOption(name="autoscaling", type=bool, help="wait for nodes that may be added", plain=True),
        LauncherOption(
            name="resources",
            type=list,
            metavar="NAME=N,...",
            help="custom resources of each host, such as TPU=4",
            wish=True,
            plain=True,
        ),
    )

    def __init__(
        self,
        address: str = "",
        strategy: str = "STRICT_SPREAD",
        *,
        spares: int = 0,
        port: int = 0,
        autoscaling: bool = False,
        runtime_env: Mapping[str, object] | None = None,
    ) -> None:
        ray_cluster.check_address(address)
        if strategy not in STRATEGIES:
            raise ValueError(f"there is no strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")
        self._address = address
        self._strategy = strategy
        self._spares = spares
        self._port = port
        self._autoscaling = autoscaling
        self._runtime_env = None if runtime_env is None else dict(runtime_env)
        self._actors: dict[str, object] = {}
        self._asked: dict[str, object] = {}  # queries that are not answered yet
        self._answered: dict[str, _Told] = {}  # the latest answers

    # -- asking for hosts -----------------------------------------------------------------------------

    def submit(self, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        ray = ray_cluster.connect(self._address)
        data = _Data(ray_cluster.address_here(ray), [], [])  # an address that a later process can use, too
        try:
            self._add_group(ray, data, request, 0, request.hosts, request.hosts + self._spares, ())
        except BaseException:
            self._kill_actors(ray, request.command.job, range(request.hosts))
            self._remove_groups(ray, data.groups)
            raise
        return self._ticket(request.command.job, len(data.places), data)

    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        data = ticket.read(_Data)
        ray = ray_cluster.connect(data.address)
        status = self.poll(ticket)
        free = self._free(ray, ticket, data, status)[:count]
        before = len(data.groups)
        first = ticket.hosts
        try:
            if len(free) < count:
                living = [host.host for host in status.hosts if host.state is not HostPhase.GONE]
                apart = [told.node for host in living if (told := self._answered.get(_mark(ticket.job, host)))]
                data.places += free
                rest = count - len(free)
                spread = self._strategy == "STRICT_SPREAD"
                self._add_group(ray, data, request, first + len(free), rest, rest, apart if spread else ())
            else:
                data.places += free
            for at, place in enumerate(free):
                self._start(ray, data, request, first + at)
                self._kill_actors(ray, ticket.job, [n for n in range(first) if data.places[n] == place])
        except BaseException:
            self._kill_actors(ray, ticket.job, range(first, first + count))
            self._remove_groups(ray, data.groups[before:])
            raise
        return self._ticket(request.command.job, len(data.places), data)

    def _add_group(
        self,
        ray: ModuleType,
        data: _Data,
        request: LaunchRequest,
        first: int,
        hosts: int,
        bundles: int,
        apart: Iterable[str],
    ) -> None:
        """Request a new placement group for hosts from this number on."""
        bundle = _bundle(request)
        nodes = ray_cluster.nodes(ray)
        apart = set(apart)
        usable = [node for node in nodes.values() if node.id not in apart]
        name = f"monarch_kernel-{request.command.job}-{len(data.groups)}-{this_user()}"
        try:
            group = ray_cluster.make_group(ray, name, bundle, bundles, self._strategy, apart)
        except Exception as e:
            raise SubmissionRefusedError(self.name, str(e), "check the resources and options of the request") from e
        data.groups.append(_Group(group, bundles))
        if not self._autoscaling and not ray_cluster.could_fit(usable, bundle, bundles, self._strategy):
            end = time.monotonic() + _VERDICT_TIME
            while (said := ray_cluster.groups(ray)[group].scheduling) == "QUEUED" and time.monotonic() < end:
                time.sleep(0.02)
            beside = " beside those with hosts of the job" if apart else ""
            raise InfeasibleError(
                f"Ray cannot give {bundles} hosts with {ray_cluster.amounts(bundle)} each ({self._strategy}): {said}. "
                f"The cluster has {ray_cluster.offered(usable, bundle)}{beside}. Ask for less, choose "
                "another strategy, or wait for nodes that an autoscaler adds with autoscaling=True"
            )
        for number in range(hosts):
            data.places.append(_Place(len(data.groups) - 1, number))
            self._start(ray, data, request, first + number)

    def _start(self, ray: ModuleType, data: _Data, request: LaunchRequest, host: int) -> None:
        """Create an actor that runs the worker of a host once its bundle is available."""
        ray.cloudpickle.register_pickle_by_value(ray_host)
        command, needs = request.command, request.resources
        place = data.places[host]
        group = data.groups[place.group].id
        argv = command.argv(
            f"tcp://{ray_host.ADDRESS}:{self._port}", key=KeyWay.STDIN, walltime=request.resources.walltime
        )
        bundle = _bundle(request)
        own = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        options: dict[str, object] = {
            "name": _mark(command.job, host),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "num_cpus": bundle["CPU"],
            "num_gpus": needs.gpus,
            "resources": own,
            "max_concurrency": 8,
            "max_restarts": 0,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                ray_cluster.handle(ray, group), placement_group_bundle_index=place.bundle
            ),
        }
        if needs.memory:
            options["memory"] = needs.memory
        if self._runtime_env is not None:
            options["runtime_env"] = self._runtime_env
        mark = {MARKER: command.marker(host)}
        made = ray.remote(ray_host.HostActor).options(**options)
        own_python = argv[0] == sys.executable and not command.python
        actor = made.remote(command.job, host, group, argv, command.stdin(), mark, own_python, command.idle)
        self._actors[_mark(command.job, host)] = actor

    def _free(self, ray: ModuleType, ticket: Ticket, data: _Data, status: JobStatus) -> list[_Place]:
        """Return the bundles in which no host runs.

        First come those that had none, then those whose actor still answers, and finally those that Ray must move to
        another node.
        """
        groups = ray_cluster.groups(ray)
        last: dict[_Place, int] = {place: host for host, place in enumerate(data.places)}
        free: list[tuple[int, _Place]] = []
        for number, group in enumerate(data.groups):
            found = groups.get(group.id)
            if found is None or found.state not in ("CREATED", "RESCHEDULING"):
                continue
            for bundle in range(group.bundles):
                place = _Place(number, bundle)
                host = last.get(place)
                if host is None:
                    free.append((0, place))
                elif status.hosts[host].state is HostPhase.GONE:
                    free.append((1 if status.hosts[host].exit_code is not None else 2, place))
        return [place for _, place in sorted(free, key=lambda each: each[0])]

    # -- asking where they are ------------------------------------------------------------------------

    def poll(self, ticket: Ticket) -> JobStatus:
        """See ``Launcher``."""
        data = ticket.read(_Data)
        ray = ray_cluster.connect(data.address)
        groups = ray_cluster.groups(ray)
        found: dict[int, HostStatus] = {}
        ask: list[int] = []
        for host, place in enumerate(data.places):
            group = groups.get(data.groups[place.group].id)
            if group is None or group.state == "REMOVED":
                found[host] = self._gone(ticket, host, "its placement group has been removed")
            elif group.state == "PENDING":
                why = self._waits_for(ray, data, group)
                found[host] = HostStatus(host=host, state=HostPhase.QUEUED, reason=why)
            else:
                ask.append(host)
        errors, silent = self._ask(ray, ticket, ask)
        nodes = ray_cluster.nodes(ray)
        for host in ask:
            place = data.places[host]
            group = groups[data.groups[place.group].id]
            node = nodes.get(group.nodes[place.bundle])
            found[host] = self._status(ticket, host, group, node, nodes, errors.get(host), host in silent)
        return JobStatus(tuple(found[host] for host in range(ticket.hosts)))

    def _waits_for(self, ray: ModuleType, data: _Data, group: RayGroup) -> str:
        """Describe why a placement group has no nodes yet."""
        asked = f"{len(group.nodes)} x ({ray_cluster.amounts(group.bundle)}), {self._strategy}"
        why = f"{group.scheduling}: {asked}; free in the cluster: {ray_cluster.lacking(ray, group.bundle)}"
        said = autoscaler_says(data.address, group.id)
        return f"{why}; {said}" if said else why

    def _ask(self, ray: ModuleType, ticket: Ticket, hosts: Sequence[int]) -> tuple[dict[int, str], set[int]]:
        """Query actors for the state of their workers.

        Returns why some are gone and can no longer be queried, and which of the others have answered before but not
        now.
        """
        errors: dict[int, str] = {}
        silent: set[int] = set()
        refs: dict[int, object] = {}
        for host in hosts:
            mark = _mark(ticket.job, host)
            if (told := self._answered.get(mark)) is not None and told.code is not None:
                continue  # it has nothing more to report
            try:
                if mark not in self._asked:
                    self._asked[mark] = self._actor(ray, ticket, host).told.remote()
                refs[host] = self._asked[mark]
            except ValueError:
                errors[host] = "its actor has ended"
        known = [ref for host, ref in refs.items() if self._has_started(ticket, host)]
        others = [ref for host, ref in refs.items() if not self._has_started(ticket, host)]
        ready: set[object] = set()
        for some, patience in ((known, _ANSWER_TIME), (others, _GLANCE)):
            if some:
                ready |= set(ray.wait(some, num_returns=len(some), timeout=patience)[0])
        for host, ref in refs.items():
            if ref not in ready:
                if self._has_started(ticket, host):
                    silent.add(host)
                continue
            mark = _mark(ticket.job, host)
            del self._asked[mark]
            try:
                self._answered[mark] = msgspec.convert(ray.get(ref), _Told)
            except ray.exceptions.ActorUnavailableError:
                silent.add(host)  # Ray does not know yet whether it has ended
            except ray.exceptions.RayActorError as e:
                errors[host] = _last_line(e)
        return errors, silent

    def _status(
        self,
        ticket: Ticket,
        host: int,
        group: RayGroup,
        node: RayNode | None,
        nodes: Mapping[str, RayNode],
        error: str | None,
        silent: bool,
    ) -> HostStatus:
        """Return the status of a host whose placement group is ready, or is being moved."""
        mark = _mark(ticket.job, host)
        told = self._answered.get(mark)
        if error is not None and (told is None or told.code is None):
            return self._gone(ticket, host, error)
        if told is None:
            if node is None:
                why = f"{group.state}, {group.scheduling}: Ray looks for another node"
                return HostStatus(host=host, state=HostPhase.QUEUED, reason=why)
            if not node.alive:
                why = f"Ray moves its bundle from {node.name}: {node.reason}"
                return HostStatus(host=host, state=HostPhase.QUEUED, reason=why)
            return HostStatus(
                host=host, state=HostPhase.STARTING, name=node.name, reason=f"Ray starts its actor on {node.name}"
            )
        place = nodes.get(told.node)
        name = told.node[:8] if place is None else place.name
        said = find_announcement(told.said)
        if told.code is not None or (said is not None and said.error):
            reason = "its worker has ended" if told.code == 0 else f"exit {told.code}"
            if told.last:
                reason += f": {told.last.decode(errors='replace').strip()}"
            if said is not None and said.error:
                return HostStatus.announced(host, said, name=name, exit_code=told.code, since=told.since)
            return HostStatus(
                host=host,
                state=HostPhase.GONE,
                name=name,
                reason=reason,
                since=told.since,
                exit_code=told.code,
                failed=said is None,
            )
        if place is not None and not place.alive:
            return self._gone(ticket, host, f"Ray has lost its node: {place.reason}")
        if said is None:
            why = "its worker is starting"
            return HostStatus(host=host, state=HostPhase.STARTING, name=name, reason=why, since=told.since)
        if silent and not reaches(said.url, _DIAL_TIME):
            return self._gone(ticket, host, "neither its actor nor its worker answers; Ray has not lost the node yet")
        return HostStatus.announced(host, said, name=name, since=told.since)

    def _gone(self, ticket: Ticket, host: int, reason: str) -> HostStatus:
        told = self._answered.get(_mark(ticket.job, host))
        name = ""
        said = None if told is None else find_announcement(told.said)
        if said is not None:
            name = said.host
        return HostStatus(host=host, state=HostPhase.GONE, name=name, reason=reason)

    def _has_started(self, ticket: Ticket, host: int) -> bool:
        told = self._answered.get(_mark(ticket.job, host))
        return told is not None and bool(told.said)

    def _actor(self, ray: ModuleType, ticket: Ticket, host: int) -> Any:
        """Return the actor of a host. Raises ``ValueError`` if it has ended."""
        mark = _mark(ticket.job, host)
        if mark not in self._actors:
            self._actors[mark] = ray.get_actor(mark, namespace=NAMESPACE)
        return self._actors[mark]

    def log(self, ticket: Ticket, host: int, lines: int = 100) -> str:
        """See ``Launcher``. The actor keeps the log, so it is lost with its node."""
        ray = ray_cluster.connect(ticket.read(_Data).address)
        try:
            return ray.get(self._actor(ray, ticket, host).log.remote(lines), timeout=_DIAL_TIME)
        except (ValueError, ray.exceptions.GetTimeoutError):
            return ""
        except ray.exceptions.RayActorError as e:
            return str(e)

    # -- ending ---------------------------------------------------------------------------------------

    def end(self, ticket: Ticket, hosts: Sequence[int] | None = None) -> None:
        """See ``Launcher``. A placement group is removed with its last host; until then the job keeps its bundles."""
        data = ticket.read(_Data)
        ray = ray_cluster.connect(data.address)
        ending = set(range(ticket.hosts) if hosts is None else hosts)
        status = self.poll(ticket)
        running = [
            host.host
            for host in status.hosts
            if host.host in ending and host.state in (HostPhase.STARTING, HostPhase.UP)
        ]
        refs: list[Any] = []
        for host in running:
            try:
                refs.append(self._actor(ray, ticket, host).stop.remote())
            except ValueError:
                continue  # it has ended meanwhile
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_STOP_TIME)
        gone = {host.host for host in status.hosts if host.state is HostPhase.GONE} | ending
        whole = {
            number
            for number in range(len(data.groups))
            if all(host in gone for host, place in enumerate(data.places) if place.group == number)
        }
        # End the actors that wait, now for nothing. The others stay to report the ends of their workers.
        queued = [host for host in ending if status.hosts[host].state is HostPhase.QUEUED]
        self._kill_actors(ray, ticket.job, queued)
        self._remove_groups(ray, [data.groups[number] for number in whole])

    def _kill_actors(self, ray: ModuleType, job: str, hosts: Iterable[int]) -> None:
        for host in hosts:
            mark = _mark(job, host)
            self._asked.pop(mark, None)
            try:
                ray.kill(self._actors.get(mark) or ray.get_actor(mark, namespace=NAMESPACE))
            except ValueError:
                continue  # it has ended

    def _remove_groups(self, ray: ModuleType, groups: Sequence[_Group]) -> None:
        """Remove placement groups, and all actors in them. Does nothing for those that are already removed."""
        for group in groups:
            ray.util.remove_placement_group(ray_cluster.handle(ray, group.id))

    @classmethod
    def found(cls, *, own_process: bool) -> list[tuple[Launcher, Ticket]]:
        """See ``Launcher``.

        Finds jobs in the cluster of this program, or for a command of this package of this machine, by the names of
        their placement groups.
        """
        ray = ray_cluster.connected(may_connect=own_process)
        if ray is None:
            return []
        jobs: dict[str, dict[int, RayGroup]] = {}
        for group in ray_cluster.groups(ray).values():
            named = _NAME.fullmatch(group.name)
            if named is not None and named[3] == this_user() and group.state != "REMOVED":
                jobs.setdefault(named[1], {})[int(named[2])] = group
        launcher = cls()
        address = ray_cluster.address_here(ray)
        actors = [
            one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE
        ]
        found: list[tuple[Launcher, Ticket]] = []
        for job, groups in jobs.items():
            hosts = sorted(int(name.removeprefix(f"{job}.")) for name in actors if name.startswith(f"{job}."))
            data = _Data(address, [_Group(groups[at].id, len(groups[at].nodes)) for at in sorted(groups)], [])
            # Only the record of the job contains the placement of each host. Hosts are listed in the order of bundles.
            places = [_Place(at, bundle) for at, group in enumerate(data.groups) for bundle in range(group.bundles)]
            data.places = [places[0]] * (max(hosts, default=-1) + 1)
            for host, place in zip(hosts, places):
                data.places[host] = place
            found.append((launcher, cls._ticket(job, len(data.places), data)))
        return found


def _bundle(request: LaunchRequest) -> dict[str, float]:
    """Return the bundle of a host. Ray does not assign whole nodes, so each bundle requests at least one processor."""
    needs = request.resources
    found: dict[str, float] = {"CPU": needs.cpus or 1}
    if needs.gpus:
        found["GPU"] = needs.gpus
    if needs.memory:
        found["memory"] = needs.memory
    options = dict(needs.options)
    custom = options.pop("resources", {})
    if options:
        raise LaunchError(f"Ray knows no {', '.join(sorted(options))}: its only further option is resources")
    pairs = custom.items() if isinstance(custom, Mapping) else [str(word).partition("=")[::2] for word in custom]
    for name, amount in pairs:
        try:
            found[str(name)] = float(amount)
        except ValueError:
            raise LaunchError(f"{name}={amount} is no resource of Ray: write NAME=NUMBER, such as TPU=4") from None
    return found


def _mark(job: str, host: int) -> str:
    """Return the name of the actor of a host."""
    return f"{job}.{host}"


def _last_line(error: Exception) -> str:
    """Return Ray's reason for the end of an actor, which follows a description of the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class RayJob(EngineJob):
    """Hosts from Ray: bundles on its nodes, with a worker in each (``docs/ray.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name. They are one placement group.
        address: the address of the cluster, as for ``ray.init``. By default the cluster to which the program is
            connected, the one that ``RAY_ADDRESS`` names, or that of this machine.
        cpus: processors of each host, as Ray counts them.
        gpus: devices of each host; Ray chooses them.
        memory: the memory of each host (bytes), as Ray counts it.
        resources: custom resources of each host, such as ``{"TPU": 4}``.
        strategy: "STRICT_SPREAD" (each host on a separate node), "SPREAD", "PACK" or "STRICT_PACK".
        spares: the number of additional bundles in which lost hosts are replaced at once.
        port: the port at which workers listen; 0: any free port.
        autoscaling: whether nodes may be added to the cluster, so that a request waits which no node can fulfil.
        runtime_env: Ray's environment for the workers; by default that of the program.
        options: those of ``EngineJob``.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        address: str = "",
        *,
        cpus: int = 1,
        gpus: int = 0,
        memory: int = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "STRICT_SPREAD",
        spares: int = 0,
        port: int = 0,
        autoscaling: bool = False,
        runtime_env: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        launcher = RayLauncher(
            address, strategy, spares=spares, port=port, autoscaling=autoscaling, runtime_env=runtime_env
        )
        custom = {"resources": dict(resources)} if resources else {}
        needs = Resources(gpus=gpus, cpus=cpus, memory=memory, options=custom)
        super().__init__(launcher, meshes, resources=needs, **options)
