"""What a user is told to do about dead ranks, which depends on the engine, and on who has started them."""

from __future__ import annotations

from monarch_kernel.engines import engine


def replacing(mesh: str, whom: str = "them") -> str:
    """How to get dead ranks of a mesh back, as a clause: `%mesh heal m replaces them`."""
    if any(each.name == mesh and engine().is_joined(each) for each in engine().list_proc_meshes()):
        return f"what has started this job decides whether it starts {whom} again"
    if "heal" in engine().OFFERS:
        return f"%mesh heal {mesh} replaces {whom}"
    return f"%mesh restart {mesh} starts the whole mesh again"
