"""Tools that extend the runtime's public classes. The runtime depends on no tool: it loads each by name on first use.

This file lists all tools that the runtime knows by name, each with a Protocol for the functions that it must provide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from types import FrameType
from typing import Any, Protocol, cast

from monarch_kernel.runtime.mesh.valuemesh import ValueMesh


class DebuggerFunctions(Protocol):
    """The debugger's functions on meshes, which are also methods of a proc mesh."""

    def stacks(self, mesh: object, **options: object) -> Any: ...

    def diff(self, mesh: object, expression: str, **options: object) -> Any: ...

    def pull(self, mesh: object, expression: str, **options: object) -> Any: ...

    def hang(self, mesh: object, **options: object) -> Any: ...

    def select(self, mesh: object) -> Any: ...


class DebugHubAccess(Protocol):
    """The controller's actor that is notified of stopped ranks."""

    def hub_actor(self) -> Any: ...


class ConsoleServer(Protocol):
    """The debugger's console for other programs of the same user."""

    def listen(self, folder: str) -> str: ...

    def close(self) -> None: ...


class BreakpointHandler(Protocol):
    """The debugger's part in a rank."""

    def stop_here(self, frame: FrameType) -> None: ...


class Display(Protocol):
    """Shows figures and rich values of a rank in the controller's front end."""

    def install(self) -> None: ...

    def display(self, *objects: object, **options: object) -> Any: ...

    def get(self) -> Any: ...


class Submitter(Protocol):
    """The pool of one mesh."""

    def submit(self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any: ...


class PoolFunctions(Protocol):
    """Independent work over the ranks of a mesh."""

    def start_map(
        self,
        procs: object,
        function: Callable[..., object],
        iterables: tuple[Iterable[object], ...],
        *,
        chunk: int,
        ahead: int | None,
        return_errors: bool,
    ) -> Any: ...

    def pool_of(self, procs: object) -> Submitter: ...

    def scatter(self, procs: object, name: str, values: object) -> ValueMesh[int]: ...

    def gather(self, procs: object, name: str) -> Any: ...


class WorkspaceFunctions(Protocol):
    """Folders and environments of the client on all hosts."""

    async def sync_workspace(self, mesh: object, workspace: object, conda: bool, auto_reload: bool) -> Any: ...


class ViewFunctions(Protocol):
    """Views of meshes in notebooks."""

    def show(self, mesh: Any) -> Any: ...

    def plot(self, mesh: object, expression: str, **options: object) -> Any: ...


class TensorArgument(TypeError):
    """Raised if a mesh tensor is pickled. An endpoint then sends its arguments through the tensor engine."""


class TensorCall(Protocol):
    """A call of an endpoint, in order with operations on tensors.

    Attributes:
        tensors, stays: fields of the message.
    """

    tensors: tuple[tuple[str, int], ...]
    stays: bool

    def pickling(self) -> AbstractContextManager[None]:
        """Return a context in which arguments are pickled: handles are replaced by the ranks' values."""
        ...

    def sent(self) -> Any:
        """Record that the call was sent, so that later operations wait for it.

        Return handles of results that stay there.
        """
        ...


class TensorFunctions(Protocol):
    """Tensors over a mesh."""

    def activate(self, procs: object) -> Any: ...

    def end_tensors(self, procs: object) -> None: ...

    def Simulator(self, hosts: int, gpus: int) -> Any: ...  # noqa: N802

    def rank_tensor(self, procs: object, dim: str) -> Any: ...

    def rank_tensors(self, procs: object) -> Any: ...

    def process_group(self, procs: object, dims: object) -> Any: ...

    def lend_arguments(self, label: str, procs: object) -> TensorCall: ...

    def refer_to_result(
        self,
        label: str,
        target: object,
        propagate: object,
        function: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> TensorCall: ...

    def keep_result(self, tensors: object, result: object) -> None: ...

    def call_ended(self, tensors: object, error: BaseException | str | None = None) -> None: ...


#: The module with the display of ranks that this process starts, as ``process_shell()``; "": no display. The front end
#: that shows it sets the name.
display_module = ""

#: The module that provides the functions of each Protocol.
MODULES: dict[type[object], str] = {
    DebuggerFunctions: "monarch_kernel.debug",
    DebugHubAccess: "monarch_kernel.debugger.controller.hub_actor",
    ConsoleServer: "monarch_kernel.debugger.terminal.server",
    BreakpointHandler: "monarch_kernel.debugger.rank.rank_debugger",
    PoolFunctions: "monarch_kernel.pool",
    WorkspaceFunctions: "workspace_sync.reload.live",
    ViewFunctions: "monarch_kernel.widgets",
    TensorFunctions: "monarch_kernel.tensor",
}


def use_display(module: str) -> None:
    """Set the module whose ``process_shell()`` is the display of ranks that this process starts from now on."""
    global display_module
    display_module = module


def display() -> Display:
    """Return the display of this process."""
    return cast("Display", import_module(display_module).process_shell())


def debugger_functions() -> DebuggerFunctions:
    """Return the debugger's functions, for the methods of a proc mesh."""
    return cast("DebuggerFunctions", import_module(MODULES[DebuggerFunctions]))


def debug_hub() -> DebugHubAccess:
    """Return the debugger's hub, for Monarch's ``debug_controller()``."""
    return cast("DebugHubAccess", import_module(MODULES[DebugHubAccess]))


def console_server() -> ConsoleServer:
    """Return the debugger's console, for a controller that receives a request for it."""
    return cast("ConsoleServer", import_module(MODULES[ConsoleServer]))


def rank_debugger() -> BreakpointHandler:
    """Return the debugger of a rank, for ``breakpoint()``."""
    return cast("BreakpointHandler", import_module(MODULES[BreakpointHandler]))


def pool_functions() -> PoolFunctions:
    """Return the pool, for ``map``, ``submit``, ``scatter`` and ``gather`` of a proc mesh."""
    return cast("PoolFunctions", import_module(MODULES[PoolFunctions]))


def workspace_functions() -> WorkspaceFunctions:
    """Workspace sync, for ``sync_workspace`` of host and proc meshes."""
    return cast("WorkspaceFunctions", import_module(MODULES[WorkspaceFunctions]))


def view_functions() -> ViewFunctions:
    """Views, for ``show`` and ``plot`` of meshes."""
    return cast("ViewFunctions", import_module(MODULES[ViewFunctions]))


def tensor_functions() -> TensorFunctions:
    """Return the tensor engine, for ``activate``, ``rank_tensor`` and ``rank_tensors`` of a proc mesh."""
    return cast("TensorFunctions", import_module(MODULES[TensorFunctions]))
