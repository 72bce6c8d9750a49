"""Where symbolic links lead: within the workspace, or out of it."""

from __future__ import annotations

import os


def inner_target(target: bytes, folder: bytes, place: bytes, base: bytes, roots: dict[bytes, bytes]) -> bytes | None:
    """The target that a link has in the tree; None if it leads out of the workspace.

    A relative link that stays below its root is kept as it is. Others that lead into the workspace, such as absolute
    ones, become relative, since the tree is at another path on each host.

    Args:
        target: of the link, which need not exist.
        folder: the folder of the link (absolute).
        place: that folder's path in the tree.
        base: the root of the workspace, or the followed link, that the folder was reached from.
        roots: the folders of the workspace (links resolved) and their places.
    """
    if not target.startswith(b"/"):
        parts = [part for part in target.split(b"/") if part not in (b"", b".")]
        up = 0
        while up < len(parts) and parts[up] == b"..":
            up += 1
        if b".." not in parts[up:] and up <= folder[len(base) :].count(b"/"):
            return target
    real = os.path.realpath(os.path.join(folder, target))
    for root, root_place in roots.items():
        if real == root or real.startswith(root.rstrip(b"/") + b"/"):
            there = b"/".join(part for part in (root_place, real[len(root) :].strip(b"/")) if part)
            return os.path.relpath(b"/" + there, b"/" + place)
    return None
