"""Where ranks of the client start once a host has the tree: in the tree, and with the environment's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterable

from monarch_kernel.introspection import ToolHost
from monarch_kernel.workers import Placement, place_ranks
from workspace_sync.model.workspace import CondaEnvironment, Workspace


def placement(workspace: Workspace, folder: str, env: CondaEnvironment | None = None) -> Placement:
    """The placement of ranks on a host that has switched.

    All paths lead through ``current``, so they stay valid at every later switch.

    Args:
        workspace: what was synced.
        folder: of the workspace on the host.
        env: the environment, if it was synced, too.
    """
    tree = os.path.join(folder, "current", "tree")
    folders = {here: os.path.join(tree, place) if place else tree for here, place in workspace.roots().items()}
    variables: dict[str, str | None] = {"WORKSPACE_DIR": tree}
    if env is None:
        return Placement(folders, variables)
    prefix = os.path.join(folder, "current", "env")
    folders[env.conda_prefix] = prefix
    conda = os.path.isdir(os.path.join(env.conda_prefix, "conda-meta"))
    variables["CONDA_PREFIX" if conda else "VIRTUAL_ENV"] = prefix
    return Placement(folders, variables, os.path.join(prefix, "bin", "python"))


def place(workspace: Workspace, hosts: Iterable[tuple[ToolHost, str, bool]]) -> None:
    """Have ranks start in the trees of some hosts.

    Args:
        workspace: what was synced.
        hosts: hosts that have it, each with the workspace's folder on it, and whether the environment is there.
    """
    asked = [
        place_ranks(host.mesh, placement(workspace, folder, workspace.env if has_env else None))
        for host, folder, has_env in hosts
    ]
    for each in asked:
        each.get()
