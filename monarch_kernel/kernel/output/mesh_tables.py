"""The results of `%mesh ls` and `%mesh status` as plain data, and the tables that show them. Pure.

Other views (a panel, a widget) may read the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from monarch_kernel.display.quantities import duration, memory
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.meshes import KeptHost, KeptInfo, name_ranks
from workspace_sync.receipt import DIGITS, names


@dataclass(frozen=True, slots=True)
class KeptState:
    """The process that holds a mesh started with `--keep`.

    Attributes:
        here: whether this kernel holds it.
        lost: whether it ends with this kernel, because its host agent died.
        holder: the process id of another holder; 0 if there is none.
        free_for: how long no process has held it (seconds).
        ends_in: the time until it ends if no process attaches (seconds); None if it never ends.
    """

    here: bool = False
    lost: bool = False
    holder: int = 0
    free_for: float = 0.0
    ends_in: float | None = None

    def __str__(self) -> str:
        if self.lost:
            return "no longer: its host agent died; %mesh heal starts another"
        if self.here:
            return "by this kernel"
        if self.holder:
            return f"by process {self.holder}"
        ends = "" if self.ends_in is None else f", ends in {duration(self.ends_in)}"
        return f"free for {duration(self.free_for)}{ends}"


@dataclass(frozen=True, slots=True)
class MeshSummary:
    """One mesh in the list of meshes.

    Attributes:
        name: its name; prefixed with the name of its kept host if that differs.
        sizes: its dimensions.
        ranks: the number of ranks.
        alive: the number of live ranks; None if they did not report in time.
        in_use: whether cells run on it by default.
        kept: set if it outlives its kernel.
    """

    name: str
    sizes: Mapping[str, int]
    ranks: int
    alive: int | None
    in_use: bool = False
    kept: KeptState | None = None


@dataclass(frozen=True, slots=True, repr=False)
class MeshList(AsTable):
    """All meshes of a notebook, then the kept ones that it does not hold."""

    meshes: Sequence[MeshSummary]

    def table(self) -> TableView:
        """Return one row per mesh; `*` marks the one in use."""
        rows = [
            [
                "*" if mesh.in_use else "",
                mesh.name,
                ", ".join(f"{label}={size}" for label, size in mesh.sizes.items()),
                str(mesh.ranks),
                "?" if mesh.alive is None else str(mesh.alive),
            ]
            for mesh in self.meshes
        ]
        headings = ["", "mesh", "dimensions", "ranks", "alive"]
        if any(mesh.kept for mesh in self.meshes):
            headings.append("kept")
            rows = [[*row, str(mesh.kept or "")] for row, mesh in zip(rows, self.meshes, strict=True)]
        return TableView(headings, rows, right=(3, 4))


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank of a mesh.

    Attributes:
        rank: the rank in its mesh.
        point: its coordinates.
        state: "starting", "alive", "unresponsive", "dead" or "stopped".
        pid: the process id; 0 if there is none yet.
        host: the host of the process.
        doing: where its code is, or why it is not alive.
        older: the modules that it has imported in an older version than its host has now.
        devices: the GPUs assigned to it, if not all GPUs of its host.
        gpus: by the GPU's number on its host, the memory that the process uses there (bytes), and how busy that GPU is
            (percent).
        rss_bytes, cpu_percent, uptime: figures of the process, while it is alive.
    """

    rank: int
    point: Mapping[str, int]
    state: str
    pid: int
    host: str
    doing: str
    rss_bytes: int = 0
    cpu_percent: float = 0.0
    uptime: float = 0.0
    older: Sequence[str] = ()
    devices: str = ""
    gpus: Mapping[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])

    @property
    def runs(self) -> bool:
        """Whether its process exists."""
        return self.state in ("alive", "unresponsive")


@dataclass(frozen=True, slots=True)
class HostTree:
    """The synced tree of a host.

    Attributes:
        host: the name of the host.
        digest: the digest of the tree (hex); empty if there is none.
        environment: the digest of the synced environment (hex); empty if there is none.
        age: the time since the host switched to them (seconds).
        earlier: the number of earlier trees that a rollback can return to.
        repair: why the next sync will check all of its files; empty if it is intact.
        left: remains of an interrupted sync; empty if there are none.
        kept: files of ranks that were in the way of a tree and are kept; empty if there are none.
    """

    host: str
    digest: str
    environment: str = ""
    age: float = 0.0
    earlier: int = 0
    repair: str = ""
    left: str = ""
    kept: str = ""

    def __str__(self) -> str:
        left = "".join(f"; {each}" for each in (self.left, self.kept) if each)
        if not self.digest and not self.environment:
            return f"no synced tree{left}"
        with_env = f" with environment {self.environment[:DIGITS]}" if self.environment else ""
        back = f", {self.earlier} earlier" if self.earlier else ""
        repair = f"; to be repaired: {self.repair}" if self.repair else ""
        return f"tree {self.digest[:DIGITS]}{with_env}, {duration(max(0.1, self.age))} old{back}{repair}{left}"


@dataclass(frozen=True, slots=True, repr=False)
class MeshStatus(AsTable):
    """The current state of the ranks of one mesh and the synced trees of its hosts, with remarks."""

    mesh: str
    ranks: Sequence[RankSummary]
    kept: KeptState | None = None
    trees: Sequence[HostTree] = ()
    warnings: Sequence[str] = ()

    def table(self) -> TableView:
        """Return one row per rank."""
        rows = [
            [
                str(rank.rank),
                ",".join(f"{label}={at}" for label, at in rank.point.items()),
                rank.state,
                str(rank.pid or ""),
                rank.host,
                memory(rank.rss_bytes) if rank.runs else "",
                f"{rank.cpu_percent:.0f} %" if rank.runs else "",
                duration(rank.uptime) if rank.runs else "",
                rank.doing,
            ]
            for rank in self.ranks
        ]
        lost = f": kept {self.kept}" if self.kept is not None and self.kept.lost else ""
        headings = ["rank", "at", "state", "pid", "host", "memory", "cpu", "up", "doing"]
        if any(rank.devices for rank in self.ranks):
            headings.append("devices")
            rows = [[*row, rank.devices] for row, rank in zip(rows, self.ranks, strict=True)]
        if any(rank.gpus for rank in self.ranks):
            headings.append("gpu")
            told = (
                ", ".join(f"{gpu}: {memory(held)}, {use:.0f} %" for gpu, (held, use) in sorted(rank.gpus.items()))
                for rank in self.ranks
            )
            rows = [[*row, text] for row, text in zip(rows, told, strict=True)]
        if any(rank.older for rank in self.ranks):
            headings.append("older modules")
            rows = [[*row, names(rank.older)] for row, rank in zip(rows, self.ranks, strict=True)]
        said = dict.fromkeys(map(str, self.trees))
        notes = [
            f"{', '.join(tree.host for tree in self.trees if str(tree) == text)}: {text}" if len(said) > 1 else text
            for text in said
        ]
        return TableView(
            headings,
            rows,
            f"mesh {self.mesh}{lost}",
            right=(0, 3, 5, 6, 7),
            note="\n".join([*self.warnings, *self._shared_gpus(), *notes]),
        )

    def _shared_gpus(self) -> list[str]:
        """Return a sentence for each GPU that several ranks use."""
        users: dict[tuple[str, int], list[int]] = {}
        for rank in self.ranks:
            for gpu in rank.gpus:
                users.setdefault((rank.host, gpu), []).append(rank.rank)
        return [
            f"{name_ranks(ranks)} share GPU {gpu} of {host}"
            for (host, gpu), ranks in sorted(users.items())
            if len(ranks) > 1
        ]


def kept_here(host: KeptHost | None) -> KeptState | None:
    """Return whether a mesh of this notebook outlives it; `host` is the kept host of the mesh, if it has one."""
    return None if host is None else KeptState(here=True, lost=not host.is_kept)


def kept_elsewhere(info: KeptInfo, now: float) -> list[MeshSummary]:
    """Return the meshes of a kept host that this notebook does not hold.

    Args:
        info: the description of the kept host.
        now: the time in seconds since 1970.
    """
    if info.held_by:
        state = KeptState(holder=info.held_by)
    else:
        ends_in = max(0.0, info.free_since + info.idle - now) if info.idle else None
        state = KeptState(free_for=now - info.free_since, ends_in=ends_in)
    found = [
        MeshSummary(
            mesh.name if mesh.name == info.name else f"{info.name}: {mesh.name}",
            mesh.sizes,
            mesh.ranks,
            mesh.alive,
            kept=state,
        )
        for mesh in info.meshes
    ]
    return found or [MeshSummary(info.name, {}, 0, 0, kept=state)]
