"""The meshes of a notebook: those that `%mesh up` started, and those that user code spawned."""

from __future__ import annotations

import weakref

from IPython.core.error import UsageError

from monarch_kernel.actor import ProcMesh
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.interrupts.interrupt_relay import Interruption
from monarch_kernel.kernel.managed_mesh import ManagedMesh, recall, remember
from monarch_kernel.kernel.provider_hosts import ProviderPlacements
from monarch_kernel.launchers.host_request import nearest
from monarch_kernel.subscriptions import Subscribers


class MeshSession:
    """The named meshes of one notebook, and which of them is in use."""

    def __init__(self) -> None:
        self._managed: dict[str, ManagedMesh] = {}
        self._current: str | None = None
        #: The provider hosts of meshes, by the names of the meshes, including hosts that are awaited.
        self.provider_hosts = ProviderPlacements()
        #: The last interruption of each mesh by `%mesh interrupt`.
        self.interrupted: weakref.WeakKeyDictionary[ProcMesh, Interruption] = weakref.WeakKeyDictionary()
        #: Notified when another mesh is chosen.
        self.changed: Subscribers[[]] = Subscribers("a callback on the mesh in use")

    # -- lookup --------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all meshes of this process, oldest first."""
        return list(self.proc_meshes())

    def proc_meshes(self) -> dict[str, ProcMesh]:
        """Return all meshes of this process by name; of two with the same name, the newer one."""
        self._forget_stopped()
        return {mesh.name: mesh for mesh in tool_runtime().list_proc_meshes()}

    def managed(self, name: str) -> ManagedMesh | None:
        """Return the mesh of that name if it runs cells: `%mesh up` started it, or a cell has run on it."""
        self._forget_stopped()
        return self._managed.get(name)

    @property
    def current(self) -> str | None:
        """Return the name of the mesh in use: the chosen one, or the only one."""
        names = self.names()
        if self._current not in names:
            self._current = None
        return self._current or (names[0] if len(names) == 1 else None)

    def current_mesh(self) -> ProcMesh:
        """Return the mesh in use; raise LookupError if there is none."""
        name = self.current
        if name is None:
            known = ", ".join(self.names()) or "none"
            raise LookupError(f"no mesh is in use; choose one with %mesh use NAME (there are: {known})")
        return self.proc_meshes()[name]

    def get(self, name: str | None, command: str) -> ManagedMesh:
        """Return the mesh of that name, or the one in use; it is prepared for cells if necessary.

        Raises:
            UsageError: there is no such mesh; the message lists those that exist.
        """
        wanted = name or self.current
        found = self.find(wanted, command)
        managed = self._managed.get(found.name)
        if managed is None or managed.procs is not found:
            managed = recall(found)
            if managed is None:
                managed = ManagedMesh(found)
                managed.get_ready()
                remember(managed)
            self.adopt(managed)
        return managed

    def find(self, name: str | None, command: str) -> ProcMesh:
        """Return the proc mesh of that name, or the one in use; see `get`."""
        meshes = self.proc_meshes()
        wanted = name or self.current
        if wanted is not None and wanted in meshes:
            return meshes[wanted]
        self._check_not_lost(wanted, command)
        if not meshes:
            which = f"no mesh {name!r}" if name else "no mesh"
            raise UsageError(f"{command}: there is {which}; start one with %mesh up --procs 4")
        known = ", ".join(meshes)
        if wanted is None:
            raise UsageError(f"{command}: no mesh is in use; choose one of {known} with %mesh use NAME")
        raise UsageError(f"{command}: there is no mesh {wanted!r}{nearest(wanted, meshes)}; there are {known}")

    def _check_not_lost(self, name: str | None, command: str) -> None:
        """Raise UsageError if this was a kept mesh that another process has taken over."""
        for lost, why in tool_runtime().taken_over().items():
            if name in (None, lost):
                raise UsageError(f"{command}: {why}; %mesh attach {lost} --force takes it back")

    def use(self, name: str, command: str = "%mesh use") -> ManagedMesh:
        """Run the following cells on that mesh."""
        managed = self.get(name, command)
        self.choose(managed.name)
        return managed

    # -- changes -----------------------------------------------------------------

    def adopt(self, managed: ManagedMesh) -> None:
        """Add a mesh that runs cells."""
        self._managed[managed.name] = managed

    def choose(self, name: str) -> None:
        """Use the mesh of that name from now on."""
        self._current = name
        self.changed.notify()

    @property
    def chosen(self) -> str | None:
        """Return the mesh that was chosen last, if any."""
        return self._current

    def let_go(self, name: str) -> None:
        """Forget a mesh. If it was in use, the newest remaining mesh is used next."""
        self._managed.pop(name, None)
        if self._current == name:
            names = self.names()
            self._current = names[-1] if names else None
            self.changed.notify()

    def _forget_stopped(self) -> None:
        for name, managed in list(self._managed.items()):
            if not managed.is_alive:
                self._managed.pop(name, None)  # other threads may do this too


_session: MeshSession | None = None


def session() -> MeshSession:
    """Return the session of this process."""
    global _session
    if _session is None:
        _session = MeshSession()
    return _session
