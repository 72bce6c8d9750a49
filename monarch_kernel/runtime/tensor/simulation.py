"""Simulate programs on meshes without processes: their computation, memory and communication, from shapes alone."""

from __future__ import annotations

import builtins
import contextvars
import copy
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from monarch_kernel.display.quantities import shown_location, text_size
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.protocol.private_files import written_whole
from monarch_kernel.runtime.actor.meshes.tool_methods import TensorMethods
from monarch_kernel.runtime.mesh.rankset import name_ranks
from monarch_kernel.runtime.mesh.shape import Extent, Region
from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
from monarch_kernel.runtime.tensor.controller.fetched_values import FetchedValues
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.signature import Plan, Signature
from monarch_kernel.runtime.tensor.controller.spec import Spec
from monarch_kernel.runtime.tensor.controller.stream import MAIN, Stream
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
from monarch_kernel.runtime.tensor.rank.program import operation_of
from monarch_kernel.runtime.tensor.wire import FloatSlot, RankDevice, RankMoves, Reduction, TensorSlot

# Record the computation, memory and communication of simulated ranks, without tensors and processes: `Ledger`.
#
# Ranks of the same meshes behave the same. They form one `RankClass`, and 4,096 of them cost as much as one. A class
# is split when a mesh appears that has only some of its ranks.

# The speed of ranks for the time estimates of a simulation: `SimulatedRates`.


@dataclass(frozen=True, slots=True)
class SimulatedRates:
    """Rates of one rank. The defaults are approximate data sheet values (H100, NVLink, 400 Gbit/s). Set measured ones.

    Attributes:
        flops: floating-point operations per second, of matrix products, convolutions and attention.
        memory: bytes per second that an operation reads and writes.
        link: bytes per second that a rank sends within its host; `network`: to other hosts.
        launch: the minimum duration of an operation (seconds).
        latency: the minimum duration of each step of a collective (seconds).
    """

    flops: float = 400e12
    memory: float = 3e12
    link: float = 300e9
    network: float = 40e9
    launch: float = 5e-6
    latency: float = 10e-6

    def operation(self, flops: int, moved: int) -> float:
        """Return the duration of an operation on one rank (seconds).

        Args:
            moved: the bytes that it reads and writes.
        """
        return max(self.launch, flops / self.flops, moved / self.memory)

    def transfer(self, sent: float, steps: int, within_host: bool) -> float:
        """Return the duration of an exchange in which a rank sends this many bytes in this many steps (seconds)."""
        return self.latency * steps + sent / (self.link if within_host else self.network)


def sent_in(how: Reduction, size: int) -> tuple[str, float, int]:
    """Return the data that a rank sends in a collective over `size` bytes: the bytes of a ring, in the steps of a tree.

    Returns:
        The usual name of the collective, the bytes that each rank sends, and the number of steps.
    """
    count = len(how.groups[0])
    if count == 1:
        return "nothing", 0.0, 0
    others, steps = count - 1, (count - 1).bit_length()
    if how.kind == "stack":
        if how.scatter:
            return "all-to-all", size * others / count, steps
        return ("gather", float(size), steps) if how.roots is not None else ("all-gather", float(size * others), steps)
    if how.scatter:
        return "reduce-scatter", size * others / count, steps
    if how.roots is not None:
        return "reduce", float(size), steps
    return "all-reduce", 2 * size * others / count, 2 * steps


Line = tuple[str, int, str]


class SimulatedEvent(NamedTuple):
    """An operation of a class of ranks.

    Attributes:
        name: the name of the operation, with the words of `set_meta`.
        stream: the stream of the operation.
        start, duration: its start and duration (seconds).
        line: the line of the program.
        size: the bytes that it sent, or the bytes of its results.
        communicates: whether ranks communicated.
    """

    name: str
    stream: str
    start: float
    duration: float
    line: Line
    size: int
    communicates: bool


class MemoryLevel(NamedTuple):
    """The memory of a rank (bytes) from a point in time (seconds)."""

    time: float
    size: int


@dataclass
class RankClass:
    """Ranks that behave the same.

    Attributes:
        ranks: the ranks.
        clocks: the end of each stream's last operation (seconds).
        current, peak: the current and peak memory of a rank (bytes).
        peak_line: the line of the program that caused the peak.
        operations, flops: the numbers of operations and floating-point operations of a rank.
        sent: the bytes that a rank has sent, by kind of exchange.
        busy, communicating: the time of operations on the rank, and of exchanges (seconds).
        events, levels: in chronological order.
    """

    ranks: frozenset[int]
    clocks: dict[str, float] = field(default_factory=dict[str, float])
    current: int = 0
    peak: int = 0
    peak_line: Line = ("?", 0, "?")
    operations: int = 0
    flops: int = 0
    sent: Counter[str] = field(default_factory=Counter[str])
    busy: float = 0.0
    communicating: float = 0.0
    events: list[SimulatedEvent] = field(default_factory=list[SimulatedEvent])
    levels: list[MemoryLevel] = field(default_factory=list[MemoryLevel])

    @property
    def time(self) -> float:
        """The end of the last operation of all its streams (seconds)."""
        return max(self.clocks.values(), default=0.0)

    def part(self, ranks: frozenset[int]) -> RankClass:
        """Copy the class for some of its ranks."""
        made = copy.copy(self)
        made.ranks = ranks
        made.clocks, made.sent = dict(self.clocks), Counter(self.sent)
        made.events, made.levels = list(self.events), list(self.levels)
        return made


class Ledger:
    """The classes of all ranks, and the storages that they keep.

    Attributes:
        classes: the classes of all ranks.
        lines: for each line of the program, how many operations it issued and how many bytes a rank sent for it.
    """

    def __init__(self, ranks: int) -> None:
        self.classes = [RankClass(frozenset(range(ranks)))]
        self.lines: dict[Line, Counter[str]] = {}
        self._of: dict[frozenset[int], list[RankClass]] = {}
        #: Storages: size, ranks, and the number of values that refer to them.
        self._storages: dict[int, tuple[int, frozenset[int], int]] = {}

    def of(self, ranks: frozenset[int]) -> list[RankClass]:
        """Return the classes that make up these ranks. Classes are split if necessary."""
        found = self._of.get(ranks)
        if found is None:
            for each in list(self.classes):
                inside = each.ranks & ranks
                if inside and inside != each.ranks:
                    self.classes.remove(each)
                    self.classes += [each.part(inside), each.part(each.ranks - inside)]
                    self._of.clear()
            found = self._of[ranks] = [each for each in self.classes if each.ranks <= ranks]
        return found

    def run(
        self, ranks: frozenset[int], stream: str, name: str, line: Line, seconds: float, flops: int, size: int
    ) -> None:
        """Record an operation that each rank runs independently."""
        self._count(line, "operations", 1)
        for each in self.of(ranks):
            start = each.clocks.get(stream, 0.0)
            each.clocks[stream] = start + seconds
            each.operations += 1
            each.flops += flops
            each.busy += seconds
            each.events.append(SimulatedEvent(name, stream, start, seconds, line, size, False))

    def exchange(
        self,
        ranks: frozenset[int],
        stream: str,
        kind: str,
        name: str,
        line: Line,
        seconds: float,
        sent: float,
        senders: frozenset[int] | None = None,
    ) -> None:
        """Record an exchange between ranks. It begins when the last rank has reached it.

        Args:
            sent: the bytes that each sender sends.
            senders: the ranks that send; None: all ranks.
        """
        if senders is not None:
            self.of(senders)  # so that all ranks of a class send, or none
        met = self.of(ranks)
        start = max((each.clocks.get(stream, 0.0) for each in met), default=0.0)
        self._count(line, "operations", 1)
        self._count(line, "sent", round(sent))
        for each in met:
            sends = senders is None or each.ranks <= senders
            each.clocks[stream] = start + seconds
            each.operations += 1
            each.communicating += seconds
            if sends and sent:
                each.sent[kind] += round(sent)
            event = SimulatedEvent(name, stream, start, seconds, line, round(sent) if sends else 0, True)
            each.events.append(event)

    def wait(self, ranks: frozenset[int], stream: str, other: str) -> None:
        """Make a stream wait until another stream of the same ranks has reached its current position."""
        for each in self.of(ranks):
            each.clocks[stream] = max(each.clocks.get(stream, 0.0), each.clocks.get(other, 0.0))

    # -- memory -------------------------------------------------------------------------------------

    def keep(self, storage: int, size: int, ranks: frozenset[int], line: Line) -> None:
        """Record a new storage on ranks, to which one value refers."""
        self._storages[storage] = (size, ranks, 1)
        self._change(ranks, size, line)

    def refer(self, storage: int) -> None:
        """Add a reference to a storage."""
        size, ranks, count = self._storages[storage]
        self._storages[storage] = (size, ranks, count + 1)

    def drop(self, storage: int) -> None:
        """Remove a reference to a storage. Without references, the storage is freed."""
        size, ranks, count = self._storages[storage]
        if count > 1:
            self._storages[storage] = (size, ranks, count - 1)
            return
        del self._storages[storage]
        self._change(ranks, -size, ("?", 0, "?"))

    def _change(self, ranks: frozenset[int], size: int, line: Line) -> None:
        if not size:
            return
        for each in self.of(ranks):
            each.current += size
            each.levels.append(MemoryLevel(each.time, each.current))
            if each.current > each.peak:
                each.peak, each.peak_line = each.current, line

    # -- iterations ---------------------------------------------------------------------------------

    def begin_again(self) -> None:
        """Reset operations, exchanges and peaks. The memory of ranks stays."""
        self.lines.clear()
        for each in self.classes:
            each.peak, each.operations, each.flops = each.current, 0, 0
            each.busy = each.communicating = 0.0
            each.sent.clear()
            each.events.clear()
            each.levels.clear()
            each.clocks = dict.fromkeys(each.clocks, 0.0)

    def _count(self, line: Line, what: str, count: int) -> None:
        self.lines.setdefault(line, Counter())[what] += count


# Simulate a mesh and its engine: operations are recorded in a `Ledger` instead of sent to ranks.

_meta: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("monarch_simulation_meta", default=())


@contextmanager
def set_meta(new_value: object) -> Generator[None]:
    """Add a word to the names of operations on simulated meshes in this block: ``with set_meta("forward"):``."""
    token = _meta.set((*_meta.get(), new_value))
    try:
        yield
    finally:
        _meta.reset(token)


def current_meta() -> tuple[object, ...]:
    """Return the words of the open blocks, outermost first."""
    return _meta.get()


_names = itertools.count()


class SimulatedMesh(TensorMethods):
    """A mesh of simulated ranks. ``with mesh.activate():`` works as usual, and its slices are simulated meshes too.

    Tensors have shapes but no values: reads return zeros.
    """

    def __init__(self, name: str, region: Region, shared: dict[str, Any]) -> None:
        self.name = name
        self._simulated_region = region
        self._shared = shared
        self._stopped = False

    @property
    def _region(self) -> Region:  # pyright: ignore[reportIncompatibleVariableOverride]  # as other meshes have it
        return self._simulated_region

    def _new_with_region(self, region: Region) -> SimulatedMesh:
        return SimulatedMesh(self.name, region, self._shared)

    def exit(self) -> None:
        """End the simulation: write its trace to the simulator's path."""
        self._shared["exit"]()

    def __repr__(self) -> str:
        shape = ", ".join(f"{label}={size}" for label, size in zip(self.extent.names, self.extent.shape))
        return f"<SimulatedMesh {self.name} ({shape})>"


class _Facts:
    """The costs of a definition, determined once from fake tensors.

    Attributes:
        aliases: for each new result the input whose memory it shares, or None.
        sizes: the bytes of each new result.
        moved: the bytes that it reads and writes; `brought`: the bytes of its last input, which a collective sends.
        how: the collective, if there is one.
        onto: the mesh of its results.
    """

    __slots__ = ("aliases", "brought", "flops", "how", "label", "moved", "onto", "sizes")

    def __init__(
        self,
        signature: Signature,
        template: object,
        inputs: list[torch.Tensor],
        out: object,
        fresh: bool,
        onto: TensorMesh,
    ) -> None:
        new = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if not fresh:
            new = [x for x in new if not any(x is i for i in inputs)]
        self.label = signature.label.removesuffix(".default").replace("::", ".")
        self.onto = onto
        self.how = next((x for x in tree_leaves(template) if isinstance(x, (Reduction, RankMoves))), None)
        is_alias = torch._C._is_alias_of  # pyright: ignore[reportAttributeAccessIssue]  # torch gives no type
        self.aliases = [next((k for k, i in enumerate(inputs) if is_alias(x, i)), None) for x in new]
        self.sizes = [0 if a is not None else _bytes(x) for x, a in zip(new, self.aliases)]
        views = bool(new) and all(a is not None for a in self.aliases) and not signature.mutates
        self.moved = 0 if views else sum(map(_bytes, inputs)) + sum(self.sizes)
        self.brought = inputs[-1].numel() * inputs[-1].element_size() if inputs else 0
        self.flops = _flops(signature.label, template, inputs, out)


def _bytes(x: torch.Tensor) -> int:
    return 0 if 0 in x.size() else (1 + sum((n - 1) * s for n, s in zip(x.size(), x.stride()))) * x.element_size()


def _flops(label: str, template: object, inputs: list[torch.Tensor], out: object) -> int:
    if not label.startswith("aten::"):
        return 0
    packet = operation_of(label).overloadpacket
    count = flop_registry.get(packet)
    if count is None:
        return 0

    def fill(slot: object) -> object:
        if type(slot) is TensorSlot:
            return inputs[slot.index]
        return 0.0 if type(slot) is FloatSlot else torch.device("cpu") if type(slot) is RankDevice else slot

    args, kwargs = tree_map(fill, template)
    return int(count(*args, **kwargs, out_val=out))


class SimulatedTarget(TensorMesh):
    """A region of simulated ranks and a stream."""

    engine: SimulatedEngine

    def make_signature(
        self,
        label: str,
        operation: object,
        template: object,
        out: object,
        inputs: list[torch.Tensor],
        mutates: tuple[int, ...] = (),
        *,
        meets: bool = False,
        fresh: bool = False,
        onto: TensorMesh | None = None,
    ) -> Signature:
        """Create the signature and record its costs."""
        signature = super().make_signature(
            label, operation, template, out, inputs, mutates, meets=meets, fresh=fresh, onto=onto
        )
        if signature.number > 0:
            there = self if onto is None else onto
            self.engine.facts[signature.number] = _Facts(signature, template, inputs, out, fresh, there)
        return signature

    def put(self, tensor: torch.Tensor, *_: object) -> Tensor:
        """Return a handle of a copy of a local tensor on every rank."""
        handle = super().put(tensor)
        self.engine.keep_put(self, handle)
        return handle


class SimulatedEngine(TensorEngine):
    """An engine whose ranks are simulated in a ledger.

    Attributes:
        ledger: the record of the ranks.
        facts: the costs of each definition.
        shared: the shared state of its meshes.
    """

    replays = False  # nothing is sent, so replays have no benefit

    def __init__(self, shape: dict[str, int], rates: SimulatedRates, hosts: int) -> None:
        # Replaces the base class's, which has processes.
        count = 1
        for size in shape.values():
            count *= size
        shared: dict[str, object] = {"tensors": self}
        region = Region.from_extent(Extent(tuple(shape), tuple(shape.values())))
        self.name = f"simulated-{next(_names)}"
        self.shared = shared
        self.mesh = SimulatedMesh(self.name, region, shared)
        self.world: Any = SimulatedMesh(self.name, Region.from_extent(Extent(("ranks",), (count,))), shared)
        self.ledger = Ledger(count)
        self.rates = rates
        self.facts: dict[int, _Facts] = {}
        self._per_host = count // hosts
        self._storage_of: dict[int, int] = {}
        self._regions: dict[TensorMesh, frozenset[int]] = {}
        self._key = self.name
        self.lock = threading.RLock()
        self.fake = FakeTensorMode()
        self._strict = self.eager = False
        self.plan = Plan()
        self.meshes = {}
        self.extras = {}
        self.definitions = []
        self.target = None
        self.ints, self.floats, self.pending = [], [], 0
        self.next_value = 1
        self.record = self.sent = self.failures = self.replacements = 0
        self.places = {}
        self._closed = False
        self.groups: Any = SimpleNamespace(need=lambda *_: None, ensure=lambda: None)
        self.on_replaced = []
        self.lost = set()

    def mesh_of(self, procs: Any, stream: Stream = MAIN, kind: type[TensorMesh] | None = None) -> TensorMesh:
        """Return the target for operations on a part of the simulated ranks.

        Raises:
            TypeError: a sharded mesh is requested.
        """
        if kind is not None:
            raise TypeError(
                f"mesh {self.name} is simulated, which has no sharded tensors: write the step with "
                "reduce() and to_mesh()"
            )
        key = (procs._region, stream, False)
        mesh = self.meshes.get(key)
        if mesh is None:
            mesh = self.meshes[key] = SimulatedTarget(self, procs, stream, False)
            self._regions[mesh] = frozenset(mesh.ranks)
        return mesh

    def spawn_workers(self, stream: Stream, cls: object) -> object:
        """Return no workers."""
        return _NoWorkers()

    # -- records ------------------------------------------------------------------------------------

    def awaken(self) -> None:
        """Record the operation of the pending record instead of sending it. The caller holds the lock."""
        record, self.ints, self.pending = self.ints, [], 0
        place = self.places.pop(self.record - 1)
        if self.recording is not None:
            self.recording.stop("it runs on a simulated mesh")
        self.floats.clear()
        self.collect()
        mesh = self.target
        assert mesh is not None
        facts = self.facts[record[0]]
        line = frames.innermost(place)
        name = " ".join([facts.label, *map(str, current_meta())])
        if isinstance(facts.how, Reduction):
            kind, sent, steps = sent_in(facts.how, facts.brought)
            within = len({rank // self._per_host for rank in facts.how.groups[0]}) == 1
            ranks = self._regions[mesh]
            self.ledger.exchange(
                ranks, mesh.stream.name, kind, f"{kind} {name}", line, self.rates.transfer(sent, steps, within), sent
            )
        elif isinstance(facts.how, RankMoves):
            self._move(mesh, facts.how, name, line)
        else:
            seconds = self.rates.operation(facts.flops, facts.moved) if facts.moved or facts.flops else 0.0
            ranks = self._regions[mesh]
            self.ledger.run(ranks, mesh.stream.name, name, line, seconds, facts.flops, sum(facts.sizes))
        outs = record[len(record) - len(facts.sizes) :]
        there = self._regions[facts.onto]
        for number, size, alias in zip(outs, facts.sizes, facts.aliases):
            source = self._storage_of.get(record[1 + alias]) if alias is not None else None
            if source is None:
                self._storage_of[number] = number
                self.ledger.keep(number, size, there, line)
            else:
                self._storage_of[number] = source
                self.ledger.refer(source)

    def _move(self, mesh: TensorMesh, how: RankMoves, name: str, line: Any) -> None:
        away = [(sender, receiver) for sender, receiver in how.routes if sender != receiver]
        size = torch.Size(how.size).numel() * how.dtype.itemsize
        copies = max((sum(s == sender for s, _ in away) for sender in {s for s, _ in away}), default=0)
        within = all(s // self._per_host == r // self._per_host for s, r in away)
        seconds = self.rates.transfer(size * copies, copies, within) if away else self.rates.operation(0, 2 * size)
        self.ledger.exchange(
            frozenset(how.ranks),
            mesh.stream.name,
            "send",
            f"to_mesh {name}",
            line,
            seconds,
            size * copies,
            frozenset(s for s, _ in away),
        )

    def collect(self) -> None:
        """Delete the values whose last handles were deleted."""
        for mesh in self.meshes.values():
            while mesh.dead:
                storage = self._storage_of.pop(mesh.dead.pop(), None)
                if storage is not None:
                    self.ledger.drop(storage)

    def turn_to(self, mesh: TensorMesh) -> None:
        """Direct the next operations to this target."""
        self.target = mesh

    def flush(self) -> None:
        """Do nothing: no record is pending."""
        self.ints.clear()

    def order(self, before: TensorMesh, after: TensorMesh) -> None:
        """Order two streams: later operations of `after` run when all earlier operations of `before` have run."""
        self.ledger.wait(self._regions[after], after.stream.name, before.stream.name)

    def look_out(self, mesh: TensorMesh) -> None:
        """Do nothing: simulated ranks do not die."""

    # -- data ---------------------------------------------------------------------------------------

    def put(self, mesh: TensorMesh, tensor: torch.Tensor, layout: object = None) -> int:
        """Assign a number to a value that is sent to all ranks."""
        number = self.next_value
        self.next_value = number + 1
        self.plan.line().sent += tensor.numel() * tensor.element_size()
        return number

    def keep_put(self, mesh: TensorMesh, handle: Tensor) -> None:
        """Record the memory of a value that was sent to the ranks."""
        number = handle._owner.id
        if number not in self._storage_of:
            self._storage_of[number] = number
            self.ledger.keep(number, _bytes_of(handle._spec), self._regions[mesh], frames.here())

    def fetch(
        self, mesh: TensorMesh, obj: object, rank: int, why: str = "fetch", compare: bool = False
    ) -> FetchedValues:
        """Return zeros of the shapes of all handles in `obj`, and count the wait."""
        flat, tree = tree_flatten(obj)
        positions = [i for i, x in enumerate(flat) if type(x) is Tensor]
        values = [torch.zeros(flat[i].shape, dtype=flat[i].dtype, device="cpu") for i in positions] if positions else []
        return FetchedValues(self, mesh, _Known([values] * (rank + 1)), flat, tree, positions, rank, why)

    def answer(self, mesh: TensorMesh, call: Any, timeout: float | None = None) -> Any:
        """Return the answer, which is available at once."""
        return call.get(timeout)

    def check(self, mesh: TensorMesh) -> None:
        """Do nothing: simulated operations do not fail."""

    def ask_later(self, mesh: TensorMesh, function: object, *values: object) -> Any:
        """Refuse: there are no ranks to query.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"mesh {self.name} is simulated: there are no values and no ranks to ask about them")

    def call_and_fetch(
        self, mesh: TensorMesh, function: Callable[..., object], args: object, kwargs: object, rank: int
    ) -> FetchedValues:
        """Refuse, like `ask_later`."""
        return self.ask_later(mesh, function)

    def run_and_describe(self, mesh: TensorMesh, func: object, args: object, kwargs: object) -> object:
        """Refuse: the size of the result depends on values."""
        raise TypeError(f"{func}: the size of its result depends on values, and mesh {self.name} is simulated")


class _NoWorkers:
    """Replaces the workers of a stream."""

    def _new_with_region(self, region: Region) -> _NoWorkers:
        return self


class _Known:
    """Replaces a call: an answer that is available at once."""

    def __init__(self, answers: list[object]) -> None:
        self._answers = answers

    def get(self, timeout: float | None = None) -> dict[int, Any]:
        """Return the answers by rank."""
        return dict(enumerate(self._answers))

    def done(self) -> bool:
        """Return True."""
        return True


def _bytes_of(spec: Spec) -> int:
    return spec.size.numel() * spec.dtype.itemsize


# A mesh of any size without processes, with the computation, memory and communication of a program: ``Simulator``.

# Report the computation, memory and communication of each simulated rank: `SimulationReport`.

#: The number of lines of the program that are shown.
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class SimulatedRanks:
    """Ranks that behave the same. All figures are for one of them.

    Attributes:
        ranks: the ranks.
        operations, flops: the numbers of operations and floating-point operations.
        seconds: the duration; `busy` is the part in operations, `communicating` the part in exchanges with other ranks.
        peak, kept: the maximum and final memory (bytes).
        peak_line: the line of the program that caused the peak: file, line, function.
        sent: the bytes that it sends, by kind of exchange.
    """

    ranks: tuple[int, ...]
    operations: int
    flops: int
    seconds: float
    busy: float
    communicating: float
    peak: int
    kept: int
    peak_line: Line
    sent: Mapping[str, int]


class SimulationReport(AsTable):
    """The results of a simulation, by ranks that behave the same, and by lines of the program.

    Attributes:
        groups: the groups of ranks.
        lines: for each line that caused exchanges, the bytes that a rank sent for it.
    """

    __slots__ = ("groups", "lines")

    def __init__(self, groups: Sequence[SimulatedRanks], lines: Mapping[Line, int]) -> None:
        self.groups = tuple(groups)
        self.lines = dict(lines)

    @classmethod
    def of(cls, ledger: Ledger) -> SimulationReport:
        """Create the report of a ledger."""
        groups = [
            SimulatedRanks(
                tuple(sorted(each.ranks)),
                each.operations,
                each.flops,
                each.time,
                each.busy,
                each.communicating,
                each.peak,
                each.current,
                each.peak_line,
                dict(each.sent),
            )
            for each in sorted(ledger.classes, key=lambda each: min(each.ranks))
        ]
        lines = {line: counts["sent"] for line, counts in ledger.lines.items() if counts["sent"]}
        return cls(groups, dict(sorted(lines.items(), key=lambda item: -item[1])))

    @property
    def seconds(self) -> float:
        """The duration of the slowest rank (seconds)."""
        return max(each.seconds for each in self.groups)

    @property
    def peak(self) -> int:
        """The maximum memory of a rank (bytes)."""
        return max(each.peak for each in self.groups)

    @property
    def sent(self) -> int:
        """The bytes that all ranks send."""
        return sum(len(each.ranks) * sum(each.sent.values()) for each in self.groups)

    def table(self) -> TableView:
        """Return a table with one row for each group of ranks."""
        rows = [
            (
                name_ranks(each.ranks),
                f"{each.operations:,}",
                _counted_flops(each.flops),
                _time(each.seconds),
                _time(each.communicating),
                text_size(each.peak),
                shown_location(*each.peak_line[:2]) if each.peak_line[1] else "",
                text_size(each.kept),
                ", ".join(f"{text_size(size)} {kind}" for kind, size in sorted(each.sent.items())),
            )
            for each in self.groups
        ]
        headings = ("each of", "operations", "flops", "takes", "exchanges", "peak", "at", "kept", "sends")
        count = sum(len(each.ranks) for each in self.groups)
        caption = (
            f"{count:,} simulated ranks: {_time(self.seconds)} estimated, up to {text_size(self.peak)} on a rank, "
            f"{text_size(self.sent)} sent by all"
        )
        shown = [f"{shown_location(*line[:2])} {text_size(size)}" for line, size in list(self.lines.items())[:_SHOWN]]
        note = f"Sent by a rank, by line: {', '.join(shown)}" if shown else ""
        return TableView(headings, rows, caption, frozenset({1, 2, 3, 4, 5, 7}), note).without_empty_columns()


def _counted_flops(count: int) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}" if count else ""


def _time(seconds: float) -> str:
    if not seconds:
        return ""
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} µs"
    )


class SimulatorInterface:
    """A simulated mesh and the results of a program on it. Created by `Simulator`."""

    def __init__(self, engine: SimulatedEngine, trace_path: str, group_workers: bool) -> None:
        self._engine = engine
        self._trace_path = trace_path
        self._group_workers = group_workers
        engine.shared["exit"] = self.write_trace

    @property
    def mesh(self) -> SimulatedMesh:
        """The simulated mesh."""
        return self._engine.mesh

    def report(self) -> SimulationReport:
        """Report the computation, memory and communication of each rank, since the beginning or the last `step`."""
        with self._engine.lock:
            self._engine.collect()
            return SimulationReport.of(self._engine.ledger)

    def step(self) -> tuple[float, float]:
        """End an iteration.

        Return its time (seconds) and the peak memory of a rank (MB). The next iteration begins at 0.
        """
        with self._engine.lock:
            report = self.report()
            self._engine.ledger.begin_again()
            return report.seconds, report.peak / 1e6

    def write_trace(self, path: str | None = None) -> str:
        """Write the timeline since the beginning or the last `step`, for ui.perfetto.dev. Return its path."""
        with self._engine.lock:
            self._engine.collect()
            path = self._trace_path if path is None else path
            write_trace(path, self._engine.ledger, self._group_workers)
            return path

    def display(self) -> None:
        """Show the report, as a table in a notebook or as text elsewhere."""
        getattr(builtins, "display", print)(self.report())


def Simulator(  # noqa: N802  # Monarch's name
    hosts: int,
    gpus: int,
    *,
    simulate_mode: object = "simulate",
    trace_mode: object = "stream_only",
    upload_trace: bool = False,
    trace_path: str = "trace.json",
    command_history_path: str | None = None,
    group_workers: bool = True,
    build_ir: bool = False,
    rates: SimulatedRates | None = None,
) -> SimulatorInterface:
    """Create a mesh of ``hosts * gpus`` ranks without processes, with dimensions ``host`` and ``gpu``.

    ```python
    sim = Simulator(hosts=32, gpus=8)
    with sim.mesh.activate():
        train_step()
    sim.report()          # memory, communication and estimated time of each rank
    sim.write_trace()     # for ui.perfetto.dev
    ```

    A program runs on it with shapes alone, including autograd, modules, optimizers, `reduce`, `to_mesh` and streams.
    Reads of values return zeros.

    Args:
        hosts, gpus: the number of hosts, and of ranks on each.
        trace_path: the path for `SimulatorInterface.write_trace` and ``mesh.exit()``.
        group_workers: show ranks that behave the same once in the trace.
        rates: the speed of ranks, for time estimates.
        simulate_mode, trace_mode: accepted as in Monarch: all modes simulate, and trace the streams of the ranks.

    Raises:
        ValueError: the number of ranks is invalid, or an option exists only in Monarch (`upload_trace`,
            `command_history_path`, `build_ir`).
    """
    for name, size in (("hosts", hosts), ("gpus", gpus)):
        if size < 1:
            raise ValueError(f"Simulator({name}={size}): at least 1")
    for name, given in (
        ("upload_trace", upload_trace),
        ("command_history_path", command_history_path),
        ("build_ir", build_ir),
    ):
        if given:
            raise ValueError(f"Simulator({name}={given!r}): there is no such thing here: leave it away")
    engine = SimulatedEngine({"host": hosts, "gpu": gpus}, rates or SimulatedRates(), hosts)
    return SimulatorInterface(engine, trace_path, group_workers)


def write_trace(path: str, ledger: Ledger, group_workers: bool) -> None:
    """Write the operations and the memory of each rank to a file.

    Args:
        group_workers: show ranks that behave the same once.
    """
    with written_whole(path, None) as file:
        file.write(b'{"displayTimeUnit": "ns", "traceEvents": [')
        separator = "\n"
        for event in _events(ledger, group_workers):
            file.write(f"{separator}{json.dumps(event)}".encode())
            separator = ",\n"
        file.write(b"\n]}\n")


def _events(ledger: Ledger, group_workers: bool) -> Iterator[dict[str, object]]:
    shown: list[tuple[int, str, RankClass]] = []
    for each in ledger.classes:
        if group_workers:
            shown.append((min(each.ranks), name_ranks(sorted(each.ranks)), each))
        else:
            shown += [(rank, f"rank {rank}", each) for rank in each.ranks]
    for rank, name, each in sorted(shown, key=lambda item: item[0]):
        pid = rank + 1
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
        threads: dict[str, int] = {}
        for event in each.events:
            tid = threads.get(event.stream)
            if tid is None:
                tid = threads[event.stream] = len(threads) + 1
                name = f"stream {event.stream}"
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": event.name,
                "cat": "communication" if event.communicates else "compute",
                "ts": event.start * 1e6,
                "dur": event.duration * 1e6,
                "args": {"line": "{}:{} in {}".format(*event.line), "bytes": event.size},
            }
        for level in each.levels:
            yield {"ph": "C", "pid": pid, "name": "memory", "ts": level.time * 1e6, "args": {"bytes": level.size}}
