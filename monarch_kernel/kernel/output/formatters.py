"""Format the runtime's objects as results of cells: tables for meshes and values, futures with their results, errors.

The runtime does not depend on IPython, so this module registers formatters for its types with the shell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from monarch_kernel.actor import ActorMesh, Future, HostMesh, ProcMesh, ValueMesh
from monarch_kernel.display import styles
from monarch_kernel.display.tables import TableView, table_html, table_text
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.cell_values import CellValues
from monarch_kernel.kernel.output.ansi import ansi_to_html
from monarch_kernel.kernel.output.cell_errors import CellFailure, MeshCellError, group_lines, grouped
from monarch_kernel.kernel.output.fault_text import FileLabel
from monarch_kernel.kernel.output.mesh_tables import MeshStatus
from monarch_kernel.kernel.output.value_views import value_mesh_html
from monarch_kernel.meshes import format_points, format_ranks
from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from workspace_sync.receipt import receipt_table

if TYPE_CHECKING:
    from monarch_kernel.widgets.mesh_display import MeshDisplay

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
    for mime in ("text/plain", "text/html"):
        formatters[mime].pop(".".join(_RECEIPT), None)


def _mesh_bundle(value: Any, **_options: Any) -> dict[str, Any]:
    """Return a mesh or its status as a MIME bundle: a live view, HTML with its state and table, and text."""
    table = value.table() if isinstance(value, MeshStatus) else _TABLES[type(value)](value)
    bundle: dict[str, Any] = {"text/plain": repr(value), "text/html": table_html(table)}
    display = _display_of(value)
    return bundle if display is None else {**display.mime_bundle(bundle["text/html"]), "text/plain": repr(value)}


def _display_of(value: Any) -> MeshDisplay | None:
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


def _html(table: Callable[[Any], TableView], value: Any) -> str:
    return table_html(table(value))


def _value_mesh(values: ValueMesh[Any]) -> str:
    values = values.to_show() if isinstance(values, CellValues) else values
    return value_mesh_html(values, value_mesh_table(values))


def _receipt(report: Any, printer: Any, _cycle: bool) -> None:
    printer.text(table_text(receipt_table(report)))


def _future(future: Future[Any], printer: Any, _cycle: bool) -> None:
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


def value_mesh_table(values: ValueMesh[Any]) -> TableView:
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


def actor_mesh_table(mesh: ActorMesh[Any]) -> TableView:
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


def _points(mesh: Any) -> list[list[str]]:
    extent = mesh.extent
    return [[str(rank), format_points([rank], extent)] for rank in range(extent.nelements)]


def _sizes(mesh: Any) -> str:
    sizes = ", ".join(f"{label}={size}" for label, size in mesh.extent.items())
    return f"({sizes})" if sizes else "(one)"


def _first_line(method: Any) -> str:
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
    parts = [f'<div style="{styles.HEADLINE};{styles.BAD}">{escape(title)}</div>']
    parts += [_group(group, file_label, len(groups) == 1) for group in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        parts.append(f'<div style="{styles.DIM}">… and {len(groups) - MOST_GROUPS} more kinds of failures</div>')
    parts += [f'<div style="{styles.DIM}">{escape(note)}</div>' for note in notes]
    if values:
        who = f"{'rank' if len(values) == 1 else 'ranks'} {format_ranks(values, limit=8)}"
        parts.append(f'<div style="{styles.DIM}">{escape(who)} did not fail; .values has what they returned</div>')
    return f'<div style="{styles.VIEW}">{"".join(parts)}</div>'


def _failures(error: Any) -> list[CellFailure]:
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
    head = f'<span style="{styles.RANKS}">[{escape(ranks)}]</span> {escape(short)}'
    if group[0].fault is None:
        return f'<div style="{styles.NEWS}">{head}</div>'
    body = ansi_to_html("\n".join(group_lines(group, file_label)))
    return (
        f'<details{" open" if is_only else ""} style="{styles.NEWS}"><summary style="cursor:pointer">{head}</summary>'
        f'<div style="{styles.SCROLLED}"><pre style="{styles.UNWRAPPED}">{body}</pre></div></details>'
    )
