"""Simulate a mesh and its engine: operations are recorded in a `Ledger` instead of sent to ranks."""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from monarch_kernel.runtime.actor.meshes.tool_methods import TensorMethods
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
from monarch_kernel.runtime.tensor.simulation.ledger import Ledger, SimulatedRates, sent_in
from monarch_kernel.runtime.tensor.wire import FloatSlot, RankDevice, RankMoves, Reduction, TensorSlot

_meta: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("monarch_simulation_meta", default=())


@contextmanager
def set_meta(new_value: Any) -> Generator[None]:
    """Add a word to the names of operations on simulated meshes in this block: ``with set_meta("forward"):``."""
    token = _meta.set((*_meta.get(), new_value))
    try:
        yield
    finally:
        _meta.reset(token)


def current_meta() -> tuple[Any, ...]:
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
        self, signature: Signature, template: Any, inputs: list[torch.Tensor], out: Any, fresh: bool, onto: TensorMesh
    ) -> None:
        new = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if not fresh:
            new = [x for x in new if not any(x is i for i in inputs)]
        self.label = signature.label.removesuffix(".default").replace("::", ".")
        self.onto = onto
        self.how = next((x for x in tree_leaves(template) if isinstance(x, (Reduction, RankMoves))), None)
        is_alias: Any = torch._C._is_alias_of  # pyright: ignore[reportAttributeAccessIssue]  # torch gives no type
        self.aliases = [next((k for k, i in enumerate(inputs) if is_alias(x, i)), None) for x in new]
        self.sizes = [0 if a is not None else _bytes(x) for x, a in zip(new, self.aliases)]
        views = bool(new) and all(a is not None for a in self.aliases) and not signature.mutates
        self.moved = 0 if views else sum(map(_bytes, inputs)) + sum(self.sizes)
        self.brought = inputs[-1].numel() * inputs[-1].element_size() if inputs else 0
        self.flops = _flops(signature.label, template, inputs, out)


def _bytes(x: torch.Tensor) -> int:
    return 0 if 0 in x.size() else (1 + sum((n - 1) * s for n, s in zip(x.size(), x.stride()))) * x.element_size()


def _flops(label: str, template: Any, inputs: list[torch.Tensor], out: Any) -> int:
    if not label.startswith("aten::"):
        return 0
    packet = operation_of(label).overloadpacket
    count = flop_registry.get(packet)
    if count is None:
        return 0

    def fill(slot: Any) -> Any:
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
        operation: Any,
        template: Any,
        out: Any,
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

    def put(self, tensor: torch.Tensor, *_: Any) -> Tensor:
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
        shared: dict[str, Any] = {"tensors": self}
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

    def spawn_workers(self, stream: Stream, cls: Any) -> Any:
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

    def put(self, mesh: TensorMesh, tensor: torch.Tensor, layout: Any = None) -> int:
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

    def fetch(self, mesh: TensorMesh, obj: Any, rank: int, why: str = "fetch", compare: bool = False) -> FetchedValues:
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

    def ask_later(self, mesh: TensorMesh, function: Any, *values: Any) -> Any:
        """Refuse: there are no ranks to query.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"mesh {self.name} is simulated: there are no values and no ranks to ask about them")

    def call_and_fetch(
        self, mesh: TensorMesh, function: Callable[..., Any], args: Any, kwargs: Any, rank: int
    ) -> FetchedValues:
        """Refuse, like `ask_later`."""
        return self.ask_later(mesh, function)

    def run_and_describe(self, mesh: TensorMesh, func: Any, args: Any, kwargs: Any) -> Any:
        """Refuse: the size of the result depends on values."""
        raise TypeError(f"{func}: the size of its result depends on values, and mesh {self.name} is simulated")


class _NoWorkers:
    """Replaces the workers of a stream."""

    def _new_with_region(self, region: Region) -> _NoWorkers:
        return self


class _Known:
    """Replaces a call: an answer that is available at once."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    def get(self, timeout: float | None = None) -> dict[int, Any]:
        """Return the answers by rank."""
        return dict(enumerate(self._answers))

    def done(self) -> bool:
        """Return True."""
        return True


def _bytes_of(spec: Spec) -> int:
    return spec.size.numel() * spec.dtype.itemsize
