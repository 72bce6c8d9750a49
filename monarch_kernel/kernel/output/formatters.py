"""Formats the runtime's own objects as results of cells: tables for meshes and values, and futures with their results.

The runtime does not depend on IPython, so this module registers its types with the shell's formatters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from monarch_kernel.actor import ActorMesh, Future, HostMesh, ProcMesh, ValueMesh
from monarch_kernel.display.tables import TableView, table_html, table_text
from monarch_kernel.meshes import format_points, format_ranks
from workspace_sync.receipt import receipt_table

#: A future that is a cell's result is shown with its value if it is done within this time (seconds).
SOON = 0.3
#: How many rows of a table are shown.
MOST_ROWS = 64
#: How much of a value is shown (characters).
LONGEST = 2_000
#: The receipt of a sync, whose package is loaded when it is first used.
_RECEIPT = ("workspace_sync.model.report", "SyncReport")
#: How long a table waits for the states of processes (seconds).
STATUS_TIMEOUT = 1.0


def install(ip: Any) -> None:
    """Register all formatters with this shell."""
    formatters = ip.display_formatter.formatters
    formatters["text/plain"].for_type(Future, _future)
    for kind, table in _TABLES.items():
        formatters["text/html"].for_type(kind, partial(_html, table))
    formatters["text/plain"].for_type_by_name(*_RECEIPT, _receipt)
    formatters["text/html"].for_type_by_name(*_RECEIPT, partial(_html, receipt_table))


def remove(ip: Any) -> None:
    """Undo `install`."""
    formatters = ip.display_formatter.formatters
    formatters["text/plain"].pop(Future, None)
    for kind in _TABLES:
        formatters["text/html"].pop(kind, None)
    for mime in ("text/plain", "text/html"):
        formatters[mime].pop(".".join(_RECEIPT), None)


def _html(table: Callable[[Any], TableView], value: Any) -> str:
    return table_html(table(value))


def _receipt(report: Any, printer: Any, _cycle: bool) -> None:
    printer.text(table_text(receipt_table(report)))


def _future(future: Future[Any], printer: Any, _cycle: bool) -> None:
    """A future, with its value or error if available soon, so that a cell that ends in a call shows its answer."""
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
    """One row for each distinct value, with the ranks that have it."""
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
    """One row for each process."""
    title = f"ProcMesh {mesh.name} {_sizes(mesh)}"
    points = _points(mesh)
    try:
        states = mesh.status().get(STATUS_TIMEOUT)
    except Exception:  # stopped, or its host does not answer: the table shows what is known locally
        return _table(title, ["rank", "at"], points, "ranks")
    told = [[one.state, str(one.pid or ""), one.host, one.cause] for one in states.values()]
    rows = [[*point, *rest] for point, rest in zip(points, told, strict=True)]
    return _table(title, ["rank", "at", "state", "pid", "host", ""], rows, "ranks")


def actor_mesh_table(mesh: ActorMesh[Any]) -> TableView:
    """One row for each endpoint, with the first line of its docstring."""
    spec = mesh._spec
    rows = [[name, _first_line(getattr(spec.cls, name, None))] for name in sorted(spec.endpoints)]
    title = f"ActorMesh {mesh._name} {_sizes(mesh)}: {spec.cls.__name__} on mesh {mesh._mesh_name}"
    return _table(title, ["endpoint", ""], rows, "endpoints")


def host_mesh_table(mesh: HostMesh) -> TableView:
    """One row for each host."""
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
    ValueMesh: value_mesh_table,
    ProcMesh: proc_mesh_table,
    ActorMesh: actor_mesh_table,
    HostMesh: host_mesh_table,
}
