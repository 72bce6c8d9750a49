"""Evidence that a rank reports about itself. The verdict why ranks wait is derived from it. Plain picklable values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from monarch_kernel.debugger.source_locations import SourceLocation

# The times at which ranks entered collectives, from PyTorch's records. The structs are also the file format.


class TimedCollective(msgspec.Struct, frozen=True):
    """A collective, as one rank called it.

    Attributes:
        group: the name of the process group, the same on all its ranks.
        number: the number of the collective in its group.
        op: the operation of the backend: `all_reduce`.
        name: the function that user code called: `all_gather_object`.
        place: the line of user code that called it; None if unknown.
        entered: when the rank called it, by the clock of its host (seconds since 1970).
        seconds: how long the rank was in it; 0 if unknown.
    """

    group: str
    number: int
    op: str
    name: str
    place: SourceLocation | None
    entered: float
    seconds: float = 0.0


class CollectiveTimes(msgspec.Struct, frozen=True):
    """The latest collectives of a rank.

    Attributes:
        rank: the rank in its mesh.
        dist_rank: the rank in `torch.distributed`; -1 if it is in no process group.
        world: identifies the instance of `torch.distributed`.
        clock: equal for ranks whose hosts share a clock.
        host: its host.
        groups: by name, the members of each group as ranks of `torch.distributed`.
        calls: the collectives, in the order in which the rank called them.
    """

    rank: int
    dist_rank: int
    world: str
    clock: str
    host: str
    groups: dict[str, tuple[int, ...]]
    calls: tuple[TimedCollective, ...]


#: States of a rank, as far as the rank itself can determine them.
WAITS = "waits"  # for other ranks, in torch.distributed
LOADS = "loads"  # in a data loader
RUNS = "runs"  # in user code that made progress between the two samples, or used the processor
STANDS = "stands"  # in user code that made no progress between the two samples
PAUSED = "paused"  # a debugger has stopped it
IDLE = "idle"  # no user code runs
#: States of a rank that did not answer, as others report them.
DEAD = "dead"
SILENT = "silent"  # its host agent knows that it does not run: stopped by a signal, for instance
LATE = "late"  # it did not answer in time, for an unknown reason
UNREAD = "unread"  # it could not be read from outside
UNASKED = "unasked"  # the caller left it out

#: The name of a process group that is unknown because its process was read from outside.
UNSEEN_GROUP = "?"

WaitKind = Literal["collective", "recv", "send", "group", "work", "call"]
"""What a thread waits for: a collective; a message; a process group that is being made; a send or receive that it
started earlier, of which nothing more is known; the answer to a call of an endpoint."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of `torch.distributed` (mostly a collective), or a call of an endpoint, as one rank called it.

    Attributes:
        group: the name of the process group, the same on all its ranks.
        number: the number of the collective in its group, from 1; 0 if unknown.
        op: the operation of the backend: `all_reduce`.
        name: the function that user code called: `all_gather_object`; for a call, the endpoint.
        shapes: the shapes of the input tensors.
        dtypes: the types of the input tensors.
        place: the line of user code that called it.
        done: whether it has ended on this rank.
    """

    group: str
    number: int
    op: str
    name: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    place: SourceLocation | None = None
    done: bool = False

    @property
    def elements(self) -> int:
        """The number of input elements."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation that a thread of a rank waits for.

    Attributes:
        operation: the collective; without a number if the backend keeps no record of it.
        kind: the kind of wait.
        peer: the rank in `torch.distributed` that is received from or sent to; -1 if unknown.
        root: the source or destination rank that the operation names; -1 for none.
        members: the ranks in `torch.distributed` from which a group is being created.
        place: the line of user code that waits; the operation may have been called at another one.
        procs: the ids of the procs whose answers to a call are missing.
    """

    operation: Operation
    kind: WaitKind = "collective"
    peer: int = -1
    root: int = -1
    members: tuple[int, ...] = ()
    place: SourceLocation | None = None
    procs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group of `torch.distributed`.

    Attributes:
        name: its name, the same on all its ranks.
        desc: its purpose, in the words of the program.
        ranks: its members, as ranks of `torch.distributed`.
        timeout: the timeout of its operations (seconds); 0 if unknown.
    """

    name: str
    desc: str = ""
    ranks: tuple[int, ...] = ()
    timeout: float = 0.0


@dataclass(frozen=True, slots=True)
class UserException:
    """The exception that ended user code on a rank.

    Attributes:
        text: type and message, in one line.
        place: the innermost line of user code.
        cell: the cell that it ended; "" if it was none.
        when: `time.time()` on that rank.
        of_peer: whether it reports only that another rank is gone, or has not arrived.
        root: the file where user code began.
    """

    text: str
    place: SourceLocation | None = None
    cell: str = ""
    when: float = 0.0
    of_peer: bool = False
    root: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Known facts about one rank of a mesh.

    Attributes:
        rank: the rank in the mesh.
        state: one of the states above.
        why: the reason in words, if the rank could not answer: the cause of death, or why it is silent.
        dist_rank: the rank in `torch.distributed`; -1 if it is in no process group.
        world: distinguishes instances of `torch.distributed` on a mesh.
        groups: the process groups that it is in, by name.
        history: the latest collectives in each group, by number.
        waits: the operations that its threads wait for.
        place: the innermost line of user code.
        stack: the lines of user code, outermost first.
        failure: the exception that ended user code, if that is why none runs.
        endpoint: the running code: the actor and its endpoint, or `cell`.
        cell: the notebook cell that it runs for; "" for none.
        ident: the exact positions of all threads that run user code.
        ticks: the processor time of these threads so far.
        counts: how many operations each group has counted, including `send` and `recv`; for backends without a record.
        answered: whether the rank itself has reported this.
        proc: the id of its proc.
        signal: the signal that ended it, if one did.
        doing: the tensor operation that it runs for a controller, such as `aten::mm`; "" for none.
        issued: the engine and the record of that operation, from which the controller finds the line that issued it.
    """

    rank: int
    state: str
    why: str = ""
    dist_rank: int = -1
    world: str = ""
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict[str, ProcessGroup])
    history: Mapping[str, tuple[Operation, ...]] = field(default_factory=dict[str, "tuple[Operation, ...]"])
    waits: tuple[Wait, ...] = ()
    place: SourceLocation | None = None
    stack: tuple[SourceLocation, ...] = ()
    failure: UserException | None = None
    endpoint: str = ""
    cell: str = ""
    ident: int = 0
    ticks: int = 0
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    answered: bool = True
    proc: str = ""
    signal: int = 0
    doing: str = ""
    issued: tuple[str, int] | None = None

    def last(self, group: str) -> int:
        """Return the number of the last collective of a group that it has entered; 0 for none."""
        calls = self.history.get(group, ())
        return calls[-1].number if calls else 0

    def at(self, group: str, number: int) -> Operation | None:
        """Return its collective of that number in a group, if it is still recorded."""
        calls = self.history.get(group, ())
        if not calls:
            return None
        index = number - calls[0].number
        if 0 <= index < len(calls) and calls[index].number == number:
            return calls[index]
        return next((call for call in calls if call.number == number), None)
