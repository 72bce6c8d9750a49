"""Display a mesh in a cell: a live view, static HTML of its state, and text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from monarch_kernel.actor import ActorMesh, HostMesh, ProcMesh
from monarch_kernel.display import tables
from monarch_kernel.display.quantities import duration, memory
from monarch_kernel.display.tables import table_html, table_text
from monarch_kernel.introspection import whole_of
from monarch_kernel.meshes import format_ranks, list_proc_meshes
from monarch_kernel.watch import watch
from monarch_kernel.watch.model import STATE_ORDER, HostView, MeshView, RankState, RankView, Snapshot
from monarch_kernel.watch.status_table import ending_text, status_tables
from monarch_kernel.widgets.open_views import live_view, view_bundle
from monarch_kernel.widgets.plotting import key_of

# Render the state of a mesh as HTML without a kernel or scripts, for saved notebooks. Pure.
#
# Ranks are cells, each with the shape and the colour of its state. With more than 256 ranks, hosts are bars. The
# shapes equal those of the live view (`labextension/src/views/glyphs.ts`).

#: The maximum number of ranks with separate cells. With more ranks, each host has a bar.
MOST_CELLS = 256
#: The maximum number of hosts that are shown, those with problems first.
MOST_HOSTS = 48
#: The maximum number of lines about problems.
MOST_NEWS = 8
#: The maximum number of ranks whose numbers are shown in their cells.
_MOST_NUMBERS = 64
#: The number of cells per line, and the number of ranks per bar if a host has very many.
_PER_LINE, _PER_BAR = 32, 256
#: The size of a cell, with the gap after it (pixels).
_CELL, _GAP, _NUMBER = 16, 3, 11
_BAR = 320

_BAD = (RankState.DEAD, RankState.UNRESPONSIVE, RankState.STOPPED, RankState.HEALING)
#: Boxes: filled, light with a line, a line, a dotted line, none; and the path drawn over it, in a box of 16 x 16.
_GLYPHS: dict[RankState, tuple[str, str]] = {
    RankState.DEAD: (
        "solid",
        "M4.2 5.6 5.6 4.2 8 6.6l2.4-2.4 1.4 1.4L9.4 8l2.4 2.4-1.4 1.4L8 9.4l-2.4 2.4-1.4-1.4L6.6 8z",
    ),
    RankState.UNRESPONSIVE: ("solid", "M6.9 3h2.2v6.2H6.9zM6.9 10.6h2.2v2.3H6.9z"),
    RankState.STOPPED: ("solid", "M4.6 3.8h2.4v8.4H4.6zM9 3.8h2.4v8.4H9z"),
    RankState.HEALING: ("solid", "M6.9 3.5h2.2v3.4h3.4v2.2H9.1v3.4H6.9V9.1H3.5V6.9h3.4z"),
    RankState.STARTING: ("dotted", "M8 4.5A3.5 3.5 0 1 0 11.5 8H9.9A1.9 1.9 0 1 1 8 6.1z"),
    RankState.RUNNING: ("tint", "M5.8 4v8L12 8z"),
    RankState.IDLE: ("outline", ""),
    RankState.ENDED: ("none", "M4 7.2h8v1.6H4z"),
}
_BOXES = {
    "solid": 'fill="{0}"',
    "tint": 'fill="{0}" fill-opacity=".22" stroke="{0}"',
    "outline": 'fill="none" stroke="{0}" stroke-opacity=".8"',
    "dotted": 'fill="none" stroke="{0}" stroke-dasharray="2 2"',
}


def meshes_html(
    snapshot: Snapshot, now: float, keys: Sequence[str] = (), ranks: Sequence[int] = (), details: str = ""
) -> str:
    """Render several meshes, one below the other.

    Args:
        snapshot: the known state.
        now: seconds since 1970.
        keys: the keys of the meshes; empty for all.
        ranks: the ranks that are shown; empty for all.
        details: HTML that can be opened below; "": a table of what the ranks of each mesh run.
    """
    shown = [key for key in keys or snapshot.meshes if key in snapshot.meshes]
    return "".join(mesh_html(snapshot, key, now, ranks, details) for key in shown)


def mesh_html(snapshot: Snapshot, key: str, now: float, ranks: Sequence[int] = (), details: str = "") -> str:
    """Render one mesh: name, counts of states, problems with their causes, ranks, and a table that can be opened.

    Args:
        snapshot: the known state, which includes the mesh.
        key: the key of the mesh.
        now: seconds since 1970.
        ranks: the ranks that are shown; empty for all.
        details: as for `meshes_html`.
    """
    mesh = snapshot.meshes[key]
    wanted = frozenset(ranks)
    views = [view for view in snapshot.ranks[key] if not wanted or view.rank in wanted]
    parts = [
        _title(mesh, views, snapshot.time),
        *_news(mesh, views, snapshot.hosts, now),
        _states(views, snapshot, now),
    ]
    if not details:
        (table,) = status_tables(snapshot, now, key, wanted)
        details = table_html(table.view)
    parts.append(f'<details><summary style="{tables.OPENS}">details</summary>{details}</details>')
    return f'<div style="{tables.VIEW};margin:2px 0 8px">{"".join(parts)}</div>'


def _title(mesh: MeshView, views: Sequence[RankView], when: float) -> str:
    sizes = ", ".join(f"{label}={size}" for label, size in zip(mesh.labels, mesh.sizes, strict=True))
    counts = Counter(view.state for view in views)
    told = [
        f'<span style="white-space:nowrap">{_icon(state)} {counts[state]:,} {state.value}</span>'
        for state in RankState
        if counts[state]
    ]
    about = [f"{len(views):,} rank{'s' * (len(views) != 1)}{f' ({escape(sizes)})' if len(mesh.labels) > 1 else ''}"]
    about += ["in use"] if mesh.current else []
    about += [f"kept as {escape(mesh.kept)}"] if mesh.kept else []
    about += [f"at {time.strftime('%H:%M:%S', time.localtime(when))}"] if when else []
    return (
        f'<div><span style="{tables.VIEW_TITLE}">mesh {escape(mesh.name)}</span> '
        f'<span style="{tables.DIM}">{" · ".join(about)}</span></div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:2px 14px;margin:3px 0">{"".join(told)}</div>'
    )


def _news(mesh: MeshView, views: Sequence[RankView], hosts: Mapping[str, HostView], now: float) -> list[str]:
    """Describe the problems and their causes, one line per cause."""
    told = [f"{escape(mesh.hang)}"] if mesh.hang else []
    told += [
        f"host {escape(hosts[key].name)} is gone: {escape(hosts[key].gone)}"
        for key in mesh.hosts
        if key in hosts and hosts[key].gone
    ]
    ending = ending_text(mesh, hosts, now)
    told += [escape(ending)] if ending else []
    causes: dict[tuple[RankState, str], list[int]] = {}
    for view in views:
        if view.state in _BAD:
            causes.setdefault((view.state, _cause(view)), []).append(view.rank)
    for (state, why), ranks in sorted(causes.items(), key=lambda each: (STATE_ORDER[each[0][0]], each[1])):
        who = f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks, limit=8)}"
        told.append(f"<b>{escape(who)}</b> {state.value}{f': {escape(why)}' if why else ''}")
    lines = [f'<div style="{tables.NEWS}">{text}</div>' for text in told[:MOST_NEWS]]
    if len(told) > MOST_NEWS:
        lines.append(f'<div style="{tables.NEWS}">… and {len(told) - MOST_NEWS} more</div>')
    return lines


def _cause(view: RankView) -> str:
    stop = view.stop
    if view.state is RankState.STOPPED and stop is not None:
        where = f"{stop.file}:{stop.line}" + (f" in {stop.function}" if stop.function else "")
        return f"{where} ({stop.reason}{f': {stop.text}' if stop.text else ''})" if stop.file else stop.reason
    return view.cause


# -- ranks ---------------------------------------------------------------------------------------------


def _states(views: Sequence[RankView], snapshot: Snapshot, now: float) -> str:
    by_host: dict[str, list[RankView]] = {}
    for view in views:
        by_host.setdefault(view.host, []).append(view)
    several = len(by_host) > 1
    if len(views) > MOST_CELLS:
        return _bars(by_host, snapshot.hosts)
    numbers = len(views) <= _MOST_NUMBERS
    rows = [
        f"{_host_label(snapshot.hosts.get(key), key) if several else ''}{_cells(each, numbers, now)}"
        for key, each in by_host.items()
    ]
    inner = "".join(f"<div>{row}</div>" for row in rows)
    return f'<div style="display:flex;flex-wrap:wrap;gap:6px 18px;margin:4px 0">{inner}</div>'


def _host_label(host: HostView | None, key: str) -> str:
    return f'<div style="{tables.DIM};font-size:12px">{escape(host.name if host is not None else key)}</div>'


def _cells(views: Sequence[RankView], numbers: bool, now: float) -> str:
    """Render cells in lines of 32. Lines wrap if the page is narrower."""
    inner = "".join(_cell(view, numbers, now) for view in views)
    width = _PER_LINE * (_CELL + (10 if numbers else 0) + _GAP)
    return f'<div style="display:flex;flex-wrap:wrap;gap:{_GAP}px;max-width:{width}px">{inner}</div>'


def _cell(view: RankView, number: bool, now: float) -> str:
    width, height = (_CELL + 10, _CELL + _NUMBER) if number else (_CELL, _CELL)
    text = (
        f'<text x="{width / 2:g}" y="{height - 1}" text-anchor="middle" font-size="10" fill="currentColor" '
        f'fill-opacity=".7">{view.rank}</text>'
        if number
        else ""
    )
    older = f'<path d="M9 0h7v7z" fill="{tables.STATE_COLOURS["stopped"]}"/>' if view.older else ""
    shape = f'<g transform="translate({(width - _CELL) / 2:g} 0)">{_shape(view.state)}{older}</g>'
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="rank {view.rank} {view.state.value}" '
        f'style="display:block"><title>{escape(_tooltip(view, now))}</title>{shape}{text}</svg>'
    )


def _tooltip(view: RankView, now: float) -> str:
    lines = [f"rank {view.rank}: {view.state.value}{f' (pid {view.pid})' if view.pid else ''}"]
    if view.doing:
        lines.append(f"{view.doing}{f', for {duration(max(0.0, now - view.doing_since))}' if view.doing_since else ''}")
    lines += [why] if (why := _cause(view)) else []
    lines += [f"{view.waiting} messages wait"] if view.waiting else []
    lines += [memory(view.rss)] if view.rss else []
    lines += ["runs an older tree than its host has"] if view.older else []
    return "\n".join(lines)


def _icon(state: RankState) -> str:
    return (
        '<svg width="13" height="13" viewBox="0 0 16 16" aria-hidden="true" style="vertical-align:-2px">'
        f"{_shape(state)}</svg>"
    )


def _shape(state: RankState) -> str:
    box, path = _GLYPHS[state]
    colour = tables.STATE_COLOURS[state.value]
    mark = f'<path d="{path}" fill="{"#fff" if box == "solid" else colour}"/>' if path else ""
    if box == "none":
        return mark
    edge = 0 if box == "solid" else 1
    size = 16 - 2 * edge
    return f'<rect x="{edge}" y="{edge}" width="{size}" height="{size}" rx="3" {_BOXES[box].format(colour)}/>{mark}'


# -- many ranks ------------------------------------------------------------------------------------------


def _bars(by_host: Mapping[str, Sequence[RankView]], hosts: Mapping[str, HostView]) -> str:
    """Render a bar for each host, or for each 256 ranks of one. Its parts are the states, the worst first."""
    bars: list[tuple[str, Sequence[RankView]]] = []
    for key, views in by_host.items():
        host = hosts.get(key)
        name = host.name if host is not None else key
        bars += [(name, views[at : at + _PER_BAR]) for at in range(0, len(views), _PER_BAR)]
    worst = sorted(bars, key=lambda bar: (min(STATE_ORDER[view.state] for view in bar[1]), bar[1][0].rank))
    shown = sorted(worst[:MOST_HOSTS], key=lambda bar: bar[1][0].rank)
    most = max(len(views) for _, views in bars)
    rows = "".join(_bar(name, views, most) for name, views in shown)
    rest = [view for _, views in worst[MOST_HOSTS:] for view in views]
    note = ""
    if rest:
        counts = Counter(view.state for view in rest)
        told = ", ".join(f"{counts[state]:,} {state.value}" for state in RankState if counts[state])
        note = f'<div style="{tables.DIM}">… and {len(worst) - MOST_HOSTS} more hosts: {told}</div>'
    return f'<div style="margin:4px 0">{rows}</div>{note}'


def _bar(name: str, views: Sequence[RankView], most: int) -> str:
    counts = Counter(view.state for view in views)
    width = max(24.0, _BAR * len(views) / most)
    at = 0.0
    parts: list[str] = []
    for state in (state for state in RankState if counts[state]):
        # A problem stays visible even if it concerns one rank in a thousand.
        size = max(6.0 if state in _BAD else 1.0, width * counts[state] / len(views))
        size = min(size, width - at)
        box = _GLYPHS[state][0]
        style = _BOXES["tint" if box == "none" else box].format(tables.STATE_COLOURS[state.value])
        title = f"<title>{counts[state]:,} {state.value}</title>"
        parts.append(f'<rect x="{at:.1f}" y="1" width="{max(0.0, size - 1):.1f}" height="10" {style}>{title}</rect>')
        at += size
    ranks = [view.rank for view in views]
    bad = [view.rank for view in views if view.state in _BAD]
    bad_text = f" <b>{len(bad)} of {len(views)}: {escape(format_ranks(bad, limit=4))}</b>" if bad else ""
    label = f"{name}: " + ", ".join(f"{counts[state]:,} {state.value}" for state in RankState if counts[state])
    return (
        '<div style="display:flex;gap:8px;align-items:center;flex-wrap:wrap">'
        f'<span style="{tables.DIM};width:11em;overflow:hidden;text-overflow:ellipsis;white-space:nowrap">'
        f"{escape(name)} {escape(format_ranks(ranks, limit=1))}</span>"
        f'<svg width="{_BAR}" height="12" viewBox="0 0 {_BAR} 12" role="img" aria-label="{escape(label, quote=True)}">'
        f"{''.join(parts)}</svg><span>{bad_text}</span></div>"
    )


#: The time to wait for reports of the hosts (seconds).
REPORT_WAIT = 0.6


class MeshDisplay:
    """A view of one or more meshes. It is shown as the last expression of a cell.

    Attributes:
        snapshot: the state when the view was created.
        keys: the keys of the meshes that it shows.
        ranks: for a single mesh, the ranks that are shown; empty for all.
    """

    def __init__(self, snapshot: Snapshot, keys: Sequence[str], ranks: Collection[int] = ()) -> None:
        self.snapshot = snapshot
        self.keys = tuple(key for key in keys if key in snapshot.meshes)
        self.ranks = tuple(sorted(ranks))
        self._made = time.time()

    def __repr__(self) -> str:
        found: list[str] = []
        for key in self.keys:
            found += [table_text(table.view) for table in status_tables(self.snapshot, self._made, key, self.ranks)]
        return "\n\n".join(found) or "No mesh is up."

    def _repr_html_(self) -> str:
        return meshes_html(self.snapshot, self._made, self.keys, self.ranks) or "<div>No mesh is up.</div>"

    def _repr_mimebundle_(self, **_options: object) -> dict[str, Any]:
        return self.mime_bundle()

    def of_ranks(self, ranks: Collection[int]) -> MeshDisplay:
        """Return the same view of some ranks."""
        size = len(self.snapshot.ranks[self.keys[0]])
        return MeshDisplay(self.snapshot, self.keys, ranks if len(ranks) < size else ())

    def mime_bundle(self, details: str = "") -> dict[str, object]:
        """Return the MIME bundle: a live view, HTML and text, of which a front end shows the first that it supports.

        Args:
            details: HTML that opens below the view, instead of the table of the ranks.
        """
        html = meshes_html(self.snapshot, self._made, self.keys, self.ranks, details) or "<div>No mesh is up.</div>"
        bundle: dict[str, object] = {"text/plain": repr(self), "text/html": html}
        mesh = self.keys[0] if len(self.keys) == 1 else ""
        # The view has the text, too. It remains if the mesh ends before a page shows the view.
        live = live_view(mesh=mesh, ranks=list(self.ranks), record=bundle["text/plain"]) if self.keys else None
        if live is not None:
            bundle |= view_bundle(live)
        return bundle


def show(mesh: ProcMesh | ActorMesh[Any] | HostMesh) -> MeshDisplay:
    """Create a live view of a mesh of procs, the procs of an actor mesh, or all meshes on the hosts of a host mesh.

    Raises:
        TypeError: ``mesh`` is not a mesh.
        RuntimeError: the mesh was stopped.
    """
    if isinstance(mesh, HostMesh):
        keys = keys_on(mesh)
        return MeshDisplay(current_snapshot(keys), keys)
    whole = whole_of(mesh)
    if all(each is not whole.procs for each in list_proc_meshes()):
        raise RuntimeError(f"mesh {whole.procs.name} was stopped, so there is nothing to show")
    ranks = whole.ranks if len(whole.ranks) < len(whole.procs) else ()
    return MeshDisplay(current_snapshot([whole.uid]), [whole.uid], ranks)


def keys_on(hosts: HostMesh) -> list[str]:
    """Return the keys of the meshes that have ranks on these hosts."""
    chosen = {hosts._hosts[rank].name for rank in hosts._region.ranks()}
    return [key_of(mesh) for mesh in list_proc_meshes() if chosen & {ref.host for ref in mesh._target().procs}]


def current_snapshot(keys: Collection[str]) -> Snapshot:
    """Return the state that hosts and ranks of these meshes report now, or their last known state if they are late."""
    deadline = time.monotonic() + REPORT_WAIT
    with watch(period=0.05) as seen:
        seen.refresh(keys, REPORT_WAIT)
        snapshot = seen.snapshot()
        while not _reported(snapshot, keys) and (left := deadline - time.monotonic()) > 0:
            if next(seen.changes(left), None) is None:
                break
            snapshot = seen.snapshot()
    return snapshot


def _reported(snapshot: Snapshot, keys: Collection[str]) -> bool:
    """Return whether the host agents have reported all living ranks."""
    gone = (RankState.DEAD, RankState.ENDED, RankState.UNRESPONSIVE)
    return all(view.rss or view.state in gone for key in keys for view in snapshot.ranks.get(key, ())) and all(
        key in snapshot.meshes for key in keys
    )
