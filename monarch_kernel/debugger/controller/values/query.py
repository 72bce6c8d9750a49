"""Run `diff` and `pull`: the sequence of queries to the ranks, and their result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from monarch_kernel.actor import ActorMesh, ProcMesh
from monarch_kernel.debugger import existing_debugger
from monarch_kernel.debugger.controller.query import Answers, ask, chosen_ranks
from monarch_kernel.debugger.controller.values.compare import (
    BUDGET,
    Difference,
    ValueGroup,
    block_bytes,
    chosen_blocks,
    differences,
    differing_blocks,
    families,
    group,
)
from monarch_kernel.debugger.controller.values.diff_report import Diff, FailureKind, ValueFailure
from monarch_kernel.debugger.events import RankStop
from monarch_kernel.debugger.frames import user_frames
from monarch_kernel.debugger.model.readings import Reading
from monarch_kernel.debugger.rank.values import kept_values, probe
from monarch_kernel.debugger.rank.values.evaluation import FILE, Question
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import Whole
from monarch_kernel.meshes import format_ranks
from monarch_kernel.protocol.faults import Fault

#: How long ranks may take to evaluate the expression and to read its value, by default (seconds).
TIMEOUT = 30.0
#: How long they may take for each further query (seconds).
QUICK = 5.0
#: How long a rank may take to answer at all (seconds); the first time, it has to load the code for the query.
PING = 3.0
#: The reason of a stop that holds the frames of an exception.
POST_MORTEM = "post mortem"
#: The maximum number of differing arrays whose elements are compared.
MOST_ARRAYS = 50

_T = TypeVar("_T")


def diff(
    mesh: ProcMesh | ActorMesh[Any] | Any,
    expression: str = "tensor",
    *,
    ranks: Iterable[int] | None = None,
    timeout: float = TIMEOUT,
    in_frame: bool | None = None,
    up: int = 0,
    grads: bool = False,
) -> Diff:
    """Evaluate an expression on every rank, and report which ranks have which value and where values differ.

    The value stays on the rank: ranks reduce it to figures and digests, and exchange only the differing blocks of
    arrays, up to a few megabytes. It is evaluated once, on a separate thread (or, in a stopped frame, on the stopped
    thread). Its side effects on the rank are the caller's responsibility.

    Args:
        mesh: on a proc mesh, the expression sees the names of `%%mesh` cells, or of the stopped frame; on an actor
            mesh, those of the actors' methods, including `self`. For a handle of a tensor on a mesh, the tensors that
            the ranks hold are compared (of a sharded tensor, equal parts), and `expression` is their name in the
            result.
        expression: a Python expression. On a proc mesh, `self` is the actor of the rank if there is only one.
        ranks: the ranks of ``mesh``; all by default.
        timeout: the time for evaluating and reading the value (seconds).
        in_frame: whether to evaluate in stopped frames; None: if ranks of a proc mesh are stopped.
        up: the frame of user code to evaluate in, counted outwards from the innermost one.
        grads: compare the gradients of a module's parameters instead of the parameters.

    Raises:
        ValueError: it is not an expression, there is no such rank, or no rank is stopped.
        TypeError: ``mesh`` is not a mesh.
        DeviceMeshError: a rank of the tensor's mesh has died.
    """
    started = time.perf_counter()
    remote = RemoteExpression(mesh, expression, ranks, timeout, grads, in_frame, up)
    try:
        readings = remote.read()
        groups = group(readings)
        rows, steady = remote.compare(groups)
    finally:
        remote.release()
    return Diff(
        expression=remote.expression,
        mesh=remote.whole.procs.name,
        extent=remote.whole.procs.extent,
        asked=tuple(remote.ranks),
        where=remote.where(readings),
        groups=tuple(groups),
        differences=tuple(rows),
        failed=remote.failed(),
        running=remote.running,
        notes=_notes(groups, rows, steady),
        seconds=time.perf_counter() - started,
    )


def pull(
    mesh: ProcMesh | ActorMesh[Any],
    expression: str,
    *,
    rank: int = 0,
    timeout: float = TIMEOUT,
    in_frame: bool | None = None,
    up: int = 0,
) -> Any:
    """Fetch the value of an expression on one rank. Tensors arrive on the CPU, without their graph.

    Args:
        mesh: as for `diff`.
        expression: a Python expression.
        rank: the rank of ``mesh``.
        timeout: the time for evaluating and transferring the value (seconds).
        in_frame: whether to evaluate in the stopped frame; None: if that rank of a proc mesh is stopped.
        up: the frame of user code to evaluate in, counted outwards from the innermost one.

    Raises:
        ValueError: it is not an expression, there is no such rank, or it is not stopped.
        RuntimeError: the rank could not evaluate or send it; the message says why.
    """
    remote = RemoteExpression(mesh, expression, (rank,), timeout, False, in_frame, up)
    try:
        return remote.fetch()
    finally:
        remote.release()


@dataclass(frozen=True, slots=True)
class _StoppedFrame:
    """A frame of a stop, by its index."""

    stop: RankStop
    frame: int


class RemoteExpression:
    """One expression, evaluated on ranks of a mesh; records which of them could not answer, and why."""

    def __init__(
        self,
        mesh: ProcMesh | ActorMesh[Any] | Any,
        expression: str,
        ranks: Iterable[int] | None,
        timeout: float,
        grads: bool,
        in_frame: bool | None,
        up: int,
    ) -> None:
        self.expression = checked(expression)
        address: tuple[str, int] | None = None
        if hasattr(type(mesh), "_short_form_"):  # a handle of a tensor, so torch is loaded
            from monarch_kernel.tensor import address_of

            handle: Any = mesh
            address, mesh = address_of(handle, timeout), handle.mesh
        self.whole: Whole = tool_runtime().whole_of(mesh)
        self.ranks = sorted(self.whole.ranks[rank] for rank in chosen_ranks(ranks, len(self.whole.ranks)))
        self.running: tuple[int, ...] = ()
        self._timeout = timeout
        self._why: dict[int, tuple[FailureKind, str]] = {}  # by rank without an answer: the kind, and a sentence
        self._actor = mesh._name if isinstance(mesh, ActorMesh) else ""
        uid = mesh._actor if isinstance(mesh, ActorMesh) else ""
        self._question = Question(self.expression, f"diff-{os.urandom(8).hex()}", uid, grads, timeout, address)
        self._stopped = {} if address is not None else self._stops(in_frame, bool(uid), up)
        self._evaluated = False

    def _stops(self, in_frame: bool | None, on_actors: bool, up: int) -> dict[int, _StoppedFrame]:
        """Return the frames to evaluate in, by rank; none if namespaces are used."""
        if in_frame is False or (in_frame is None and on_actors):
            return {}
        debugger = existing_debugger()
        stops = debugger.stops(self.whole.procs) if debugger is not None else []
        stops = [at for at in stops if at.rank in self.ranks]
        # Frames of an exception count only if nothing else is stopped and frames are requested.
        stops = [at for at in stops if at.stop.reason != POST_MORTEM] or (stops if in_frame else [])
        found: dict[int, _StoppedFrame] = {}
        for at in stops:  # ids grow, so the newest stop of a rank is used
            frames = user_frames(at.stop.frames)
            if not 0 <= up < len(frames):
                raise ValueError(f"rank {at.rank} has {len(frames)} frames of user code, so none that is {up} up")
            found[at.rank] = _StoppedFrame(at, frames[up].index)
        if in_frame and not found:
            raise ValueError(
                f"there is no stopped frame to evaluate in: of mesh {self.whole.procs.name}, rank "
                f"{format_ranks(self.ranks, limit=6)} is not stopped"
            )
        if found:
            self.running = tuple(rank for rank in self.ranks if rank not in found)
        return found

    # -- evaluating ------------------------------------------------------------------------------

    def read(self) -> dict[int, Reading]:
        """Read the value on each rank that has one."""
        there = self._there()
        self._evaluated = True
        if not self._stopped:
            return self._ask(probe.read, self._question, ranks=there, timeout=self._timeout)
        reached = self._in_frames(there)
        return self._ask(probe.read_kept, self._question, ranks=reached, timeout=self._timeout)

    def fetch(self) -> Any:
        """Fetch the value on the only queried rank; see `pull`."""
        (rank,) = self.ranks
        there = self._there()
        self._evaluated = bool(self._stopped)
        if self._stopped:
            found = self._ask(
                probe.fetch_kept, self._question.token, ranks=self._in_frames(there), timeout=self._timeout
            )
        else:
            found = self._ask(probe.fetch, self._question, ranks=there, timeout=self._timeout)
        if rank in found:
            return found[rank]
        _kind, why = self._why[rank]
        raise RuntimeError(f"rank {rank} of mesh {self.whole.procs.name} cannot send {self.expression}: {why}")

    def _there(self) -> list[int]:
        """Return the ranks that answer at all: faster than waiting for the others to evaluate the value."""
        wanted = self._stopped or self.ranks
        there = sorted(self._ask(probe.ping, ranks=wanted, timeout=min(PING, self._timeout)))
        for rank, (kind, why) in self._why.items():
            if kind == "late":
                hint = "it is suspended, or native code holds its interpreter lock; the mesh's stacks() shows which"
                self._why[rank] = (kind, f"{why}: {hint}")
        return there

    def _in_frames(self, there: Sequence[int]) -> list[int]:
        """Evaluate in the stopped frames of these ranks. Return the ranks where that succeeded."""
        debugger = existing_debugger()
        assert debugger is not None
        by_frame: dict[int, list[RankStop]] = {}
        for place in (self._stopped[rank] for rank in there):
            by_frame.setdefault(place.frame, []).append(place.stop)
        reached: list[int] = []
        for frame, stops in by_frame.items():
            answers = debugger.call(stops, probe.InFrame(self._question), frame=frame, timeout=self._timeout)
            for (_mesh, rank, _stop), answer in answers.items():
                if isinstance(answer, Exception):
                    self._why[rank] = ("error", str(answer))
                else:
                    reached.append(rank)
        return sorted(reached)

    def release(self) -> None:
        """Make the ranks release the value."""
        reached = [rank for rank in self.ranks if rank not in self._why]
        if self._evaluated and reached:
            ask(self.whole.procs, kept_values.release, self._question.token, ranks=reached, timeout=QUICK)

    # -- comparing -------------------------------------------------------------------------------

    def compare(self, groups: Sequence[ValueGroup]) -> tuple[list[Difference], bool]:
        """Return the parts that differ, and whether the values stayed the same during the comparison."""
        rows: list[Difference] = []
        steady = True
        for family in families(groups):
            found, stayed = self._compare(family)
            rows += found
            steady = steady and stayed
        return rows, steady

    def _compare(self, family: Sequence[ValueGroup]) -> tuple[list[Difference], bool]:
        token = self._question.token
        first = [each.ranks[0] for each in family]
        leaves = self._ask(probe.leaves, token, ranks=first, timeout=QUICK, quietly=True)
        rows = differences(family, leaves)
        arrays = [at for at, row in enumerate(rows) if row.has_elements][:MOST_ARRAYS]
        if not arrays:
            return rows, True
        reference = first[-1]
        wanted: dict[int, list[str]] = {rank: [] for rank in first}
        for at in arrays:
            wanted[rows[at].ranks[0]].append(rows[at].path)
        wanted[reference] = list(dict.fromkeys(rows[at].path for at in arrays))
        known = self._ask(probe.digests, token, wanted, ranks=first, timeout=QUICK, quietly=True)
        arrays = [at for at in arrays if rows[at].ranks[0] in known and reference in known]
        paths = [(rows[at].ranks[0], rows[at].path) for at in arrays]
        differing = [differing_blocks(known[rank][path], known[reference][path]) for rank, path in paths]
        chosen = chosen_blocks(differing, [_bytes_of(rows[at]) for at in arrays])
        return self._contrast(rows, arrays, differing, chosen, reference)

    def _contrast(
        self,
        rows: list[Difference],
        arrays: Sequence[int],
        differing: Sequence[Sequence[int]],
        chosen: Sequence[Sequence[int]],
        reference: int,
    ) -> tuple[list[Difference], bool]:
        """Fetch the chosen blocks from the reference, and let the other ranks compare them with their own."""
        token = self._question.token
        blocks: dict[str, list[int]] = {}
        spans: dict[int, dict[str, Sequence[int]]] = {}
        for at, numbers in zip(arrays, chosen, strict=True):
            row = rows[at]
            blocks[row.path] = sorted({*blocks.get(row.path, ()), *numbers})
            spans.setdefault(row.ranks[0], {})[row.path] = numbers
        sent = self._ask(probe.pieces, token, blocks, ranks=[reference], timeout=QUICK, quietly=True)
        if reference not in sent or not spans:
            return rows, True
        contents, steady = sent[reference]
        found = self._ask(probe.contrasts, token, spans, contents, ranks=sorted(spans), timeout=QUICK, quietly=True)
        for at, all_blocks, numbers in zip(arrays, differing, chosen, strict=True):
            row = rows[at]
            contrast = found[row.ranks[0]][0].get(row.path) if row.ranks[0] in found else None
            compared = len(numbers) if contrast is not None else 0
            rows[at] = replace(row, contrast=contrast, blocks=len(all_blocks), compared=compared)
        return rows, steady and all(stayed for _, stayed in found.values())

    # -- queries ---------------------------------------------------------------------------------

    def _ask(
        self, function: Callable[..., _T], *args: Any, ranks: Iterable[int], timeout: float, quietly: bool = False
    ) -> dict[int, _T]:
        """Return the answers of the ranks. Record why others have not answered, unless `quietly`."""
        # The rank itself stops when the timeout expires, and gets a moment longer to report that.
        asked = list(ranks)
        answers = ask(self.whole.procs, function, *args, ranks=asked, timeout=timeout + 0.5) if asked else Answers()
        if not quietly:
            for rank, fault in answers.errors.items():
                self._why[rank] = ("error", _sentence(fault))
            for rank, why in answers.dead.items():
                self._why[rank] = ("dead", why)
            for rank in answers.late:
                self._why[rank] = ("late", f"no answer within {timeout:g} s")
        return answers.values

    # -- results ---------------------------------------------------------------------------------

    def failed(self) -> tuple[ValueFailure, ...]:
        """Return the ranks without a value, by reason."""
        reasons: dict[tuple[FailureKind, str], list[int]] = {}
        for rank in sorted(self._why):
            reasons.setdefault(self._why[rank], []).append(rank)
        return tuple(ValueFailure(kind, why, tuple(ranks)) for (kind, why), ranks in reasons.items())

    def where(self, readings: dict[int, Reading]) -> str:
        """Describe where the expression was evaluated."""
        if self._question.tensor is not None:
            return "as the ranks hold it"
        if self._actor:
            return f"on the actors {self._actor}"
        if not self._stopped:
            actors = sorted({reading.where for reading in readings.values() if reading.where})
            namespaces = "in the ranks' namespaces" if readings else ""
            return f"on {', '.join(actors)}" if actors else namespaces
        places: dict[str, list[int]] = {}
        for rank, reading in sorted(readings.items()):
            places.setdefault(reading.where, []).append(rank)
        if len(places) == 1:
            return f"in the stopped frame {next(iter(places))}"
        said = "; ".join(f"[{format_ranks(ranks, limit=4)}] {place}" for place, ranks in list(places.items())[:4])
        return f"in the stopped frames {said}" if said else "in the stopped frames"


def checked(expression: str) -> str:
    """Return `expression` without surrounding space. Raises ValueError if it is not an expression."""
    source = expression.strip()
    try:
        compile(source, FILE, "eval")
    except (SyntaxError, ValueError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{source!r} is no expression ({why}); give one that can be evaluated on each rank") from None
    return source


def _bytes_of(row: Difference) -> int:
    assert row.ours is not None
    return block_bytes(row.ours)


def _sentence(fault: Fault | str) -> str:
    return fault if isinstance(fault, str) else fault.summary.split("\n", 1)[0]


def _notes(groups: Sequence[ValueGroup], rows: Sequence[Difference], steady: bool) -> tuple[str, ...]:
    notes: dict[str, list[int]] = {}
    for each in groups:
        if each.reading.sampled:
            notes.setdefault(each.reading.sampled, []).extend(each.ranks)
        for unread in each.reading.unread[:3]:
            notes.setdefault(f"not read: {unread}", []).extend(each.ranks)
    said = [f"[{format_ranks(ranks, limit=6)}] {note}" for note, ranks in notes.items()]
    if any(not row.is_complete for row in rows if row.contrast is not None):
        said.append(f"≥: at least, as only {BUDGET >> 20} MB of elements are moved to compare them")
    if not steady:
        said.append(
            "the values changed while they were compared, as the ranks are running; stop them for exact figures"
        )
    parts = {each.reading.part for each in groups}
    if len(parts) > 1:
        said.append("ranks that hold different shards are not compared with each other")
    return tuple(said)
