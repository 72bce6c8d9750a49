"""What tools add to the runtime's public classes. The runtime depends on no tool: it loads each by name, at first use.

All names of tools that the runtime knows stand in this file, with a Protocol each that says what the tool must offer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from types import FrameType
from typing import Any, Protocol, cast

from monarch_kernel.runtime.mesh.valuemesh import ValueMesh


class DebuggerFunctions(Protocol):
    """The debugger's functions on meshes, which are methods of a proc mesh, too."""

    def stacks(self, mesh: Any, **options: Any) -> Any: ...

    def diff(self, mesh: Any, expression: str, **options: Any) -> Any: ...

    def pull(self, mesh: Any, expression: str, **options: Any) -> Any: ...

    def hang(self, mesh: Any, **options: Any) -> Any: ...

    def select(self, mesh: Any) -> Any: ...


class DebugHubAccess(Protocol):
    """The controller's actor that hears of stopped ranks."""

    def hub_actor(self) -> Any: ...


class ConsoleServer(Protocol):
    """The debugger's console for other programs of the same user."""

    def listen(self, folder: str) -> str: ...

    def close(self) -> None: ...


class BreakpointHandler(Protocol):
    """The debugger's part in a rank."""

    def stop_here(self, frame: FrameType) -> None: ...


class Submitter(Protocol):
    """The pool of one mesh."""

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class PoolFunctions(Protocol):
    """Independent work over the ranks of a mesh."""

    def start_map(
        self,
        procs: Any,
        function: Callable[..., Any],
        iterables: tuple[Iterable[Any], ...],
        *,
        chunk: int,
        ahead: int | None,
        return_errors: bool,
    ) -> Any: ...

    def pool_of(self, procs: Any) -> Submitter: ...

    def scatter(self, procs: Any, name: str, values: Any) -> ValueMesh[int]: ...

    def gather(self, procs: Any, name: str) -> Any: ...


#: The module that offers what a Protocol says, as functions.
MODULES: dict[type[Any], str] = {
    DebuggerFunctions: "monarch_kernel.debug",
    DebugHubAccess: "monarch_kernel.debugger.controller.hub_actor",
    ConsoleServer: "monarch_kernel.debugger.terminal.server",
    BreakpointHandler: "monarch_kernel.debugger.rank.process",
    PoolFunctions: "monarch_kernel.pool",
}


def debugger_functions() -> DebuggerFunctions:
    """For the methods of a proc mesh."""
    return cast("DebuggerFunctions", import_module(MODULES[DebuggerFunctions]))


def debug_hub() -> DebugHubAccess:
    """For Monarch's ``debug_controller()``."""
    return cast("DebugHubAccess", import_module(MODULES[DebugHubAccess]))


def console_server() -> ConsoleServer:
    """For a controller that is asked for a console."""
    return cast("ConsoleServer", import_module(MODULES[ConsoleServer]))


def rank_debugger() -> BreakpointHandler:
    """For ``breakpoint()`` in a rank."""
    return cast("BreakpointHandler", import_module(MODULES[BreakpointHandler]))


def pool_functions() -> PoolFunctions:
    """For ``map``, ``submit``, ``scatter`` and ``gather`` of a proc mesh."""
    return cast("PoolFunctions", import_module(MODULES[PoolFunctions]))
