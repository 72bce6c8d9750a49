"""The data model of a watch: plain values that encode as JSON. Front ends use the same names
(``labextension/src/model``).

Times are seconds since 1970 on the controller's clock. Sizes are bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec


class RankState(StrEnum):
    """The state of a rank. If several hold, the first in this order applies."""

    DEAD = "dead"
    UNRESPONSIVE = "unresponsive"
    STOPPED = "stopped"
    HEALING = "healing"
    STARTING = "starting"
    RUNNING = "running"
    IDLE = "idle"
    ENDED = "ended"


#: The position of each state in that order.
STATE_ORDER: Final = {state: place for place, state in enumerate(RankState)}


class GpuView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A GPU of a host.

    Attributes:
        index: its number on the host.
        name: the model.
        use: the utilization (percent).
        memory_used, memory_total: its memory.
    """

    index: int
    name: str
    use: float = 0.0
    memory_used: int = 0
    memory_total: int = 0


class HostView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A host.

    Attributes:
        key: unique among the hosts of this controller.
        name: the display name.
        cores: the number of processors.
        cpu: the utilization of all processors (percent).
        memory_used, memory_total: its memory.
        gpus: its GPUs; empty if there are none, or NVML is not installed.
        tree: the digest of its synced tree (hex); empty if unknown.
        environment: the digest of its synced environment.
        gone: why it cannot be reached; empty if it can.
        ends_at: when its walltime ends, if that is soon; otherwise 0.
        then: what to do before that, or what happens after it.
    """

    key: str
    name: str
    cores: int = 0
    cpu: float = 0.0
    memory_used: int = 0
    memory_total: int = 0
    gpus: tuple[GpuView, ...] = ()
    tree: str = ""
    environment: str = ""
    gone: str = ""
    ends_at: float = 0.0
    then: str = ""


class ActorView(msgspec.Struct, frozen=True, omit_defaults=True):
    """An actor in one rank.

    Attributes:
        name: the name that it was spawned under.
        cls: the name of its class.
        endpoint: the running endpoint; empty if there is none.
        since: when the endpoint began; 0 if there is none.
        waiting: the number of messages in its mailbox.
        calls: the number of completed endpoint calls.
        failures: how many of them raised.
    """

    name: str
    cls: str = ""
    endpoint: str = ""
    since: float = 0.0
    waiting: int = 0
    calls: int = 0
    failures: int = 0


class StopView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a rank is stopped in the debugger.

    Attributes:
        reason: the debugger's term: "breakpoint", "exception", ...
        file, line, function: the location; ``file`` as the user knows it (a cell is "cell [7]").
        text: the error, if it is stopped at one.
    """

    reason: str
    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""


class RankView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank of a proc mesh.

    Attributes:
        mesh: the ``key`` of its mesh.
        rank: its rank in that mesh as spawned.
        host: the ``key`` of its host.
        proc: the identifier of the process.
        pid: the process id; 0 until it has started.
        state: the worst state that holds.
        since: when it entered this state.
        cause: why it is dead, unresponsive or being healed.
        doing: a short text for what it runs ("cell [7]", "trainer.step"); empty if it is idle.
        doing_since: when that began; 0 if it is idle.
        waiting: the number of messages in the mailboxes of its actors.
        calls, failures: the number of completed endpoint calls, and how many raised.
        sent, received: bytes of its answers to calls, and of the calls.
        rss: resident memory.
        cpu: processor use, in percent of one processor.
        gpu_memory: GPU memory, by the number of the GPU on its host.
        started: when the process started.
        stop: where it is stopped in the debugger.
        older: whether it has imported modules in an older version than its host has now.
        actors: its actors, without those of tools.
    """

    mesh: str
    rank: int
    host: str = ""
    proc: str = ""
    pid: int = 0
    state: RankState = RankState.STARTING
    since: float = 0.0
    cause: str = ""
    doing: str = ""
    doing_since: float = 0.0
    waiting: int = 0
    calls: int = 0
    failures: int = 0
    sent: int = 0
    received: int = 0
    rss: int = 0
    cpu: float = 0.0
    gpu_memory: dict[int, int] = {}
    started: float = 0.0
    stop: StopView | None = None
    older: bool = False
    actors: tuple[ActorView, ...] = ()


class MeshView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A proc mesh.

    Attributes:
        key: unique in this controller, and constant as long as the mesh exists.
        name: its name in ``%mesh`` commands.
        labels, sizes: its dimensions, outermost first.
        hosts: the keys of its hosts, in the order of their first ranks.
        current: whether ``%%mesh`` cells run on it.
        kept: the name under which it outlives this controller; empty if it does not.
        hang: the verdict of the hang detector, as a sentence; empty if it does not hang.
        created: when it was spawned.
    """

    key: str
    name: str
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    current: bool = False
    kept: str = ""
    hang: str = ""
    created: float = 0.0


class JobView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job of this user: hosts that a provider has allocated or will allocate.

    Attributes:
        key: its id in the list of jobs.
        engine: the name of its launcher.
        mesh: the mesh of this notebook that is on it, or waits for it; empty if there is none.
        hosts: the number of requested hosts.
        up: how many of them are up.
        reason: why the others are not, in the provider's words.
        since: when the first of the others entered its state; 0 if unknown.
        expected_start: when the provider expects to allocate the last of them; 0 if unknown.
        ends_at: when the walltime of its first host ends; 0 if unknown or unlimited.
        ended: whether all its hosts are gone.
        used_by: the program that uses it; empty: this notebook.
        error: why its provider does not report its state; empty if it does.
    """

    key: str
    engine: str
    mesh: str = ""
    hosts: int = 0
    up: int = 0
    reason: str = ""
    since: float = 0.0
    expected_start: float = 0.0
    ends_at: float = 0.0
    ended: bool = False
    used_by: str = ""
    error: str = ""


class FailureView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A present or imminent failure: a death, an error of an endpoint, a hang, the end of a walltime.

    Attributes:
        number: consecutive number in one controller.
        time: when it became known.
        mesh: the ``key`` of the mesh.
        ranks: the affected ranks.
        kind: "death", "error", "hang", "unresponsive" or "walltime".
        text: a sentence with the event and its cause.
    """

    number: int
    time: float
    mesh: str
    ranks: tuple[int, ...]
    kind: str
    text: str


class Snapshot(msgspec.Struct, frozen=True):
    """The complete state at one time.

    Attributes:
        version: incremented by each change.
        time: the time of the last change.
        meshes, hosts: by their keys.
        ranks: by the key of their mesh, each at the index of its rank.
        failures: the last failures, newest last.
        jobs: the jobs whose hosts a notebook waits for, by their keys.
    """

    version: int
    time: float
    meshes: dict[str, MeshView]
    hosts: dict[str, HostView]
    ranks: dict[str, tuple[RankView, ...]]
    failures: tuple[FailureView, ...]
    jobs: dict[str, JobView] = {}


class Delta(msgspec.Struct, frozen=True):
    """The changes between two versions.

    Attributes:
        base, version: the two versions.
        time: the time of the last change.
        meshes, hosts, jobs: new or changed objects, by their keys. All ranks of a new mesh are in ``ranks``.
        ranks: changed ranks, by the key of their mesh and their rank.
        fields: for each of those ranks, the names of the changed fields; empty for a new rank.
        gone_meshes, gone_hosts, gone_jobs: keys of removed objects.
        failures: new failures.
    """

    base: int
    version: int
    time: float
    meshes: dict[str, MeshView]
    hosts: dict[str, HostView]
    ranks: dict[tuple[str, int], RankView]
    fields: dict[tuple[str, int], frozenset[str]]
    gone_meshes: tuple[str, ...]
    gone_hosts: tuple[str, ...]
    failures: tuple[FailureView, ...]
    jobs: dict[str, JobView] = {}
    gone_jobs: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.version != self.base


def plain(view: object) -> Any:
    """Return a view as JSON-compatible values for front ends."""
    return msgspec.to_builtins(view, str_keys=True)
