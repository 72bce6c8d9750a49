"""Send the host agent's reports to watching controllers: on its processes, the host, and the activity of its ranks.

Nothing is measured without a lease. Reports of ranks are forwarded immediately, unless a report was sent a moment ago.
Processes are measured every second, and reported after a visible change.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from monarch_kernel.protocol.messages import Death
from monarch_kernel.protocol.observation import (
    GpuFigures,
    HostFigures,
    Observe,
    Observed,
    ObserveRank,
    ProcFigures,
    RankActivity,
)
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.host.devices import nvidia_gpus
from monarch_kernel.runtime.host.procs import Proc, cpu_and_memory
from monarch_kernel.runtime.node.interfaces import PeerLink
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.node.poller import Poller

if TYPE_CHECKING:
    from types import ModuleType

# Read the GPUs of a host through NVML if ``nvidia-ml-py`` is installed, on a thread, while a controller watches.
#
# The driver may block for seconds if a GPU has failed, which must not block the agent.

log = logging.getLogger(__name__)

#: The interval between readings (seconds).
PERIOD = 1.0
#: The time limit for a single reading (seconds).
PATIENCE = 1.0


class GpuReader:
    """Reads GPUs between ``begin`` and ``end``.

    Attributes:
        gpus: the GPUs of the host, as last read.
        memory: the memory used by processes, by pid and the number of the GPU (bytes).
    """

    def __init__(self) -> None:
        self.gpus: list[GpuFigures] = []
        self.memory: dict[int, dict[int, int]] = {}
        self._ended: threading.Event | None = None
        self._missing = False

    def begin(self) -> None:
        """Start reading. No effect if it is already active, or NVML is missing."""
        if self._ended is None and not self._missing:
            self._ended = threading.Event()
            threading.Thread(target=self._run, args=(self._ended,), name="monarch-gpus", daemon=True).start()

    def end(self) -> None:
        """Stop reading."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None
        self.gpus, self.memory = [], {}

    def ask(self, poller: Poller, answer: Callable[[list[GpuFigures], dict[int, dict[int, int]]], None]) -> None:
        """Read once, and call `answer` with `gpus` and `memory` on the poller's thread; immediately if there is no GPU.

        If the driver does not answer in time, both are empty.
        """
        if self._missing or not nvidia_gpus():
            answer([], {})
            return
        if self.gpus:
            answer(self.gpus, self.memory)
            return
        waiting = [answer]

        def give(gpus: list[GpuFigures], memory: dict[int, dict[int, int]]) -> None:
            if waiting:
                waiting.pop()(gpus, memory)

        def read() -> None:
            found = read_gpus_once()
            poller.call_later(0.0, lambda: give(*found))

        threading.Thread(target=read, name="monarch-gpus", daemon=True).start()
        poller.call_later(PATIENCE, lambda: give([], {}))

    def _run(self, ended: threading.Event) -> None:
        try:
            nvml = import_module("pynvml")
            nvml.nvmlInit()
        except Exception as e:  # not installed, or no driver here
            log.info("no figures of GPUs: %s", e)
            self._missing = True
            return
        try:
            while not ended.is_set():
                gpus, memory = read_gpus(nvml)
                if not ended.is_set():
                    self.gpus, self.memory = gpus, memory
                ended.wait(PERIOD)
        finally:
            nvml.nvmlShutdown()


def read_gpus_once() -> tuple[list[GpuFigures], dict[int, dict[int, int]]]:
    """Open NVML and return the result of `read_gpus`; empty without NVML or a driver."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception as e:
        log.info("no figures of GPUs: %s", e)
        return [], {}
    try:
        return read_gpus(nvml)
    finally:
        nvml.nvmlShutdown()


def read_gpus(nvml: ModuleType) -> tuple[list[GpuFigures], dict[int, dict[int, int]]]:
    """Return all GPUs, and the memory of processes on them. Values that a failed GPU does not report are 0.

    Args:
        nvml: the module ``pynvml``, initialized.
    """
    gpus: list[GpuFigures] = []
    memory: dict[int, dict[int, int]] = {}
    for index in range(nvml.nvmlDeviceGetCount()):

        def asked(what: Callable[[Any], Any], index: int = index) -> Any:
            try:
                return what(nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError:
                return None

        name = asked(nvml.nvmlDeviceGetName) or ""
        use, held = asked(nvml.nvmlDeviceGetUtilizationRates), asked(nvml.nvmlDeviceGetMemoryInfo)
        gpus.append(
            GpuFigures(
                index,
                name.decode() if isinstance(name, bytes) else name,
                float(use.gpu) if use is not None else 0.0,
                held.used if held is not None else 0,
                held.total if held is not None else 0,
            )
        )
        for process in asked(nvml.nvmlDeviceGetComputeRunningProcesses) or ():
            memory.setdefault(process.pid, {})[index] = process.usedGpuMemory or 0
    return gpus, memory


#: The interval of measurements of processes and the host (seconds).
MEASURE = 1.0
#: Smaller changes are not reported: of a processor (percent), and of memory (as a fraction).
CPU_STEP = 2.0
MEMORY_STEP = 0.01
#: Reports are collected for this fraction of the period, so that reports of many ranks are sent together.
GATHER = 0.25


class _Lease:
    """A watching controller, and the state that it has received."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.until = 0.0
        self.length = 0.0  # as last requested
        self.period = 0.0
        self.procs: dict[str, ProcFigures] = {}
        self.host: HostFigures | None = None
        self.activity: dict[str, RankActivity] = {}  # not sent yet
        self.sent = 0.0
        self.due = False  # a report is about to be sent
        self.number = 0  # of the last request to report everything


class HostObserver:
    """Answers ``Observe`` messages.

    Args:
        node: the node of the agent.
        procs: the agent's procs, by their ids.
    """

    def __init__(self, node: Node, procs: dict[str, Proc]) -> None:
        self._node = node
        self._procs = procs
        self._leases: dict[str, _Lease] = {}
        #: By proc: when it was measured, its processor seconds until then, and its utilization.
        self._used: dict[str, tuple[float, float, float]] = {}
        self._busy = (0.0, 0.0)  # of the host: ticks of work, and all
        self._measuring = False
        self.gpus = GpuReader()
        node.handle(Observe, self._on_observe)
        node.handle(RankActivity, self._on_activity)
        node.on_hello.append(self._on_hello)
        node.on_peer_dead.append(self._on_peer_dead)

    # -- leases -----------------------------------------------------------------------------------

    def _on_observe(self, link: PeerLink, message: Observe, _body: Body) -> None:
        if not message.lease:
            if self._leases.pop(link.peer, None) is not None:
                self._ask_ranks(self._ranks_of(link.peer), 0.0)
            return
        lease = self._leases.get(link.peer)
        if lease is None or message.again:
            lease = self._leases[link.peer] = _Lease(link.peer)
        again = not lease.until or message.again
        lease.until = time.monotonic() + message.lease
        lease.length = message.lease
        lease.period = message.period
        lease.number = message.number or lease.number
        self._ask_ranks(self._ranks_of(link.peer), message.lease, message.period, again, lease.number)
        if again:
            self._measure([lease])
        if not self._measuring:
            self._measuring = True
            self.gpus.begin()
            self._node.poller.call_later(MEASURE, self._on_measure)

    def _ranks_of(self, controller: str) -> list[Proc]:
        """Return the living ranks that a controller sees."""
        return [
            proc for proc in self._procs.values() if proc.root == controller and proc.exit is None and not proc.tool
        ]

    def _ask_ranks(
        self, ranks: Iterable[Proc], lease: float, period: float = 0.0, again: bool = False, number: int = 0
    ) -> None:
        for proc in ranks:
            if proc.state == "alive" and proc.id in self._node.links:
                self._node.send(proc.id, ObserveRank(lease, period, again, number))

    def _on_hello(self, link: PeerLink) -> None:
        """Send requests also to a rank that starts during a lease."""
        proc = self._procs.get(link.peer)
        lease = self._leases.get(proc.root) if proc is not None and not proc.tool else None
        left = lease.until - time.monotonic() if lease is not None else 0.0
        if proc is not None and lease is not None and left > 0:
            self._node.send(proc.id, ObserveRank(left, lease.period, True, lease.number))
            self._soon(lease)

    def _on_peer_dead(self, peer: str, _death: Death) -> None:
        self._leases.pop(peer, None)
        self._used.pop(peer, None)
        for lease in self._leases.values():
            lease.procs.pop(peer, None)
            lease.activity.pop(peer, None)

    # -- reports ----------------------------------------------------------------------------------

    def _on_activity(self, link: PeerLink, message: RankActivity, _body: Body) -> None:
        proc = self._procs.get(link.peer)
        lease = self._leases.get(proc.root) if proc is not None else None
        if lease is None:
            return
        earlier = lease.activity.get(link.peer)
        lease.activity[link.peer] = message if earlier is None else earlier.joined(message)
        self._soon(lease)

    def _soon(self, lease: _Lease) -> None:
        """Send a report when its period allows it."""
        if not lease.due:
            lease.due = True
            wait = max(0.0, lease.sent + lease.period * GATHER - time.monotonic())
            self._node.poller.call_later(wait, lambda: self._report(lease))

    def _report(self, lease: _Lease) -> None:
        lease.due = False
        if self._leases.get(lease.peer) is lease:
            self._measure_new(lease)

    def _on_measure(self) -> None:
        now = time.monotonic()
        for lease in [lease for lease in self._leases.values() if lease.until <= now]:
            del self._leases[lease.peer]
            self._send(lease, None, [], True)  # a controller that was delayed sends a new request
        if not self._leases:
            self._measuring = False
            self.gpus.end()
            self._used.clear()
            return
        self._node.poller.call_later(MEASURE, self._on_measure)
        self._measure(self._leases.values())

    def _measure(self, leases: Iterable[_Lease]) -> None:
        """Measure the host and all processes, and report changes."""
        host = self._host_figures()
        for lease in leases:
            procs = [self._figures(proc) for proc in self._ranks_of(lease.peer)]
            self._send(lease, host, [f for f in procs if _differs(lease.procs.get(f.proc), f)])

    def _measure_new(self, lease: _Lease) -> None:
        """Report processes that have started since the last measurement, and the activity of ranks."""
        new = [proc for proc in self._ranks_of(lease.peer) if not _is_up(lease.procs.get(proc.id))]
        procs = [self._figures(proc) for proc in new]
        self._send(lease, None, [f for f in procs if _differs(lease.procs.get(f.proc), f)])

    def _send(self, lease: _Lease, host: HostFigures | None, procs: list[ProcFigures], empty: bool = False) -> None:
        """Report changes.

        A controller renews its lease when it receives a report, so empty reports are sent in time.
        """
        empty = empty or time.monotonic() - lease.sent > lease.length / 4
        if host is not None and not _host_differs(lease.host, host):
            host = None
        if host is None and not procs and not lease.activity and not empty:
            return
        activity, lease.activity = lease.activity, {}
        lease.procs.update((figures.proc, figures) for figures in procs)
        lease.host = host or lease.host
        lease.sent = time.monotonic()
        if lease.peer in self._node.links:
            self._node.send(lease.peer, Observed(time.time(), host, procs, activity))

    # -- measurements -----------------------------------------------------------------------------

    def _figures(self, proc: Proc) -> ProcFigures:
        rss, used = cpu_and_memory(proc.pid)
        now = time.monotonic()
        before, seconds, cpu = self._used.get(proc.id, (proc.started, 0.0, 0.0))
        if now - before >= MEASURE / 2:
            cpu = round(max(0.0, 100 * (used - seconds) / (now - before)), 1)
            self._used[proc.id] = (now, used, cpu)
        started = time.time() - (now - proc.started)
        return ProcFigures(
            proc.id, proc.pid, round(started, 3), proc.state == "alive", rss, cpu, self.gpus.memory.get(proc.pid, {})
        )

    def _host_figures(self) -> HostFigures:
        busy, total = _host_ticks()
        last_busy, last_total = self._busy
        self._busy = (busy, total)
        cpu = 100 * (busy - last_busy) / (total - last_total) if total > last_total else 0.0
        size, free = _host_memory()
        return HostFigures(os.cpu_count() or 1, round(cpu, 1), size - free, size, self.gpus.gpus)


def _is_up(figures: ProcFigures | None) -> bool:
    return figures is not None and figures.up


def _differs(old: ProcFigures | None, new: ProcFigures) -> bool:
    if old is None or (old.pid, old.up) != (new.pid, new.up) or old.gpu_memory.keys() != new.gpu_memory.keys():
        return True
    if any(abs(size - old.gpu_memory[gpu]) > MEMORY_STEP * old.gpu_memory[gpu] for gpu, size in new.gpu_memory.items()):
        return True
    return _moved(old.cpu, new.cpu, CPU_STEP) or abs(new.rss - old.rss) > MEMORY_STEP * old.rss


def _host_differs(old: HostFigures | None, new: HostFigures) -> bool:
    if old is None or len(old.gpus) != len(new.gpus):
        return True
    for before, now in zip(old.gpus, new.gpus, strict=True):
        moved = abs(now.memory_used - before.memory_used) > MEMORY_STEP * now.memory_total
        if moved or before.name != now.name or _moved(before.use, now.use, CPU_STEP):
            return True
    used = abs(new.memory_used - old.memory_used) > MEMORY_STEP * new.memory_total
    return _moved(old.cpu, new.cpu, CPU_STEP) or used


def _moved(old: float, new: float, step: float) -> bool:
    return abs(new - old) >= step or (old > 0) != (new > 0)


def _host_ticks() -> tuple[float, float]:
    """Return the host's processor ticks so far: busy ticks, and all ticks."""
    try:
        with open("/proc/stat", "rb") as file:
            ticks = [float(field) for field in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _host_memory() -> tuple[int, int]:
    """Return the host's memory, and how much of it is available (bytes)."""
    found = {b"MemTotal:": 0, b"MemAvailable:": 0}
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                name, size, *_unit = line.split()
                if name in found:
                    found[name] = int(size) * 1024
                    if all(found.values()):
                        break
    except (OSError, ValueError):
        pass
    return found[b"MemTotal:"], found[b"MemAvailable:"]
