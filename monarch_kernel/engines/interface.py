"""The interface between the tools (kernel, magics, debugger) and the runtime under them.

Everything else that tools use is the same on every engine: definitions (``Actor``, ``endpoint``), pure values
(``Extent``, ``Point``, ``ValueMesh``, sets of ranks, faults), the errors of calls, and functions of torch
(``monarch_kernel.spmd``). Meshes and futures are objects of the classes of ``monarch_kernel.actor`` or of subclasses.
A function that an engine does not support raises `NotOffered`, with a one-sentence message for the user.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from monarch_kernel.actor import HostMesh, Point, ProcMesh
    from monarch_kernel.engines.join.controller import JoinController
    from monarch_kernel.introspection import Awaited, Running, StackRead, Whole
    from monarch_kernel.meshes import KeptHost, KeptInfo
    from monarch_kernel.output import RankOutput
    from monarch_kernel.protocol.refs import Death
    from monarch_kernel.subscriptions import Subscription


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


class ProcessFunctions(Protocol):
    """Functions for a tool's actor about its own process, a rank or the controller."""

    def actor_here(self) -> ActorHere:
        """Return the actor that the calling code runs for."""
        ...

    def running_here(self) -> tuple[str, str, str]:
        """Return the actor, endpoint and cell that the calling thread or task runs for; "" if there is none."""
        ...

    def endpoints_here(self) -> list[Running]:
        """Return the endpoints that run in this process now."""
        ...

    def actors_here(self, actor: str = "") -> dict[str, Any]:
        """Return the objects of the actors of this process by the unique name of their mesh.

        Optionally of one mesh only.
        """
        ...

    def awaited_by(self, frames: Iterable[FrameType]) -> Awaited | None:
        """Return the call that a thread with these frames waits for; None if it does not wait for a call."""
        ...

    def awaited_here(self, without: Collection[str] = ()) -> list[Awaited]:
        """Return the unanswered endpoint calls of this process, without those of the actors named in ``without``."""
        ...

    def proc_here(self) -> str:
        """Return the proc id of this process; "" before the runtime has started."""
        ...

    def home(self) -> ProcMesh | None:
        """Return the proc mesh of the running actor, or else of any actor of this process; None if there is none."""
        ...

    def drives(self, uid: str) -> bool:
        """Return whether the controller that knows this process by a mesh with that uid may stop it and run code in it.

        With an empty uid, return whether any controller may.
        """
        ...

    def follow_control(self, follower: ControlFollower) -> None:
        """Notify the debugger of a program's process of changes of the controlling viewer."""
        ...

    def interrupt_main_thread(self) -> None:
        """Raise KeyboardInterrupt in the endpoint on the main thread of this process, even if it waits or sleeps."""
        ...

    def keep_failure(self, error: BaseException, cell: str) -> None:
        """Store an exception of user code that a tool's endpoint caught, as if the endpoint itself had failed."""
        ...

    def call_in_wait(self, errand: Callable[[], None]) -> None:
        """Call ``errand()`` on the main thread of this process while it waits for ranks: now, or in its next wait."""
        ...


class MeshFunctions(Protocol):
    """Functions for a controller's tools about meshes."""

    def this_host(self) -> HostMesh:
        """Return this host, on which procs can be spawned."""
        ...

    def list_proc_meshes(self) -> list[ProcMesh]:
        """Return the proc meshes of this process, oldest first."""
        ...

    def get_mesh(self, name: str) -> ProcMesh:
        """Return the proc mesh of that name; raise LookupError if there is none."""
        ...

    def on_change(self, callback: Callable[[], None]) -> Subscription:
        """Call ``callback()`` when meshes start or stop or ranks die, on a thread that it must not block.

        Returns:
            The subscription; close (or call) it to unsubscribe.
        """
        ...

    def whole_of(self, mesh: Any) -> Whole:
        """Return the proc mesh that ``mesh`` is a slice of, or that its actors are on.

        Raise TypeError for anything else.
        """
        ...

    def hosts_of(self, procs: Any) -> list[str]:
        """Return the host name of each rank."""
        ...

    def deaths_of(self, procs: Any) -> dict[int, Death]:
        """Return the deaths of a proc mesh's ranks that this process knows of."""
        ...

    def stacks_from_outside(
        self, mesh: Any, ranks: Iterable[int], *, native: bool = False, timeout: float = 2.0
    ) -> dict[int, StackRead]:
        """Read the stacks of ranks of a proc mesh without their cooperation. A failed read never raises."""
        ...

    def controller_actor(self, name: str, cls: type[Any], timeout: float, mesh: Any = None) -> Any:
        """Return the one actor of that name in the controller, from any process of the job. The first call spawns it.

        Args:
            mesh: in a controller, the proc mesh whose ranks are to reach it.
        """
        ...

    def is_joined(self, mesh: Any) -> bool:
        """Return whether a proc mesh is a job that another program started: see `OF_PROGRAM`."""
        ...

    def driver_of(self, mesh: Any, ask: bool = True) -> str:
        """Return which other viewer controls a proc mesh that is a joined job, as text; "" if this process does.

        Args:
            ask: ask its ranks for control if there is no controlling viewer, and wait for that (up to 2 s).
        """
        ...

    def joined_jobs(self) -> JoinController:
        """Return the object that finds, joins and leaves such jobs."""
        ...

    def shut_down(self, timeout: float) -> None:
        """End the meshes of this process, and the processes started for them, within ``timeout`` seconds."""
        ...


class OutputFunctions(Protocol):
    """Functions for the output of ranks."""

    def subscribe(self, callback: Callable[[RankOutput], None]) -> Subscription:
        """Call ``callback(RankOutput)`` for all output of any rank of this controller, in order for each rank."""
        ...

    def logs(self, mesh: ProcMesh, *, ranks: Sequence[int] | None = None, tail: int | None = None) -> Any:
        """Return a ValueMesh of the stored output of each rank."""
        ...


class KeptFunctions(Protocol):
    """Functions for meshes that outlive their controller, and for meshes that another process has started."""

    def keep(self, name: str, idle: float = 0.0) -> KeptHost:
        """Start a host whose meshes outlive this process, for up to ``idle`` hours without a controller."""
        ...

    def kept(self) -> list[KeptInfo]:
        """Return the kept meshes of this user."""
        ...

    def held(self) -> list[KeptHost]:
        """Return the kept meshes that this process holds."""
        ...

    def kept_host_of(self, mesh: ProcMesh) -> KeptHost | None:
        """Return the kept host of a mesh; None if the mesh ends with this process."""
        ...

    def taken_over(self) -> dict[str, str]:
        """Return the kept meshes that another process has taken over from this one, and why."""
        ...

    def attach(self, name: str, force: bool = False) -> KeptHost:
        """Attach to a mesh of another process, by its name, or by the path of a file or folder that describes it."""
        ...

    def end_kept(self, name: str, force: bool = False) -> KeptInfo:
        """End a kept mesh that this process does not hold."""
        ...


class ToolRuntime(ProcessFunctions, MeshFunctions, OutputFunctions, KeptFunctions, Protocol):
    """A runtime under the tools."""

    #: Its name in `MONARCH_KERNEL_ENGINE`.
    NAME: str
    #: Optional features: ``"debugpy"`` (connections of IDEs to ranks), ``"heal"`` (replacing dead procs), ``"keep"``
    #: (meshes that outlive their controller), ``"sync"`` (workspaces and environments of hosts).
    OFFERS: frozenset[str]
    #: In a rank: whether the process belongs to a program. Tools then leave its environment, variables, main thread,
    #: output and process groups unchanged.
    OF_PROGRAM: bool


class NotOffered(RuntimeError):
    """The engine does not support this feature. The message is one sentence."""


class InterruptedEndpoint(Exception):
    """Raised in an endpoint of another runtime that a user has interrupted. A KeyboardInterrupt would end its actor."""
