"""Set the folders in which ranks start: the controller's folders, mapped to folders on each host by a sync.

The host agent applies a placement (``protocol.placement``) to every rank that it starts for this controller, whichever
process requests it, including healing. The controller keeps its placements, to translate paths back, and to apply them
again on an agent that replaces a dead one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel.protocol.messages import ProcRef, SetPlacement
from monarch_kernel.protocol.placement import Placement, is_below, moved
from monarch_kernel.runtime.actor.calls.pending import ask_agent
from monarch_kernel.runtime.actor.meshes.actor_mesh import settled
from monarch_kernel.runtime.actor.process import System, get_system, started
from monarch_kernel.runtime.node.future import Future, gathered, nothing
from monarch_kernel.subscriptions import Subscribers

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh

# The part of a path that replaces `current/tree` if symbolic links were resolved, as in a working directory, for the
# present and past trees of a host (docs/sync.md).
_RESOLVED = r"/(?:generations/[^/]+/tree|slots/[^/]+)(?=/|$)"


class Placements:
    """The placements known to this process: in a controller, those of its hosts; in a rank, that of its own host.

    Attributes:
        by_agent: by the id of the host's agent.
        changed: notified with that id.
    """

    def __init__(self) -> None:
        self.by_agent: dict[str, Placement] = {}
        self.changed: Subscribers[[str]] = Subscribers("a record of placements")
        self._back: dict[str, str] = {}  # the controller's folder of each folder of any host
        self._folders: set[str] = set()  # the controller's folders

    def place(self, system: System, agent: ProcRef, placement: Placement) -> Future[Any]:
        """Add a placement to that of a host; done when the host's agent applies it, or is dead."""
        known = self.by_agent.get(agent.id)
        return self._apply(system, agent, placement if known is None else known.updated(placement))

    def remove(self, system: System, agent: ProcRef, folder: str) -> Future[Any] | None:
        """Remove a folder of a host from its placement. Return None if it has none."""
        known = self.by_agent.get(agent.id)
        return None if known is None else self._apply(system, agent, known.without(folder))

    def _apply(self, system: System, agent: ProcRef, whole: Placement) -> Future[object]:
        self._record(agent.id, whole)
        self.changed.notify(agent.id)
        return settled(ask_agent(system.node, agent, f"place ranks on {agent.host}", SetPlacement, whole))

    def renew(self, system: System, dead: Sequence[str], agent: ProcRef) -> None:
        """Apply the placements of a host's dead agents to their successor."""
        for name in dead:
            placement = self.by_agent.pop(name, None)
            if placement is not None:
                self.place(system, agent, placement)

    def adopt(self, agent: str, placement: Placement) -> None:
        """In a rank: record the placement of its host, under which it was started."""
        self._record(agent, placement)
        # The kernel resolves symbolic links in a working directory, and the links may change later.
        self._back.update({os.path.realpath(there): here for here, there in placement.folders.items()})

    def _record(self, agent: str, placement: Placement) -> None:
        self.by_agent[agent] = placement
        self._back.update({there: here for here, there in placement.folders.items()})
        self._folders.update(placement.folders)

    def at_controller(self, path: str) -> str:
        """Return a folder of this process as its controller names it, spelled as in a placement if it is in one."""
        if not self._folders or not os.path.isabs(path):
            return path
        there = self.client_path(path)
        if there is not None:
            return there
        real = os.path.realpath(path)
        return real if self._has(real) and not self._has(path) else path

    def _has(self, path: str) -> bool:
        return any(is_below(path, folder) for folder in self._folders)

    def client_path(self, path: str) -> str | None:
        """Return the controller's path for a path of a placed folder on any host; None if it is in none."""
        found = moved(path, self._back)
        if found is None and self._back and re.search(_RESOLVED, path):
            found = moved(re.sub(_RESOLVED, "/current/tree", path, count=1), self._back)
        return found


def place_ranks(hosts: HostMesh | ProcMesh, placements: Placement | Sequence[Placement]) -> Future[None]:
    """Start the ranks of this controller in other folders of hosts from now on.

    A rank starts in the host's folder for this process's working directory, and imports from the host's folders for
    those of ``sys.path``, if they exist there. This applies to all meshes that are spawned on these hosts from now on,
    through any handle and also by actors, and to healed ranks. Running ranks are not affected. A further placement adds
    to the earlier ones; where folders overlap, the newer one counts.

    Place again after the content of a folder has changed: host agents then load preloaded modules again.

    Args:
        hosts: all hosts, or a slice of them; a proc mesh stands for its hosts.
        placements: one for all hosts, or one for each in the order of the mesh.

    Returns:
        A future that is done when all host agents apply it. Dead hosts are left out.

    Raises:
        RuntimeError: this is not the controller.
        ValueError: the number of placements differs from the number of hosts, or a folder is not an absolute path.
    """
    system = get_system()
    if not system.is_root:
        raise RuntimeError("place_ranks() is for the controller: ranks start where it has placed them")
    agents = _agents_of(hosts)
    each = [placements] * len(agents) if isinstance(placements, Placement) else list(placements)
    if len(each) != len(agents):
        raise ValueError(f"place_ranks() got {len(each)} placements for {len(agents)} hosts")
    pairs = zip(agents, map(_spelled, each), strict=True)
    asked = [system.placements.place(system, agent, placement) for agent, placement in pairs]
    return gathered(system.node.poller, asked, "place_ranks").then(nothing)


def unplace_ranks(hosts: HostMesh | ProcMesh, folder: str) -> Future[None]:
    """Stop starting ranks in a folder of hosts, or with an interpreter in it, because the folder is to be removed.

    Args:
        hosts: all hosts, or a slice of them; a proc mesh stands for its hosts.
        folder: an absolute path on these hosts; placed folders inside it are included.

    Returns:
        A future that is done when all host agents apply it. Ranks then start in the hosts' folders of the same paths.

    Raises:
        RuntimeError: this is not the controller.
    """
    system = get_system()
    if not system.is_root:
        raise RuntimeError("unplace_ranks() is for the controller: ranks start where it has placed them")
    asked = [system.placements.remove(system, agent, folder) for agent in _agents_of(hosts)]
    return gathered(system.node.poller, [each for each in asked if each is not None], "unplace_ranks").then(nothing)


def _agents_of(hosts: HostMesh | ProcMesh) -> list[ProcRef]:
    mesh: Any = getattr(hosts, "host_mesh", hosts)
    return [host.agent for host in mesh._selected()]


def _spelled(placement: Placement) -> Placement:
    """Return the placement with both names of a folder that is reached through symbolic links."""
    for path in (*placement.folders, *placement.folders.values()):
        if not os.path.isabs(path):
            raise ValueError(f"place_ranks(): {path!r} is not an absolute path")
    real = {os.path.realpath(here): there for here, there in placement.folders.items()}
    return msgspec.structs.replace(placement, folders={**real, **placement.folders})


def placement_of(hosts: HostMesh | ProcMesh) -> list[Placement | None]:
    """Return the placement of this controller's ranks on each of these hosts; None: nothing was placed there."""
    known = get_system().placements.by_agent
    return [known.get(agent.id) for agent in _agents_of(hosts)]


def client_path(path: str) -> str | None:
    """Return this controller's path of a file in a placed folder of any host, for sources; None if it is in none."""
    return get_system().placements.client_path(path) if started() else None
