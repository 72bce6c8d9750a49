"""Display a mesh in a cell: a live view, static HTML of its state, and text."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from monarch_kernel.actor import ActorMesh, HostMesh, ProcMesh
from monarch_kernel.display.tables import table_text
from monarch_kernel.introspection import whole_of
from monarch_kernel.meshes import list_proc_meshes
from monarch_kernel.watch import RankState, Snapshot, watch
from monarch_kernel.watch.status_table import status_tables
from monarch_kernel.widgets.lookup import key_of
from monarch_kernel.widgets.mesh_html import meshes_html
from monarch_kernel.widgets.open_views import live_view, view_bundle

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

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, Any]:
        return self.mime_bundle()

    def of_ranks(self, ranks: Collection[int]) -> MeshDisplay:
        """Return the same view of some ranks."""
        size = len(self.snapshot.ranks[self.keys[0]])
        return MeshDisplay(self.snapshot, self.keys, ranks if len(ranks) < size else ())

    def mime_bundle(self, details: str = "") -> dict[str, Any]:
        """Return the MIME bundle: a live view, HTML and text, of which a front end shows the first that it supports.

        Args:
            details: HTML that opens below the view, instead of the table of the ranks.
        """
        html = meshes_html(self.snapshot, self._made, self.keys, self.ranks, details) or "<div>No mesh is up.</div>"
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": html}
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
