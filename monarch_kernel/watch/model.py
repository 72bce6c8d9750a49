"""What a watcher sees: plain values that encode as JSON; front ends have the same names (``labextension/src/model``).

Times are seconds since 1970, on the controller's clock; sizes are bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec


class RankState(StrEnum):
    """The state of a rank; if several hold, the first in this order."""

    DEAD = "dead"
    UNRESPONSIVE = "unresponsive"
    STOPPED = "stopped"
    HEALING = "healing"
    STARTING = "starting"
    RUNNING = "running"
    IDLE = "idle"
    ENDED = "ended"


#: The place of each state in that order.
STATE_ORDER: Final = {state: place for place, state in enumerate(RankState)}


class GpuView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A GPU of a host.

    Attributes:
        index: its number on the host.
        name: the model.
        use: how busy it is (percent).
        memory_used, memory_total: of its memory.
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
        name: for people.
        cores: its processors.
        cpu: how busy they are (percent of all of them).
        memory_used, memory_total: of its memory.
        gpus: its GPUs; empty where there are none, or NVML is not installed.
        tree: the digest of its synced tree (hex); empty: none is known.
        environment: of its synced environment.
        gone: why it cannot be reached; empty if it can.
        ends_at: when its walltime ends, if that is soon; 0: it is not.
        then: what is to be done before, or comes after it.
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
        name: that it was spawned under.
        cls: the name of its class.
        endpoint: that runs; empty if none does.
        since: when that began; 0 if none runs.
        waiting: messages in its mailbox.
        calls: endpoints that it has run.
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
        reason: as the debugger names it: "breakpoint", "exception", ...
        file, line, function: where; ``file`` as the user knows it (a cell is "cell [7]").
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
        rank: in that mesh as spawned.
        host: the ``key`` of its host.
        proc: the identifier of the process.
        pid: 0 until it has started.
        state: the worst that holds.
        since: when it came into this state.
        cause: why it is dead, unresponsive or being healed.
        doing: what it runs, in a line for people ("cell [7]", "trainer.step"); empty if it is idle.
        doing_since: when that began; 0 if it is idle.
        waiting: messages in the mailboxes of its actors.
        calls, failures: endpoints that it has run, and how many raised.
        sent, received: bytes of its answers to calls, and of the calls.
        rss: resident memory.
        cpu: percent of one processor.
        gpu_memory: by the number of the GPU on its host.
        started: when the process started.
        stop: where it is stopped in the debugger.
        older: it has imported modules in an older version than its host has now.
        actors: that live in it, without those of tools.
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
        key: unique in this controller, the same as long as the mesh lives.
        name: that ``%mesh`` knows it by.
        labels, sizes: its dimensions, the outermost first.
        hosts: the keys of its hosts, in the order of their first ranks.
        current: ``%%mesh`` cells run on it.
        kept: the name under which it outlives this controller; empty: it does not.
        hang: the verdict of the hang detector, in a sentence; empty: it does not hang.
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
    """A job of this user: hosts that an engine gives, or is to give.

    Attributes:
        key: its id in the list of jobs.
        engine: the name of its launcher.
        mesh: the mesh of this notebook that is on it, or waits for it; empty: none.
        hosts: how many it asks for.
        up: how many of them are up.
        reason: why the others are not, in the engine's words.
        since: since when the first of the others is in its state; 0: not known.
        expected_start: when the engine expects to give the last of them; 0: not known.
        ends_at: when the walltime of its first host ends; 0: not known, or never.
        ended: whether all its hosts are gone.
        used_by: which program uses it; empty: this notebook.
        error: why its engine does not say where it is; empty: it does.
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
    """Something that went wrong, or is about to: a death, an error of an endpoint, a hang, the end of a walltime.

    Attributes:
        number: counts up in one controller.
        time: when it became known.
        mesh: the ``key`` of the mesh; ``ranks``: those that it concerns.
        kind: "death", "error", "hang", "unresponsive" or "walltime".
        text: what happened, and why, in a sentence.
    """

    number: int
    time: float
    mesh: str
    ranks: tuple[int, ...]
    kind: str
    text: str


class Snapshot(msgspec.Struct, frozen=True):
    """All that is known at one time.

    Attributes:
        version: counts up with each change.
        time: of the last change.
        meshes, hosts: by their keys.
        ranks: by the key of their mesh, each at the index of its rank.
        failures: the last ones, the newest last.
        jobs: whose hosts a notebook waits for, by their keys.
    """

    version: int
    time: float
    meshes: dict[str, MeshView]
    hosts: dict[str, HostView]
    ranks: dict[str, tuple[RankView, ...]]
    failures: tuple[FailureView, ...]
    jobs: dict[str, JobView] = {}


class Delta(msgspec.Struct, frozen=True):
    """What differs between two versions.

    Attributes:
        base, version: the two.
        time: of the last change.
        meshes, hosts, jobs: that are new or different, by their keys; a mesh that is new has all its ranks in
            ``ranks``.
        ranks: that are different, by the key of their mesh and their rank.
        fields: for each of those ranks, the names of the fields that differ; nothing for a new one.
        gone_meshes, gone_hosts, gone_jobs: keys of those that are no more.
        failures: new ones.
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


def plain(view: Any) -> Any:
    """A view as JSON-like values: what front ends get."""
    return msgspec.to_builtins(view, str_keys=True)
