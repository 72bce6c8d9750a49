"""What the tools (kernel, magics, debugger) ask of the runtime under them.

Everything else that they use is the same on every engine: definitions (``Actor``, ``endpoint``), pure values
(``Extent``, ``Point``, ``ValueMesh``, sets of ranks, faults), the errors of calls, and what torch knows by itself
(``monarch_kernel.spmd``). Meshes and futures are objects of the classes of ``monarch_kernel.actor``, or of subclasses
of them. Where an engine lacks something, the function raises `NotOffered`, whose message is one sentence for the user.
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
    """The actor for which the calling code runs."""

    @property
    def rank(self) -> Point:
        """Its position in the mesh as spawned."""
        ...

    #: An event loop that runs while the actor waits for messages; None for none.
    background: Any
    #: Whether it was told to end, after its current message.
    stopping: bool

    def borrowing(self) -> AbstractContextManager[None]:
        """The calling thread, which is a program's, runs the actor's message: interrupts reach it, and never later.

        Only where `OF_PROGRAM` is true.
        """
        ...


class ControlFollower(Protocol):
    """What stops threads for whichever viewer has control of a joined job: the debugger of a rank."""

    def hand_over(self, uid: str) -> None:
        """The viewer that knows this process by a mesh with that uid has control from now on."""
        ...

    def release(self) -> int:
        """The viewer in control is gone: let all threads run; returns how many stood."""
        ...

    def forget(self, uid: str) -> None:
        """A viewer has left for good."""
        ...

    def stands(self) -> bool:
        """Whether a thread is stopped for a viewer."""
        ...


class ProcessFunctions(Protocol):
    """What a tool's actor asks about the process that it runs in, be it a rank or the controller."""

    def actor_here(self) -> ActorHere:
        """The actor for which the calling code runs."""
        ...

    def running_here(self) -> tuple[str, str, str]:
        """The actor, endpoint and cell that the calling thread or task runs for; "" where there is none."""
        ...

    def endpoints_here(self) -> list[Running]:
        """The endpoints that run in this process now."""
        ...

    def actors_here(self, actor: str = "") -> dict[str, Any]:
        """The objects of the actors of this process, by the unique name of their mesh; optionally of one mesh only."""
        ...

    def awaited_by(self, frames: Iterable[FrameType]) -> Awaited | None:
        """The call that a thread with these frames waits for; None if it does not wait for a call."""
        ...

    def awaited_here(self, without: Collection[str] = ()) -> list[Awaited]:
        """The unanswered endpoint calls of this process, but not those of the actors named in ``without``."""
        ...

    def proc_here(self) -> str:
        """The id of this process among the procs; "" before the runtime has started."""
        ...

    def home(self) -> ProcMesh | None:
        """The proc mesh of the running actor, or else of any actor of this process; None if there is none."""
        ...

    def drives(self, uid: str) -> bool:
        """Whether the controller that knows this process by a mesh with that uid may stop it, and run code in it; "":
        whether any may."""
        ...

    def follow_control(self, follower: ControlFollower) -> None:
        """Tell the debugger of a program's process from now on which viewer has control."""
        ...

    def interrupt_main_thread(self) -> None:
        """Raise KeyboardInterrupt in the endpoint on the main thread of this process, even if that waits or sleeps."""
        ...

    def keep_failure(self, error: BaseException, cell: str) -> None:
        """Keep an exception of user code that a tool's endpoint caught, as if the endpoint itself had failed."""
        ...

    def call_in_wait(self, errand: Callable[[], None]) -> None:
        """Call ``errand()`` on the main thread of this process while it waits for ranks: now, or in its next wait."""
        ...


class MeshFunctions(Protocol):
    """What a controller's tools ask about meshes."""

    def this_host(self) -> HostMesh:
        """This host, on which procs can be spawned."""
        ...

    def list_proc_meshes(self) -> list[ProcMesh]:
        """The proc meshes of this process, oldest first."""
        ...

    def get_mesh(self, name: str) -> ProcMesh:
        """The proc mesh of that name; LookupError if there is none."""
        ...

    def on_change(self, callback: Callable[[], None]) -> Subscription:
        """Call ``callback()`` when meshes start or stop or ranks die, on a thread that it must not block.

        Returns:
            The subscription; close (or call) it to unsubscribe.
        """
        ...

    def whole_of(self, mesh: Any) -> Whole:
        """The proc mesh that ``mesh`` is a slice of, or that its actors are on; TypeError for anything else."""
        ...

    def hosts_of(self, procs: Any) -> list[str]:
        """The host name of each rank."""
        ...

    def deaths_of(self, procs: Any) -> dict[int, Death]:
        """The deaths of a proc mesh's ranks, as far as this process knows them."""
        ...

    def stacks_from_outside(
        self, mesh: Any, ranks: Iterable[int], *, native: bool = False, timeout: float = 2.0
    ) -> dict[int, StackRead]:
        """Read the stacks of ranks of a proc mesh without their help; a failed read never raises."""
        ...

    def controller_actor(self, name: str, cls: type[Any], timeout: float, mesh: Any = None) -> Any:
        """The one actor of that name in the controller, from any process of the job; spawned by the first call.

        Args:
            mesh: in a controller, the proc mesh whose ranks shall reach it.
        """
        ...

    def is_joined(self, mesh: Any) -> bool:
        """Whether the processes of a proc mesh are those of a job that others have started: see `OF_PROGRAM`."""
        ...

    def driver_of(self, mesh: Any, ask: bool = True) -> str:
        """Which other viewer has control of a proc mesh that is a joined job, in words; "" if this process has.

        Args:
            ask: ask its ranks for control if none has it, and wait for that (up to 2 s).
        """
        ...

    def joined_jobs(self) -> JoinController:
        """What finds, joins and leaves such jobs."""
        ...

    def shut_down(self, timeout: float) -> None:
        """End the meshes of this process, and what the engine has started for them, within so many seconds."""
        ...


class OutputFunctions(Protocol):
    """The output of ranks."""

    def subscribe(self, callback: Callable[[RankOutput], None]) -> Subscription:
        """Call ``callback(RankOutput)`` for all output of any rank of this controller, in order for each rank."""
        ...

    def logs(self, mesh: ProcMesh, *, ranks: Sequence[int] | None = None, tail: int | None = None) -> Any:
        """A ValueMesh of the output that was kept of each rank."""
        ...


class KeptFunctions(Protocol):
    """Meshes that outlive their controller, and those that another process has started."""

    def keep(self, name: str, idle: float = 0.0) -> KeptHost:
        """Start a host whose meshes outlive this process, for ``idle`` hours without one that holds them."""
        ...

    def kept(self) -> list[KeptInfo]:
        """The kept meshes of this user."""
        ...

    def held(self) -> list[KeptHost]:
        """Those that this process holds."""
        ...

    def kept_host_of(self, mesh: ProcMesh) -> KeptHost | None:
        """The kept host of a mesh; None if the mesh ends with this process."""
        ...

    def taken_over(self) -> dict[str, str]:
        """The kept meshes that another process has taken from this one, and why."""
        ...

    def attach(self, name: str, force: bool = False) -> KeptHost:
        """Attach to a mesh of another process: its name, or the path of a file or folder that tells where it is."""
        ...

    def end_kept(self, name: str, force: bool = False) -> KeptInfo:
        """End a kept mesh that this process does not hold."""
        ...


class ToolEngine(ProcessFunctions, MeshFunctions, OutputFunctions, KeptFunctions, Protocol):
    """A runtime under the tools."""

    #: What `MONARCH_KERNEL_ENGINE` calls it.
    NAME: str
    #: What not every engine has: ``"debugpy"`` (connections of IDEs to ranks), ``"heal"`` (new procs in the places of
    #: dead ones), ``"keep"`` (meshes that outlive their controller), ``"sync"`` (workspaces and environments of hosts).
    OFFERS: frozenset[str]
    #: In a rank: whether the process is a program's own, which has its environment, its variables, its main thread, its
    #: output and its process groups. Tools leave these as they are.
    OF_PROGRAM: bool


class NotOffered(RuntimeError):
    """The engine has no such thing; the message is one sentence."""


class InterruptedEndpoint(Exception):
    """A user has interrupted this endpoint, which another runtime runs: a KeyboardInterrupt would end its actor."""
