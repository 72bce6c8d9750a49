"""Several hosts that are network namespaces (see ``tests/network``): what is sent to one that is cut off is lost."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from monarch_kernel.actor import shutdown_context
from monarch_kernel.protocol.keys import make_key_file
from tests.chaos.hosts import HostsChaos, Node, patience
from tests.chaos.load import DEADLINE
from tests.conftest import wait_until
from tests.network.cluster import PORT, Worker, ranks
from tests.network.hosts import Host, Network, make_network


class Cables:
    """The cables of a network."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def silence(self, host: str, other: str = "") -> None:
        """As ``Connections``."""
        if other:
            self._network.part(self._network[host], self._network[other])
        else:
            self._network.cut(self._network[host])

    def mend(self, host: str, other: str = "") -> None:
        """As ``Connections``."""
        if other:
            self._network.heal(self._network[host], self._network[other])
        else:
            self._network.mend(self._network[host])

    def reset(self, host: str, other: str = "") -> int:
        """Nothing on the way resets a connection."""
        raise NotImplementedError(f"a cable has no resets: {host}, {other}")


class NamespaceNode(Node):
    """A worker on a host of its own."""

    def __init__(self, host: Host, key_file: Path, folder: Path) -> None:
        super().__init__(host.name, f"tcp://{host.address}:{PORT}")
        self.host = host
        self._key_file = key_file
        self._folder = folder
        self.start()

    def start(self) -> None:
        self.worker = Worker(self.host, self._key_file, self._folder)
        self.worker.wait_until_listening()
        self._pid = self.worker.process.pid

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def runs(self) -> bool:
        return self.worker.process.running

    def signal(self, number: int) -> None:
        self.worker.process.signal(number)

    def pids(self, pids: Iterable[int]) -> list[int]:
        here: dict[int, int] = {}
        for pid in self.host.pids():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:  # it has just ended
                continue
            there = next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))
            here[int(there)] = pid
        return [here.get(pid, 0) for pid in pids]


class NamespacesChaos(HostsChaos):
    """One run on several network namespaces."""

    weights: ClassVar[dict[str, int]] = {k: v for k, v in HostsChaos.weights.items() if not k.startswith("reset")}


@contextmanager
def several_namespaces(seed: int, minutes: float, hosts: int, ranks_each: int = 2) -> Generator[NamespacesChaos]:
    """A run on so many hosts and a spare one; they are left with nothing on them.

    From here on, the calling thread and those that it starts are in the network of another host, which ends with this.

    Raises:
        CannotMakeHosts: not root, or the kernel refuses.
    """
    network = make_network(["controller", *(f"host{k}" for k in range(hosts + 1))])
    try:
        network["controller"].enter_network()
        with patience(), TemporaryDirectory(prefix="mk-chaos-") as folder:
            key_file = Path(folder) / "key"
            make_key_file(key_file)
            nodes = [NamespaceNode(host, key_file, Path(folder)) for host in network.hosts if host.name != "controller"]
            yield NamespacesChaos(seed, minutes, nodes, Cables(network), str(key_file), ranks_each)
            shutdown_context().get(DEADLINE)
            for node in nodes:
                wait_until(lambda node=node: not ranks(node.host), f"nothing is left:\n{node.host.shown()}")
    finally:
        network.close()
