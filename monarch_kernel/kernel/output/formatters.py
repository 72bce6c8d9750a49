"""Format the runtime's objects as results of cells: tables for meshes and values, futures with their results, errors.

The runtime does not depend on IPython, so this module registers formatters for its types with the shell.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from monarch_kernel.actor import ActorMesh, Extent, Future, HostMesh, ProcMesh, ValueMesh
from monarch_kernel.display import tables
from monarch_kernel.display.charts import figure, histogram, over_ranks
from monarch_kernel.display.quantities import duration, memory, outliers
from monarch_kernel.display.tables import AsTable, TableView, table_html, table_text
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.cell_values import CellValues
from monarch_kernel.kernel.output.cell_errors import CellFailure, FileLabel, MeshCellError, group_lines, grouped
from monarch_kernel.kernel.output.render import ansi_to_html
from monarch_kernel.meshes import KeptHost, KeptInfo, format_points, format_ranks, name_ranks
from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from workspace_sync.receipt import DIGITS, names, receipt_table

if TYPE_CHECKING:
    from IPython.lib.pretty import RepresentationPrinter

    from monarch_kernel.numerics.comparison import Comparison
    from monarch_kernel.widgets.mesh_display import MeshDisplay


# The results of `%mesh ls` and `%mesh status` as plain data, and the tables that show them. Pure.
#
# Other views (a panel, a widget) may read the same data.


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


# Show the values of ranks as HTML: a chart of numbers next to a table, and summaries of arrays with distributions.

#: The minimum count of numbers for a chart. Fewer are easier to read in the table.
FEWEST = 4
#: The maximum number of rows in a table of arrays.
MOST_RANKS = 32
#: The maximum number of rows of a table next to a chart. A longer table is placed below the chart, collapsed.
MOST_BESIDE = 12
_NAMED = 6
#: The maximum number of different tables.
MOST_TABLES = 8


#: The maximum number of elements read from an array.
MOST_ELEMENTS = 1_000_000


BINS = 24


def value_mesh_html(values: ValueMesh[object], table: TableView) -> str:
    """Return a value mesh as HTML.

    Args:
        values: the values.
        table: the same values as a table.
    """
    held = list(values.values())
    numbers = {rank: number for rank, value in enumerate(held) if (number := number_of(value)) is not None}
    if len(numbers) == len(held) >= FEWEST and len(set(map(repr, held))) > 1:
        return _with_chart(table, _chart(numbers, values.extent))
    if held and all(is_table(value) for value in held):
        return _tables(held, values.extent, table.caption)
    summaries = [summary_of(value) for value in held]
    if summaries and all(each is not None for each in summaries):
        return _arrays([each for each in summaries if each is not None], values.extent, table.caption)
    return table_html(table)


def is_table(value: object) -> bool:
    """Return whether a value is a data frame, or another object with rows and its own HTML form."""
    return hasattr(type(value), "_repr_html_") and hasattr(type(value), "columns") and hasattr(type(value), "__len__")


def _tables(values: Sequence[Any], extent: Extent, caption: str) -> str:
    """Show tables: each distinct one once, with its ranks, in rank order."""
    alike: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        alike.setdefault(value._repr_html_() or escape(repr(value)), []).append(rank)
    parts: list[str] = []
    for html, ranks in list(alike.items())[:MOST_TABLES]:
        where = format_points(ranks, extent, limit=6)
        label = f"[{format_ranks(ranks, limit=6)}] {where}".rstrip()
        parts.append(f'<div><div style="{tables.RANKS}">{escape(label)}</div>{html}</div>')
    more = len(alike) - MOST_TABLES
    note = f'<div style="{tables.DIM}">… and {more:,} more different tables</div>' if more > 0 else ""
    beside = "display:flex;flex-wrap:wrap;gap:8px 28px;align-items:flex-start"
    return (
        f'<div style="{tables.VIEW}"><div style="{tables.CAPTION}">{escape(caption)}</div>'
        f'<div style="{beside}">{"".join(parts)}</div>{note}</div>'
    )


def number_of(value: Any) -> float | None:
    """Return a number, or the element of a zero-dimensional array, as a number; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # an integer beyond the range of floats
            return None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        if str(getattr(value, "device", "cpu")) != "cpu":
            return None
        item = value.item()
        return float(item) if isinstance(item, int | float) and not isinstance(item, bool) else None
    return None


def _chart(numbers: dict[int, float], extent: Extent) -> str:
    out = outliers(numbers)
    lines: list[str] = []
    for rank in out[:_NAMED]:
        where = format_points([rank], extent)
        lines.append(
            f'<div style="{tables.BAD}">rank {rank}{f" ({escape(where)})" if where else ""}: '
            f"{escape(figure(numbers[rank]))} stands out</div>"
        )
    if len(out) > _NAMED:
        lines.append(f'<div style="{tables.BAD}">and ranks {format_ranks(out[_NAMED:], limit=8)}</div>')
    return f"<div>{over_ranks(numbers, out)}{''.join(lines)}</div>"


def _with_chart(table: TableView, chart: str) -> str:
    """Return a chart with a short table next to it, or with a long one below that can be expanded."""
    if len(table.rows) <= MOST_BESIDE:
        style = "display:flex;flex-wrap:wrap;gap:8px 28px;align-items:flex-start"
        return f'<div style="{tables.VIEW};{style}"><div>{table_html(table)}</div>{chart}</div>'
    caption = f'<div style="{tables.CAPTION}">{escape(table.caption)}</div>'
    rows = table_html(replace(table, caption=""))
    summary = f'<summary style="{tables.OPENS}">{len(table.rows)} rows</summary>'
    return f'<div style="{tables.VIEW}">{caption}{chart}<details>{summary}{rows}</details></div>'


def _arrays(summaries: Sequence[ArraySummary], extent: Extent, caption: str) -> str:
    """Return one row per rank: first those with elements that are not finite, then outliers, then the others."""
    out = {
        rank
        for of in ("low", "mean", "high")
        for rank in outliers({rank: getattr(each, of) for rank, each in enumerate(summaries)})
    }
    ranks = sorted(range(len(summaries)), key=lambda rank: (-summaries[rank].bad, rank not in out, rank))
    shown = sorted(ranks[:MOST_RANKS])
    heads = ("rank", "at", "type", "min", "mean", "max", "not finite", "")
    head = "".join(f'<th style="{tables.LEFT}">{name}</th>' for name in heads)
    rows = "".join(_array_row(rank, summaries[rank], extent, rank in out) for rank in shown)
    notes = [f"… and {len(ranks) - len(shown):,} more ranks"] if len(ranks) > len(shown) else []
    notes += ["of a sample of the elements"] if any(each.sampled for each in summaries) else []
    notes += [f"{format_ranks(sorted(out), limit=8)}: figures that stand out"] if out else []
    told = "".join(f'<div style="{tables.DIM}">{escape(note)}</div>' for note in notes)
    return (
        f'<div style="{tables.VIEW}"><div style="{tables.CAPTION}">{escape(caption)}</div>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{told}</div>"
    )


def _array_row(rank: int, found: ArraySummary, extent: Extent, out: bool) -> str:
    figures = ["" if math.isnan(each) else figure(each) for each in (found.low, found.mean, found.high)]
    bad = f"{found.bad:.2%}" if found.bad else ""
    mark = f";{tables.BAD}" if out else ""
    cells = [
        (tables.NAME, f"<b>{rank}</b>"),
        (tables.LEFT, escape(format_points([rank], extent))),
        (tables.LEFT, escape(found.kind)),
        *((f"{tables.RIGHT}{mark}", text) for text in figures),
        (f"{tables.RIGHT};{tables.BAD}", bad),
        (tables.LEFT, histogram(found.counts, found.low, found.high) if found.counts else ""),
    ]
    return f"<tr>{''.join(f'<td style={chr(34)}{style}{chr(34)}>{text}</td>' for style, text in cells)}</tr>"


@dataclass(frozen=True, slots=True)
class ArraySummary:
    """Summary statistics of an array or tensor, for comparing arrays at a glance.

    Elements that are not finite are counted, and left out of the other statistics.

    Attributes:
        kind: type and shape: `float32 [128, 64]`.
        low, mean, high: of the finite elements; NaN if there is none.
        bad: the fraction of elements that are not finite.
        counts: a histogram: the number of elements in each equal part of the range.
        sampled: whether only some elements were read.
    """

    kind: str
    low: float = math.nan
    mean: float = math.nan
    high: float = math.nan
    bad: float = 0.0
    counts: tuple[int, ...] = ()
    sampled: bool = False


def summary_of(value: Any) -> ArraySummary | None:
    """Return the summary of a numpy array, or of a tensor in this process's memory; None for anything else."""
    kind = f"{str(getattr(value, 'dtype', '')).removeprefix('torch.')} {list(getattr(value, 'shape', ()))}"
    try:
        elements = _elements(value)
    except Exception:  # a tensor without data, or of a type that numpy does not support
        return ArraySummary(kind)
    if elements is None:
        return None
    import numpy

    size = elements.size
    sampled = size > MOST_ELEMENTS
    if sampled:
        elements = elements[:: size // MOST_ELEMENTS]
    if not elements.size or elements.dtype.kind not in "biuf":
        return ArraySummary(kind, sampled=sampled)
    numbers = elements.astype(numpy.float64)
    finite = numbers[numpy.isfinite(numbers)]
    bad = 1 - finite.size / numbers.size
    if not finite.size:
        return ArraySummary(kind, bad=bad, sampled=sampled)
    low, high = float(finite.min()), float(finite.max())
    counts, _edges = numpy.histogram(finite, BINS, (low, high) if high > low else (low - 0.5, high + 0.5))
    return ArraySummary(kind, low, float(finite.mean()), high, bad, tuple(map(int, counts)), sampled)


def _elements(value: Any) -> Any:
    """Return the elements as a flat numpy array; None unless the value is an array with at least one dimension."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if not value.dim():
            return None
        plain = value.detach()
        if plain.device.type != "cpu":  # reading it would wait for a GPU
            raise ValueError("not in this process's memory")
        if plain.is_floating_point() and plain.dtype not in (torch.float16, torch.float32, torch.float64):
            plain = plain.float()
        return plain.reshape(-1).numpy()
    if numpy is not None and isinstance(value, numpy.ndarray) and value.ndim:
        return value.reshape(-1)
    return None


#: A future that is a cell's result is shown with its value if it is done within this time (seconds).
SOON = 0.3
#: The maximum number of rows of a table.
MOST_ROWS = 64
#: The maximum length of a displayed value (characters).
LONGEST = 2_000
#: The maximum number of kinds of failures shown for an error, and the maximum length of the message of each
#: (characters).
MOST_GROUPS, LONGEST_MESSAGE = 20, 160
#: The report of a sync. Its package is loaded on first use.
_RECEIPT = ("workspace_sync.model.sync_report", "SyncReport")
#: The comparison of two recorded training runs, likewise.
_COMPARISON = ("monarch_kernel.numerics.comparison", "Comparison")
_ERRORS = (ActorError, SupervisionError, MeshCellError)
#: How long a table waits for the states of processes (seconds).
STATUS_TIMEOUT = 1.0


def install(ip: Any, file_label: FileLabel = lambda _file: None) -> None:
    """Register all formatters with this shell.

    Args:
        ip: the shell.
        file_label: labels the files of cells in tracebacks.
    """
    formatters = ip.display_formatter.formatters
    for kind in _ERRORS:
        formatters["text/html"].for_type(kind, partial(error_html, file_label=file_label))
    formatters["text/plain"].for_type(Future, _future)
    formatters["text/html"].for_type(ValueMesh, _value_mesh)
    for kind in (*_TABLES, MeshStatus):
        ip.display_formatter.mimebundle_formatter.for_type(kind, _mesh_bundle)
    ip.display_formatter.mimebundle_formatter.for_type_by_name(*_COMPARISON, _comparison_bundle)
    formatters["text/plain"].for_type_by_name(*_RECEIPT, _receipt)
    formatters["text/html"].for_type_by_name(*_RECEIPT, partial(_html, receipt_table))


def remove(ip: Any) -> None:
    """Undo `install`."""
    formatters = ip.display_formatter.formatters
    formatters["text/plain"].pop(Future, None)
    for kind in (ValueMesh, *_ERRORS):
        formatters["text/html"].pop(kind, None)
    for kind in (*_TABLES, MeshStatus):
        ip.display_formatter.mimebundle_formatter.pop(kind, None)
    ip.display_formatter.mimebundle_formatter.pop(".".join(_COMPARISON), None)
    for mime in ("text/plain", "text/html"):
        formatters[mime].pop(".".join(_RECEIPT), None)


def _mesh_bundle(value: object, **_options: object) -> dict[str, object]:
    """Return a mesh or its status as a MIME bundle: a live view, HTML with its state and table, and text."""
    table = value.table() if isinstance(value, MeshStatus) else _TABLES[type(value)](value)
    bundle: dict[str, Any] = {"text/plain": repr(value), "text/html": table_html(table)}
    display = _display_of(value)
    return bundle if display is None else {**display.mime_bundle(bundle["text/html"]), "text/plain": repr(value)}


def _comparison_bundle(value: Comparison, **_options: object) -> dict[str, object]:
    """Return a comparison as a MIME bundle: its live grid of modules and steps, HTML and text."""
    from monarch_kernel.numerics.comparison_view import grid_data
    from monarch_kernel.widgets.open_views import live_view, view_bundle

    bundle: dict[str, object] = {"text/plain": value.text(), "text/html": value.html()}
    live = live_view(view="grid", grid=grid_data(value))
    return bundle if live is None else {**bundle, **view_bundle(live)}


def _display_of(value: object) -> MeshDisplay | None:
    """Return the view of a mesh, or of the mesh of a status; None if it was stopped, or has no ranks."""
    from monarch_kernel.widgets import show

    mesh = value
    if isinstance(value, MeshStatus):
        mesh = next((each for each in tool_runtime().list_proc_meshes() if each.name == value.mesh), None)
    try:
        display = None if mesh is None else show(mesh)
    except (RuntimeError, LookupError):
        return None
    if display is None or not display.keys:
        return None
    return display.of_ranks([rank.rank for rank in value.ranks]) if isinstance(value, MeshStatus) else display


def _html(table: Callable[[Any], TableView], value: object) -> str:
    return table_html(table(value))


def _value_mesh(values: ValueMesh[object]) -> str:
    values = values.to_show() if isinstance(values, CellValues) else values
    return value_mesh_html(values, value_mesh_table(values))


def _receipt(report: Any, printer: RepresentationPrinter, _cycle: bool) -> None:
    printer.text(table_text(receipt_table(report)))


def _future(future: Future[object], printer: RepresentationPrinter, _cycle: bool) -> None:
    """Print a future, with its value or error if available soon. A cell that ends in a call then shows the answer."""
    if future.what == "recv()":  # reading its value would consume the message
        printer.text(repr(future))
        return
    try:
        error = future.exception(SOON)
    except TimeoutError:
        printer.text(f"{future!r} (await it, or .get() it)")
        return
    printer.text(repr(future))
    if error is not None:
        printer.text(f"\n{type(error).__name__}: {error}")
    elif (value := future.get()) is not None:
        printer.text("\n")
        printer.pretty(value)


# -- tables ----------------------------------------------------------------------------------------


def value_mesh_table(values: ValueMesh[object]) -> TableView:
    """Return one row per distinct value, with the ranks that have it."""
    extent = values.extent
    alike: dict[str, list[int]] = {}
    for rank, value in enumerate(values.values()):
        alike.setdefault(repr(value), []).append(rank)
    rows = [
        [format_ranks(ranks, limit=6), format_points(ranks, extent, limit=6), _cut(text)]
        for text, ranks in alike.items()
    ]
    return _table(f"ValueMesh {_sizes(values)}", ["rank", "at", "value"], rows, "different values")


def proc_mesh_table(mesh: ProcMesh) -> TableView:
    """Return one row per process."""
    title = f"ProcMesh {mesh.name} {_sizes(mesh)}"
    points = _points(mesh)
    try:
        states = mesh.status().get(STATUS_TIMEOUT)
    except Exception:  # stopped, or its host does not answer: show what is known locally
        return _table(title, ["rank", "at"], points, "ranks")
    told = [[one.state, str(one.pid or ""), one.host, one.cause] for one in states.values()]
    rows = [[*point, *rest] for point, rest in zip(points, told, strict=True)]
    return _table(title, ["rank", "at", "state", "pid", "host", ""], rows, "ranks")


def actor_mesh_table(mesh: ActorMesh[object]) -> TableView:
    """Return one row per endpoint, with the first line of its docstring."""
    spec = mesh._spec
    rows = [[name, _first_line(getattr(spec.cls, name, None))] for name in sorted(spec.endpoints)]
    title = f"ActorMesh {mesh._name} {_sizes(mesh)}: {spec.cls.__name__} on mesh {mesh._mesh_name}"
    return _table(title, ["endpoint", ""], rows, "endpoints")


def host_mesh_table(mesh: HostMesh) -> TableView:
    """Return one row per host."""
    hosts = [mesh._hosts[rank] for rank in mesh._region.ranks()]
    rows = [[*point, host.name] for point, host in zip(_points(mesh), hosts, strict=True)]
    return _table(f"HostMesh {_sizes(mesh)}", ["rank", "at", "host"], rows, "hosts")


def _points(mesh: HostMesh | ProcMesh) -> list[list[str]]:
    extent = mesh.extent
    return [[str(rank), format_points([rank], extent)] for rank in range(extent.nelements)]


def _sizes(mesh: Any) -> str:
    sizes = ", ".join(f"{label}={size}" for label, size in mesh.extent.items())
    return f"({sizes})" if sizes else "(one)"


def _first_line(method: object) -> str:
    return (getattr(method, "__doc__", None) or "").strip().split("\n", 1)[0]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _table(title: str, headings: list[str], rows: list[list[str]], what: str) -> TableView:
    more = len(rows) - MOST_ROWS
    note = f"… and {more:,} more {what}" if more > 0 else ""
    return TableView(headings, rows[:MOST_ROWS], caption=title, note=note)


_TABLES: dict[type, Callable[[Any], TableView]] = {
    ProcMesh: proc_mesh_table,
    ActorMesh: actor_mesh_table,
    HostMesh: host_mesh_table,
}


# -- errors ----------------------------------------------------------------------------------------


def error_html(error: ActorError | SupervisionError | MeshCellError, file_label: FileLabel) -> str:
    """Return an error as HTML, with the failures of ranks in groups of equal tracebacks, the smallest first."""
    if isinstance(error, MeshCellError):
        title, failures, values = error.headline, list(error.failures), error.values
        notes = error.notes
    else:
        failures = _failures(error)
        values, notes = getattr(error, "values", None) or {}, []
        title = f"{type(error).__name__}: {str(error).split(chr(10), 1)[0]}"
    groups = grouped(failures)
    parts = [f'<div style="{tables.HEADLINE};{tables.BAD}">{escape(title)}</div>']
    parts += [_group(group, file_label, len(groups) == 1) for group in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        parts.append(f'<div style="{tables.DIM}">… and {len(groups) - MOST_GROUPS} more kinds of failures</div>')
    parts += [f'<div style="{tables.DIM}">{escape(note)}</div>' for note in notes]
    if values:
        who = f"{'rank' if len(values) == 1 else 'ranks'} {format_ranks(values, limit=8)}"
        parts.append(f'<div style="{tables.DIM}">{escape(who)} did not fail; .values has what they returned</div>')
    return f'<div style="{tables.VIEW}">{"".join(parts)}</div>'


def _failures(error: object) -> list[CellFailure]:
    return [
        CellFailure(
            each.rank,
            each.host,
            each.pid,
            fault=each.fault,
            death="" if each.fault is not None or each.death is None else each.death.cause,
        )
        for each in getattr(error, "failures", ())
    ]


def _group(group: Sequence[CellFailure], file_label: FileLabel, is_only: bool) -> str:
    ranks = format_ranks([failure.rank for failure in group], limit=8)
    line = group[0].line
    short = line if len(line) <= LONGEST_MESSAGE else f"{line[: LONGEST_MESSAGE - 1]}…"
    head = f'<span style="{tables.RANKS}">[{escape(ranks)}]</span> {escape(short)}'
    if group[0].fault is None:
        return f'<div style="{tables.NEWS}">{head}</div>'
    body = ansi_to_html("\n".join(group_lines(group, file_label)))
    return (
        f'<details{" open" if is_only else ""} style="{tables.NEWS}"><summary style="cursor:pointer">{head}</summary>'
        f'<div style="{tables.SCROLLED}"><pre style="{tables.UNWRAPPED}">{body}</pre></div></details>'
    )
