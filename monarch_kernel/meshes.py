"""The meshes of this controller: ``list_proc_meshes``, ``get_mesh``, and ``on_change`` for notifications.

Kept meshes outlive their controller. ``keep`` starts a host for them, ``kept`` lists them, ``kept_ranks`` and
``kept_logs`` show what runs on them, ``attach`` takes them over, and ``end_kept`` ends them. ``respawn_actors``
recreates the actors of live processes. ``format_ranks``, ``name_ranks``, ``format_points`` and ``parse_ranks``
convert sets of ranks from and to text.

This module only exports names; ``monarch_kernel.runtime`` has the code. ``listens``, ``start_daemon``,
``make_job_folder`` and ``remove_job_folder`` have moved to ``monarch_kernel.private_files`` and
``monarch_kernel.workers``; importing them from here still works.
"""

from monarch_kernel.private_files import listens
from monarch_kernel.protocol.kept_mesh import KeptInfo, KeptMesh, KeptRank
from monarch_kernel.runtime.actor.healing.heal_mesh import actor_meshes_on, respawn_actors
from monarch_kernel.runtime.actor.kept.inspection import KeptError, kept, kept_logs, kept_place, kept_ranks
from monarch_kernel.runtime.actor.kept.kept_host import (
    KeptHost,
    attach,
    end_kept,
    held,
    keep,
    kept_host_of,
    taken_over,
)
from monarch_kernel.runtime.actor.meshes.mesh_registry import get_mesh, list_proc_meshes, on_change
from monarch_kernel.runtime.mesh.rankset import format_points, format_ranks, name_ranks, parse_ranks
from monarch_kernel.workers import make_job_folder, remove_job_folder, start_daemon

__all__ = [
    "KeptError",
    "KeptHost",
    "KeptInfo",
    "KeptMesh",
    "KeptRank",
    "actor_meshes_on",
    "attach",
    "end_kept",
    "format_points",
    "format_ranks",
    "get_mesh",
    "held",
    "keep",
    "kept",
    "kept_host_of",
    "kept_logs",
    "kept_place",
    "kept_ranks",
    "list_proc_meshes",
    "listens",
    "make_job_folder",
    "name_ranks",
    "on_change",
    "parse_ranks",
    "remove_job_folder",
    "respawn_actors",
    "start_daemon",
    "taken_over",
]
