"""The meshes of this controller: ``list_proc_meshes``, ``get_mesh``, and being told ``on_change``.

With them, how rank sets are written and read: ``format_ranks``, ``format_points``, ``parse_ranks``.
"""

from monarch_kernel.runtime.actor.life import get_mesh, list_proc_meshes, on_change
from monarch_kernel.runtime.mesh.rankset import format_points, format_ranks, parse_ranks

__all__ = ["format_points", "format_ranks", "get_mesh", "list_proc_meshes", "on_change", "parse_ranks"]
