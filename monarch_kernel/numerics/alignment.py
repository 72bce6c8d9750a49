"""Align the tensors of two recorded runs, whatever ranks, shards and micro-batches each of them has.

A run is a list of entries. Entries of one tensor (same step, call, phase, kind and name) on several ranks, or in
several micro-batches, are its *parts*. What the parts are to each other is known from their placements, or follows
from their shapes and hashes: replicas, shards of one tensor, parts of a batch, or terms of a sum. A `WholeTensor` has
the figures of the tensor that the parts make up, without gathering it: sums of squares and projections add, maxima do
not change.

The module only computes with figures, and does not import torch.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from monarch_kernel.numerics.recording import Entry

PHASES = ("forward", "backward", "reduction", "optimizer")
#: Kinds of tensors that belong to the model, not to the data of a rank.
STATE = frozenset(("reduced_gradient", "parameter", "update", "buffer"))
#: Kinds that are compared by themselves: their number and size depend on how a run is distributed.
_ASIDE = frozenset(("collective", "generator", "optimizer_state"))

#: How close factors between gradients must be to count as equal.
_TELLS = 1e-3

How = Literal["replicas", "shards", "split", "sum", "mean"]
Close = Callable[["Entry", "Entry"], bool]
"""Whether two entries of equal shape are replicas: equal within rounding."""


class Key(NamedTuple):
    """What identifies a tensor in a run, apart from the rank."""

    step: int
    micro: int
    call: int
    phase: str
    kind: str
    name: str
    tensor: str


class RecordedPart(NamedTuple):
    """An entry with the rank and micro-batch that it is from."""

    rank: int
    micro: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """Figures of the tensor that parts make up.

    Attributes:
        how: what the parts are to each other: equal replicas; shards with known places; parts of a tensor whose places
            are unknown (`split`); terms of a sum or a mean.
        parts: the parts, one for each distinct part of the tensor; all replicas.
        elements: the number of elements.
        norm: the Euclidean norm; None for a sum or a mean of tensors.
        maximum: the largest magnitude; None for a sum or a mean of tensors.
        projection: the projection; None if the places of the parts are unknown.
        nonfinite: the number of NaN and infinite elements.
        hash: of the bytes if one part has all elements; else "".
    """

    how: How
    parts: tuple[RecordedPart, ...]
    elements: int
    norm: float | None
    maximum: float | None
    projection: float | None
    nonfinite: int
    hash: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the parts."""
        return tuple(sorted({part.rank for part in self.parts}))


@dataclass(slots=True)
class Run:
    """A recorded run.

    Attributes:
        name: what reports call it.
        finished: whether its recording ended as planned; otherwise tensors may be missing at its end.
        parts: the parts of each tensor.
        order: the position of each tensor in program order.
        ranks: its ranks.
        aside: entries of collectives, of random generators and of states of optimizers.
    """

    name: str
    finished: bool = True
    parts: dict[Key, list[RecordedPart]] = field(default_factory=dict[Key, "list[RecordedPart]"])
    order: dict[Key, tuple[float, ...]] = field(default_factory=dict[Key, "tuple[float, ...]"])
    ranks: tuple[int, ...] = ()
    aside: list[Entry] = field(default_factory=list["Entry"])

    @classmethod
    def of(cls, entries: Iterable[Entry], name: str, finished: bool = True) -> Run:
        """Group the entries of a recording. Steps are counted from the first one recorded."""
        run = cls(name, finished)
        found = list(entries)
        first = min((each.step for each in found), default=0)
        for entry in found:
            if entry.kind in _ASIDE:
                run.aside.append(entry)
                continue
            key = Key(entry.step - first, entry.micro, entry.call, entry.phase, entry.kind, entry.name, entry.tensor)
            run.parts.setdefault(key, []).append(RecordedPart(entry.rank, entry.micro, entry))
        run.ranks = tuple(sorted({each.rank for each in found}))
        run.order = {key: _position(key, parts) for key, parts in run.parts.items()}
        return run

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with entries."""
        return tuple(sorted({key.step for key in self.parts}))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of tensors that were recorded."""
        return frozenset(key.kind for key in self.parts)

    def has_optimized(self, step: int) -> bool:
        """Return whether an optimizer has ended a step, as far as optimizers were recorded at all."""
        steps = {key.step for key in self.parts if key.phase == "optimizer"}
        return step in steps or not steps or step < self.steps[-1]

    def micros(self) -> dict[int, frozenset[int]]:
        """Return the micro-batches of each step."""
        found: defaultdict[int, set[int]] = defaultdict(set)
        for key in self.parts:
            if key.phase in PHASES[:2]:
                found[key.step].add(key.micro)
        return {step: frozenset(micros) for step, micros in found.items()}

    def with_joined_micros(self) -> Run:
        """Return the run with the micro-batches of a step as parts of one batch."""
        joined = Run(self.name, self.finished, ranks=self.ranks, aside=self.aside)
        for key, parts in self.parts.items():
            plain = key._replace(micro=0)
            joined.parts.setdefault(plain, []).extend(parts)
            joined.order[plain] = min(self.order[key], joined.order.get(plain, self.order[key]))
        return joined

    def group_sizes(self) -> set[int]:
        """Return the sizes of the world and of groups, and the numbers of micro-batches."""
        sizes = {len(self.ranks), *(len(micros) for micros in self.micros().values())}
        sizes.update(len(entry.group) for entry in self.aside if entry.kind == "collective" and entry.group)
        return {size for size in sizes if size > 1}


def _position(key: Key, parts: Sequence[RecordedPart]) -> tuple[float, ...]:
    """Return a sort key for program order.

    Within a step, forward and backward of one micro-batch follow each other, then come reductions and the optimizer.
    Forwards of a pipeline's stages follow the ranks; their backwards go the other way.
    """
    phase = PHASES.index(key.phase) if key.phase in PHASES else len(PHASES)
    rank = min(part.rank for part in parts)
    sequence = min(part.entry.sequence for part in parts if part.rank == rank)
    late = phase >= 2
    unnamed = key.name.startswith("optimizer.")  # what an optimizer has beside the model's parameters
    return key.step, late, 0 if late else key.micro, phase, unnamed, -rank if phase == 1 else rank, sequence


def merged_order(first: Run, second: Run) -> list[Key]:
    """Return the keys of both runs in program order: of the run with fewer ranks, with what only the other has."""
    base, other = (first, second) if len(first.ranks) <= len(second.ranks) else (second, first)
    position = dict(base.order)
    last: tuple[float, ...] = (-1,)
    for key in sorted(other.order, key=other.order.__getitem__):
        if key in position:
            last = position[key]
        else:  # after its predecessor in the other run, unless that belongs to an earlier phase
            own = other.order[key]
            position[key] = last = (*last, 1) if last[:5] == own[:5] else (*own[:5], -math.inf, 0)
    return sorted(position, key=position.__getitem__)


def same_layout(first: Run, second: Run) -> bool:
    """Return whether both runs have the same ranks, and each rank the same part of every tensor that both have.

    Tensors of operations do not count if there are others: in one layout, code that differs has other ones.
    """
    keys = first.parts.keys() & second.parts.keys()
    others = [key for key in keys if key.kind != "operation"]
    if len(first.ranks) == 1 and not others:
        return first.ranks == second.ranks
    return first.ranks == second.ranks and all(
        [_place(part) for part in first.parts[key]] == [_place(part) for part in second.parts[key]]
        for key in others or keys
    )


def _place(part: RecordedPart) -> tuple[object, ...]:
    placement = part.entry.placement
    return part.rank, tuple(part.entry.shape), placement and (placement.offsets, placement.partial)


def names_on_one_side(first: Run, second: Run, kinds: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names that only one run has among tensors of these kinds, without the names inside of them."""
    wanted = frozenset(kinds)
    one, two = ({key.name for key in run.parts if key.kind in wanted} for run in (first, second))
    return _outermost(one - two), _outermost(two - one)


def _outermost(names: set[str]) -> list[str]:
    return sorted(name for name in names if not any(outer in names for outer in ancestors(name)))


def ancestors(name: str) -> Iterable[str]:
    """Yield the names of the modules around a module, the innermost first; "" is the model."""
    while name:
        name = name.rpartition(".")[0]
        yield name


# -- what parts make up ------------------------------------------------------------------------------


def exact(first: Entry, second: Entry) -> bool:
    """Return whether two tensors are equal: their bytes, as far as their figures show it."""
    return (
        first.hash == second.hash
        and tuple(first.shape) == tuple(second.shape)
        and first.dtype == second.dtype
        and first.projection == second.projection
    )


def count(entry: Entry) -> int:
    """Return the number of elements of a part."""
    return math.prod(entry.shape)


def common_elements(first: Sequence[RecordedPart], second: Sequence[RecordedPart]) -> list[int]:
    """Return how many elements a tensor may have by the parts of two runs, the likeliest first."""
    other = _possible_elements(second)
    return [elements for elements in _possible_elements(first) if elements in other]


def _possible_elements(parts: Sequence[RecordedPart]) -> list[int]:
    """Return the possible numbers of elements, the likeliest first."""
    placement = parts[0].entry.placement
    if placement is not None:
        size = math.prod(placement.global_shape)
        return list(dict.fromkeys((size, size * _batches(parts))))
    sizes = [count(part.entry) for part in parts]
    alike = len(clusters(parts, exact)) == 1
    found = [sizes[0]] if len(set(sizes)) == 1 else []
    if len(parts) > 1 and sizes[0] and _splits_one_dimension(parts):
        chosen = sum(count(cluster[0].entry) for cluster in clusters(parts, exact))
        found += [sum(sizes), chosen]
        if len(set(sizes)) == 1:  # parts that are the same although they should differ, or terms with replicas
            found += [sizes[0] * times for times in range(2, len(parts)) if len(parts) % times == 0 or alike]
    return list(dict.fromkeys(found))


def whole_of(parts: Sequence[RecordedPart], elements: int, close: Close) -> WholeTensor | None:
    """Return the tensor with this number of elements that the parts make up.

    Returns:
        None if the parts make up none: each rank has a different one of that size, or some parts are missing.
    """
    placements = [part.entry.placement for part in parts]
    if placements[0] is not None and all(each is not None for each in placements):
        if elements == math.prod(placements[0].global_shape):
            return _placed(parts, elements, close)
        whole = split([cluster[0] for group in by_location(parts) for cluster in clusters(group, exact)])
        return whole if whole.elements == elements else None
    if all(count(part.entry) == elements for part in parts):
        return replicas(parts) if len(clusters(parts, close)) == 1 else None
    if not _splits_one_dimension(parts):
        return None
    if sum(count(part.entry) for part in parts) == elements:
        return split(parts)
    alike = clusters(parts, exact)
    if not _make_up(alike, elements):
        alike = clusters(parts, close)
    if _make_up(alike, elements):
        return split([cluster[0] for cluster in alike])
    size = count(parts[0].entry)
    if len(alike) == 1 and size and elements % size == 0 and elements // size <= len(parts):
        return split(parts[: elements // size])
    return None


def _make_up(alike: Sequence[Sequence[RecordedPart]], elements: int) -> bool:
    return (
        len({len(cluster) for cluster in alike}) == 1 and sum(count(cluster[0].entry) for cluster in alike) == elements
    )


def terms(parts: Sequence[RecordedPart], factor: float, how: How) -> WholeTensor | None:
    """Return the sum of parts of one shape, times a factor; None if their shapes differ, or there is only one."""
    if len({tuple(part.entry.shape) for part in parts}) != 1 or len(parts) < 2:
        return None
    entries = [part.entry for part in parts]
    projection = math.fsum(entry.projection for entry in entries) * factor
    size = None
    if count(entries[0]) == 1:  # the projection of a single element tells its magnitude
        unit = next((abs(entry.projection) / entry.maximum for entry in entries if entry.maximum), 1.0)
        size = abs(projection) / unit
    nonfinite = max(entry.nonfinite for entry in entries)
    return WholeTensor(how, tuple(parts), count(entries[0]), size, size, projection, nonfinite)


def mean_of_replicas(parts: Sequence[RecordedPart]) -> WholeTensor | None:
    """Return the tensor whose parts are the means of the ranks that have the same place, as far as projections tell."""
    groups = by_location(parts)
    if len(groups) < 2 or any(part.entry.placement is None for part in parts):
        return terms(parts, 1 / len(parts), "mean")
    projection = math.fsum(math.fsum(part.entry.projection for part in group) / len(group) for group in groups)
    elements = sum(count(group[0].entry) for group in groups)
    return WholeTensor("mean", tuple(parts), elements, None, None, projection, 0)


def replicas(parts: Sequence[RecordedPart]) -> WholeTensor:
    """Return the tensor of which each of the parts is a replica."""
    entry = parts[0].entry
    nonfinite = max(part.entry.nonfinite for part in parts)
    norm = math.sqrt(entry.sum_of_squares)
    same = all(exact(entry, part.entry) for part in parts[1:])
    return WholeTensor(
        "replicas", tuple(parts), count(entry), norm, entry.maximum, entry.projection, nonfinite, entry.hash * same
    )


def split(parts: Sequence[RecordedPart]) -> WholeTensor:
    """Return the tensor that parts with unknown places make up."""
    entries = [part.entry for part in parts]
    return WholeTensor(
        "split",
        tuple(parts),
        sum(count(entry) for entry in entries),
        math.sqrt(math.fsum(entry.sum_of_squares for entry in entries)),
        max(entry.maximum for entry in entries),
        None,
        sum(entry.nonfinite for entry in entries),
    )


def by_location(parts: Sequence[RecordedPart]) -> list[list[RecordedPart]]:
    """Group parts that are replicas by their placements. Parts without elements are left out."""
    groups: defaultdict[tuple[object, ...], list[RecordedPart]] = defaultdict(list)
    for part in parts:
        placement = part.entry.placement
        if count(part.entry):  # FSDP leaves ranks without a part of a small tensor
            groups[tuple(part.entry.shape), placement and tuple(placement.offsets)].append(part)
    return list(groups.values())


def _batches(parts: Sequence[RecordedPart]) -> int:
    """Return of how many batches shards are: how many different tensors there are at each place.

    The mesh of a DTensor may leave out ranks with other data, as that of tensor parallelism under data parallelism.
    """
    if any(part.entry.placement is not None and part.entry.placement.partial for part in parts):
        return 1
    numbers = {len(clusters(group, exact)) for group in by_location(parts)}
    return numbers.pop() if len(numbers) == 1 else 1


def _placed(parts: Sequence[RecordedPart], elements: int, close: Close) -> WholeTensor | None:
    if any(part.entry.placement is not None and part.entry.placement.partial for part in parts):
        return None
    groups = by_location(parts)
    if any(len(clusters(group, close)) > 1 for group in groups):
        return None
    chosen = [group[0] for group in groups]
    if sum(count(part.entry) for part in chosen) != elements:
        return None
    if not groups:
        return replicas(parts)
    if len(groups) == 1:
        return replicas(groups[0])
    whole = split(chosen)
    projection = math.fsum(part.entry.projection for part in chosen)
    return WholeTensor("shards", whole.parts, elements, whole.norm, whole.maximum, projection, whole.nonfinite)


def gradient_scale(run: Run, step: int) -> float | None:
    """Return the factor by which a run multiplies its gradients between backward and the optimizer's step.

    The gradient that the optimizer uses is divided by the sum of the gradients of all backwards: 1 if ranks sum them,
    1/N if N ranks, or N micro-batches of a pipeline, average them, and any factor if they are clipped.

    Returns:
        None if it is not the same for most parameters.
    """
    local: defaultdict[str, list[RecordedPart]] = defaultdict(list)
    for key, parts in run.parts.items():
        if key.kind == "gradient" and key.step == step:
            for micro in {part.micro for part in parts}:
                local[key.name] += [each[0] for each in clusters([p for p in parts if p.micro == micro], exact)]
    factors: list[float] = []
    for key, parts in run.parts.items():
        if key.kind != "reduced_gradient" or key.step != step or key.name not in local:
            continue
        backwards = local[key.name]
        total = math.fsum(part.entry.projection for part in backwards)
        size = math.sqrt(math.fsum(part.entry.sum_of_squares for part in backwards))
        if abs(total) > _TELLS * size:  # a smaller one is mostly rounding
            factors.append(math.fsum(group[0].entry.projection for group in by_location(parts)) / total)
    if not factors:
        return None
    usual = statistics.median_low(factors)
    alike = sum(math.isclose(each, usual, rel_tol=_TELLS) for each in factors)
    return usual if 2 * alike > len(factors) else None


def clusters(parts: Sequence[RecordedPart], close: Close) -> list[list[RecordedPart]]:
    """Group parts that are equal, by exact equality or within rounding."""
    found: list[list[RecordedPart]] = []
    for part in parts:
        for cluster in found:
            if tuple(cluster[0].entry.shape) == tuple(part.entry.shape) and close(cluster[0].entry, part.entry):
                cluster.append(part)
                break
        else:
            found.append([part])
    return found


def _splits_one_dimension(parts: Sequence[RecordedPart]) -> bool:
    """Return whether the shapes of parts differ in one dimension at most, so that they can be parts of one tensor."""
    shapes = {tuple(part.entry.shape) for part in parts}
    if len({len(shape) for shape in shapes}) != 1 or () in shapes:
        return False
    return sum(len(set(lengths)) > 1 for lengths in zip(*shapes, strict=True)) <= 1
