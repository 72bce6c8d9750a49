"""Several hosts: workers over TCP on this machine, each reached only through connections that can be broken."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from monarch_kernel import environment
from monarch_kernel.actor import HostMesh, ProcMesh, attach_to_workers, shutdown_context
from tests.chaos.engine import STOPPED, Chaos, send
from tests.chaos.events import Event, pick
from tests.chaos.load import DEADLINE
from tests.chaos.wires import LOOPBACK, Wires
from tests.conftest import alive, children, wait_until
from tests.ports import free_port
from tests.workers import Team, team

#: How long a host may be silent here (seconds).
HEARTBEAT = 2.0
#: The longest silence of a connection that must go unnoticed, and a silence that must be noticed by all.
STALL = 0.5
LOSS = HEARTBEAT + 1.5
#: How long it may take until both ends have noticed a reset (seconds). A rank that is new, and is first called over a
#: connection which has just broken, is lost with it for the caller.
NOTICE = 0.3
#: How long a host that has lost its controller may take to end what ran there, from when it can know (seconds).
END_TIME = 10.0
#: How long it may take to attach to a worker that is there (seconds).
ATTACH = 10.0


class Connections(Protocol):
    """All connections between hosts (of which the controller's is ``controller``), which can be broken."""

    def silence(self, host: str, other: str = "") -> None:
        """Cut two hosts off from each other, or one from all others, without any notification."""
        ...

    def mend(self, host: str, other: str = "") -> None:
        """Undo ``silence``."""
        ...

    def reset(self, host: str, other: str = "") -> int:
        """Reset all connections of a host (to one other host)."""
        ...


class Node(ABC):
    """One host with a worker."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        #: The worker's id, as it was attached to last.
        self.agent = ""
        #: Silent or frozen until then, at least.
        self.until = 0.0
        self.silent = False
        self.frozen = False

    @abstractmethod
    def start(self) -> None:
        """A new worker on this host."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Of its worker."""

    @property
    @abstractmethod
    def runs(self) -> bool:
        """Whether its worker lives."""

    def signal(self, number: int) -> None:
        """Send its worker a signal."""
        send(self.pid, number)

    def pids(self, pids: Iterable[int]) -> list[int]:
        """What processes of the host that have these ids there are called here."""
        return list(pids)

    @property
    def there(self) -> bool:
        """Whether it can be reached."""
        return self.runs and not self.silent and not self.frozen


class LocalNode(Node):
    """A worker on this machine, behind a door of the wires."""

    def __init__(self, members: Team, wires: Wires, name: str) -> None:
        super().__init__(name, f"tcp://{LOOPBACK}:{wires.open(name)}")
        self._members = members
        self._wires = wires
        self.start()

    def start(self) -> None:
        port = free_port()
        self.worker = self._members.start(f"{self.url}@tcp://{LOOPBACK}:{port}")
        self._wires.aim(self.name, port)
        self._wires.belongs(self.name, self.worker.pid)

    @property
    def pid(self) -> int:
        return self.worker.pid

    @property
    def runs(self) -> bool:
        return self.worker.process.poll() is None


class HostsChaos(Chaos):
    """One run on several hosts.

    Args:
        nodes: the last one is a spare.
    """

    weights: ClassVar[dict[str, int]] = {
        "kill": 6,
        "stop": 2,
        "leave": 3,
        "kill_several": 2,
        "heal": 12,
        "stall": 5,
        "pause_worker": 3,
        "kill_worker": 2,
        "lose": 2,
        "freeze": 1,
        "reset": 2,
        "reset_pair": 2,
        "part": 2,
        "waver": 1,
        "repair": 10,
    }

    def __init__(
        self, seed: int, minutes: float, nodes: Sequence[Node], connections: Connections, key_file: str, ranks: int = 2
    ) -> None:
        self.nodes = nodes
        self.connections = connections
        self.key_file = key_file
        #: Which hosts do not hear each other, and until when at least.
        self.cuts: dict[tuple[str, str], float] = {}
        super().__init__(seed, minutes, ranks)

    def spawn(self, ranks: int) -> ProcMesh:
        hosts = self.attach(self.nodes)
        first, spare = hosts.slice(hosts=slice(0, -1)), hosts.slice(hosts=slice(-1, None))
        return first.spawn_procs(per_host={"gpus": ranks}, name="chaos", spares=spare)

    def living(self, agent: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for node in self.nodes:
            if node.agent and agent in ("", node.agent):
                there = super().living(node.agent)
                found.update(zip(there, node.pids(there.values()), strict=True))
        return {proc: pid for proc, pid in found.items() if pid}

    def attach(self, nodes: Sequence[Node]) -> HostMesh:
        """Attach to these, where one is not attached already."""
        urls = [node.url for node in nodes]
        hosts: Any = attach_to_workers(workers=urls, key_file=self.key_file, timeout=ATTACH)
        for node, host in zip(nodes, hosts._hosts, strict=True):
            node.agent = host.agent.id
            self.harmed.discard(node.agent)
            self._known.discard(node.agent)
        return hosts

    def is_attached(self, node: Node) -> bool:
        """Whether there is a connection to a host, as far as this process knows."""
        return node.there and bool(node.agent) and node.agent not in self.harmed

    def spares(self) -> HostMesh | None:
        attached = [node for node in self.nodes if self.is_attached(node)]
        return self.attach(attached) if attached else None

    def may_fail(self) -> bool:
        return not all(self.is_attached(node) for node in self.nodes)

    def whole(self) -> None:
        while any(not self.is_attached(node) for node in self.nodes) or self.cuts:
            self.repair(None)
            time.sleep(0.05)

    # -- events -------------------------------------------------------------------------------------

    def excuses(self, one: str, other: str) -> bool:
        agents = {self.agent_of(one), self.agent_of(other)}
        cut = ({node.agent for node in self.nodes if node.name in names} for names in list(self.cuts))
        return super().excuses(one, other) or any(agents == pair for pair in cut)

    def victim(self, die: float) -> Node | None:
        """A host that is well, if so many are that others are left."""
        well = [node for node in self.nodes if self.is_attached(node)]
        return pick(well, die) if len(well) > 1 else None

    def ruin(self, node: Node, why: str, until: float) -> None:
        """All that runs on a host is lost for the controller, and must end."""
        procs = self.living(node.agent)
        self.harmed |= {node.agent, *procs}
        self.ending.append((until + END_TIME, set(procs.values()), why))

    def stall(self, event: Event) -> None:
        """A connection is silent for a moment, which must go unnoticed."""
        node = self.victim(event.dice[0])
        if node is None:
            return
        others = ["", "controller", *(each.name for each in self.nodes if each is not node)]
        other = pick(others, event.dice[1])
        if (node.name, other) in self.cuts or (other, node.name) in self.cuts:
            return
        self.connections.silence(node.name, other)
        time.sleep(event.dice[2] * STALL)
        self.connections.mend(node.name, other)

    def pause_worker(self, event: Event) -> None:
        node = self.victim(event.dice[0])
        if node is not None:
            node.signal(signal.SIGSTOP)
            time.sleep(event.dice[1] * STOPPED)
            node.signal(signal.SIGCONT)

    def kill_worker(self, event: Event) -> None:
        """The worker alone, or all that runs on its host."""
        node = self.victim(event.dice[0])
        if node is None:
            return
        self.ruin(node, f"the worker of {node.name} was killed", time.monotonic())
        doomed = {node.pid, *(children(node.pid) if event.dice[1] < 0.5 else ())}
        for pid in doomed:
            send(pid, signal.SIGKILL)
        # A new worker removes what a crash has left, but not before all of it has ended.
        wait_until(
            lambda: not node.runs and not any(map(alive, doomed)), f"all that was killed on {node.name} has ended"
        )

    def lose(self, event: Event) -> None:
        """A host that is unreachable, though all its processes live on."""
        node = self.victim(event.dice[0])
        if node is None:
            return
        node.until = time.monotonic() + LOSS
        self.ruin(node, f"{node.name} was cut off", node.until)
        node.silent = True
        self.connections.silence(node.name)

    def freeze(self, event: Event) -> None:
        """A worker that stands still, until everybody has given it up."""
        node = self.victim(event.dice[0])
        if node is None:
            return
        node.until = time.monotonic() + LOSS
        self.ruin(node, f"the worker of {node.name} was given up by all others", node.until)
        node.frozen = True
        node.signal(signal.SIGSTOP)

    def reset(self, event: Event) -> None:
        """All connections of a host are reset; it is there again at once."""
        node = self.victim(event.dice[0])
        if node is None:
            return
        self.ruin(node, f"the connections of {node.name} were reset", time.monotonic())
        self.connections.reset(node.name)
        time.sleep(NOTICE)

    def two(self, event: Event) -> tuple[Node, Node] | None:
        """Two hosts that are well."""
        node, other = self.victim(event.dice[0]), self.victim(event.dice[1])
        return None if node is None or other is None or node is other else (node, other)

    def part(self, event: Event) -> None:
        """Two hosts do not hear each other, but the controller hears both."""
        pair = self.two(event)
        if pair is not None:
            node, other = sorted(pair, key=lambda one: one.name)
            if (node.name, other.name) in self.cuts:
                return
            self.cuts[node.name, other.name] = time.monotonic() + LOSS
            self.note_parted(node, other)
            self.connections.silence(node.name, other.name)

    def reset_pair(self, event: Event) -> None:
        """The connections between two hosts are reset."""
        pair = self.two(event)
        if pair is not None:
            self.note_parted(*pair)
            self.connections.reset(pair[0].name, pair[1].name)
            time.sleep(NOTICE)
            self.renew(pair[1])

    def waver(self, event: Event) -> None:
        """A host is silent for about as long as others have patience: some give it up, and some do not."""
        node = self.victim(event.dice[0])
        if node is None:
            return
        for proc in self.living(node.agent):
            self.harmed.add(proc)
        self.harmed.add(node.agent)
        self.connections.silence(node.name)
        time.sleep((0.6 + event.dice[1]) * HEARTBEAT)
        self.connections.mend(node.name)
        time.sleep(HEARTBEAT)  # by then every process has decided
        self.renew(node)

    def renew(self, node: Node) -> None:
        """Kill all ranks of a host: some may never be reached again by ranks that had lost them."""
        for proc, pid in self.living(node.agent).items():
            self.strike(proc, pid)

    def note_parted(self, node: Node, other: Node) -> None:
        self.parted |= {
            frozenset({one, another}) for one in self.living(node.agent) for another in self.living(other.agent)
        }

    def repair(self, _event: Event | None) -> None:
        """Whatever has been broken for long enough is mended; then it is attached to again."""
        now = time.monotonic()
        by_name = {node.name: node for node in self.nodes}
        for (one, other), until in list(self.cuts.items()):
            if now > until:
                self.note_parted(by_name[one], by_name[other])
                del self.cuts[one, other]
                self.connections.mend(one, other)
                self.renew(by_name[other])
        for node in self.nodes:
            if node.silent and now > node.until:
                node.silent = False
                self.connections.mend(node.name)
            if node.frozen and now > node.until:
                node.frozen = False
                node.signal(signal.SIGCONT)
            if not node.runs:
                node.start()
            if node.there and not self.is_attached(node):
                try:
                    self.attach([node])
                except ConnectionError as e:
                    self.report.violations.append(f"{node.name} is there, and cannot be attached to: {e}")


@contextmanager
def patience() -> Generator[None]:
    """Meanwhile hosts that are started, and this one, are patient with each other for ``HEARTBEAT``."""
    variables = (
        environment.HEARTBEAT_TIMEOUT.name,
        environment.SILENCE_TIMEOUT.name,
    )  # the wires answer in the name of hosts that they silence
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(dict.fromkeys(variables, str(HEARTBEAT)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def several_hosts(seed: int, minutes: float, hosts: int, ranks: int = 2) -> Generator[HostsChaos]:
    """A run on so many hosts and a spare one; they are left with nothing on them."""
    wires = Wires()
    try:
        with patience(), team("tcp") as members:
            assert members.key_file is not None
            wires.belongs("controller", os.getpid())
            nodes = [LocalNode(members, wires, f"host{k}") for k in range(hosts + 1)]
            yield HostsChaos(seed, minutes, nodes, wires, members.key_file, ranks)
            shutdown_context().get(DEADLINE)
            for node in nodes:
                node.worker.wait_idle()
    finally:
        wires.close()
