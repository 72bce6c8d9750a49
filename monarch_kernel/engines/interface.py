"""The runtime under the tools (kernel, magics, debugger): this package's own, and what other runtimes must offer.

Everything else that tools use is the same on every engine: definitions (``Actor``, ``endpoint``), pure values
(``Extent``, ``Point``, ``ValueMesh``, sets of ranks, faults), the errors of calls, and functions of torch
(``monarch_kernel.spmd``). Meshes and futures are objects of the classes of ``monarch_kernel.actor`` or of subclasses.
A function that an engine does not support raises `NotOffered`, with a one-sentence message for the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from monarch_kernel import actor, introspection, meshes, output
    from monarch_kernel.actor import HostMesh, Point, ProcMesh, ValueMesh
    from monarch_kernel.engines.join.controller import JoinController
    from monarch_kernel.introspection import Running, StackRead
    from monarch_kernel.meshes import KeptHost, KeptInfo
else:

    class _OnUse:
        """A public module, loaded on first use."""

        def __init__(self, name: str) -> None:
            self._name = f"monarch_kernel.{name}"

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self._name), name)

    actor, introspection, meshes, output = map(_OnUse, ("actor", "introspection", "meshes", "output"))


class ActorHere(Protocol):
    """The actor that the calling code runs for."""

    @property
    def rank(self) -> Point:
        """Its position in the mesh as spawned."""
        ...

    #: An event loop that runs while the actor waits for messages; None for none.
    background: Any
    #: Whether it ends after its current message.
    stopping: bool

    def borrowing(self) -> AbstractContextManager[None]:
        """Let the calling thread of the program run the actor's message: interrupts reach it, but never after the
        block.

        Only used if `OF_PROGRAM` is true.
        """
        ...


class ControlFollower(Protocol):
    """A part of a rank that stops threads for the controlling viewer of a joined job: the debugger."""

    def hand_over(self, uid: str) -> None:
        """Give control to the viewer that knows this process by a mesh with that uid."""
        ...

    def release(self) -> int:
        """Handle the loss of the controlling viewer: resume all threads. Return the number of stopped ones."""
        ...

    def forget(self, uid: str) -> None:
        """Handle that a viewer has left permanently."""
        ...

    def stands(self) -> bool:
        """Return whether a thread is stopped for a viewer."""
        ...


class ToolRuntime:
    """The runtime under the tools: this package's own, with the jobs that this controller has joined.

    Other runtimes override what differs. What is the same for all meshes of a controller is in the public modules
    (``introspection``, ``meshes``, ``output``). Those of the functions here are loaded on first use.
    """

    #: Its name in `MONARCH_KERNEL_ENGINE`.
    NAME: str = "monarch_kernel"
    #: Optional features: ``"debugpy"`` (connections of IDEs to ranks), ``"heal"`` (replacing dead procs), ``"keep"``
    #: (meshes that outlive their controller), ``"sync"`` (workspaces and environments of hosts).
    OFFERS: frozenset[str] = frozenset({"debugpy", "heal", "keep", "sync"})
    #: In a rank: whether the process belongs to a program. Tools then leave its environment, variables, main thread,
    #: output and process groups unchanged.
    OF_PROGRAM: bool = False

    def __init__(self) -> None:
        self._joined: JoinController | None = None

    # -- the process of a tool's actor, a rank or the controller -----------------------------------------

    def actor_here(self) -> ActorHere:
        """Return the actor that the calling code runs for; outside any actor, the client."""
        return cast("ActorHere", actor.context().actor_instance)

    def running_here(self) -> tuple[str, str, str]:
        """Return the actor, endpoint and cell that the calling thread or task runs for; "" if there is none."""
        return introspection.running_here()

    def endpoints_here(self) -> list[Running]:
        """Return the endpoints that run in this process now."""
        return introspection.endpoints_here()

    def actors_here(self, actor: str = "") -> dict[str, Any]:
        """Return the objects of the actors of this process by the unique name of their mesh.

        Optionally of one mesh only.
        """
        return introspection.actors_here(actor)

    def proc_here(self) -> str:
        """Return the proc id of this process; "" before the runtime has started."""
        return introspection.proc_here()

    def home(self) -> ProcMesh | None:
        """Return the proc mesh of the running actor, or else of any actor of this process; None if there is none."""
        return introspection.home()

    def drives(self, uid: str) -> bool:
        """Return whether the controller that knows this process by a mesh with that uid may stop it and run code in it.

        With an empty uid, return whether any controller may. Every controller that reaches a rank of this package may.
        """
        return True

    def follow_control(self, follower: ControlFollower) -> None:
        """Notify the debugger of a program's process of changes of the controlling viewer."""

    def interrupt_main_thread(self) -> None:
        """Raise KeyboardInterrupt in the endpoint on the main thread of this process, even if it waits or sleeps."""
        introspection.interrupt_main_thread()

    def keep_failure(self, error: BaseException, cell: str) -> None:
        """Store an exception of user code that a tool's endpoint caught, as if the endpoint itself had failed."""
        introspection.keep_failure(error, cell)

    # -- the meshes of a controller ----------------------------------------------------------------------

    def this_host(self) -> HostMesh:
        """Return this host, on which procs can be spawned."""
        return actor.this_host()

    def list_proc_meshes(self) -> list[ProcMesh]:
        """Return the proc meshes of this process, oldest first, then joined jobs."""
        return [*meshes.list_proc_meshes(), *(self._joined.list_proc_meshes() if self._joined is not None else ())]

    def get_mesh(self, name: str) -> ProcMesh:
        """Return the newest proc mesh, or the joined job, of that name.

        Raises:
            LookupError: there is none; the message lists the names of the others.
        """
        found = self.list_proc_meshes()
        for mesh in reversed(found):
            if mesh.name == name:
                return mesh
        known = ", ".join(mesh.name for mesh in found) or "none"
        raise LookupError(f"no mesh is called {name!r} here (there are: {known})")

    def stacks_from_outside(
        self, mesh: object, ranks: Iterable[int], *, native: bool = False, timeout: float = 2.0
    ) -> dict[int, StackRead]:
        """Read the stacks of ranks of a proc mesh without their cooperation. A failed read never raises."""
        read = self._joined if self._joined is not None and self._joined.is_joined(mesh) else introspection
        return read.stacks_from_outside(mesh, ranks, native=native, timeout=timeout)

    def controller_actor(self, name: str, cls: type[object], timeout: float, mesh: object = None) -> Any:
        """Return the one actor of that name in the controller, from any process of the job. The first call spawns it.

        Args:
            mesh: in a controller, the proc mesh whose ranks are to reach it.
        """
        if self._joined is not None and self._joined.is_joined(mesh):
            return self._joined.controller_actor(name, cls, timeout)
        return actor.get_or_spawn_controller(name, cls).get(timeout)

    def is_joined(self, mesh: object) -> bool:
        """Return whether a proc mesh is a job that another program started: see `OF_PROGRAM`."""
        return self._joined is not None and self._joined.is_joined(mesh)

    def driver_of(self, mesh: object, ask: bool = True) -> str:
        """Return which other viewer controls a proc mesh that is a joined job, as text; "" if this process does.

        Args:
            ask: ask its ranks for control if there is no controlling viewer, and wait for that (up to 2 s).
        """
        return self._joined.driver_of(mesh, ask) if self._joined is not None else ""

    def joined_jobs(self) -> JoinController:
        """Return the object that finds, joins and leaves such jobs."""
        joined = self._joined or import_module("monarch_kernel.engines.join.controller").JoinController()
        self._joined = joined
        return joined

    def shut_down(self, timeout: float) -> None:
        """Leave joined jobs, and end the meshes and host agents of this process, within ``timeout`` seconds."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.end_all(timeout)
        actor.shutdown_context().get(timeout)

    # -- the output of ranks -----------------------------------------------------------------------------

    def logs(self, mesh: ProcMesh, *, ranks: Sequence[int] | None = None, tail: int | None = None) -> ValueMesh[str]:
        """Return the stored output of each rank."""
        source = self._joined if self._joined is not None and self._joined.is_joined(mesh) else output
        return source.logs(mesh, ranks=ranks, tail=tail)

    # -- meshes that outlive their controller, and those that another process has started ----------------

    def keep(self, name: str, idle: float) -> KeptHost:
        """Start a host whose meshes outlive this process, for up to ``idle`` seconds without a controller (0: any)."""
        return meshes.keep(name, idle)

    def kept(self) -> list[KeptInfo]:
        """Return the kept meshes of this user."""
        return meshes.kept()

    def attach(self, name: str, force: bool = False) -> KeptHost:
        """Attach to a mesh of another process, by its name, or by the path of a file or folder that describes it."""
        return meshes.attach(name, force)

    def end_kept(self, name: str, force: bool = False) -> KeptInfo:
        """End a kept mesh that this process does not hold."""
        return meshes.end_kept(name, force)


class NotOffered(RuntimeError):
    """The engine does not support this feature. The message is one sentence."""


class InterruptedEndpoint(Exception):
    """Raised in an endpoint of another runtime that a user has interrupted. A KeyboardInterrupt would end its actor."""
