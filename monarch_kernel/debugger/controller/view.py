"""The debugger as its viewers see it: consoles, sets of stops, and the sessions of IDEs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch_kernel.debugger.events import Event, Key, MeshBreakpoint, RankErrorRecord, RankStop
from monarch_kernel.debugger.model.stops import Evaluation, Variable
from monarch_kernel.subscriptions import Subscription

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.collective_timeouts import Countdown
    from monarch_kernel.debugger.controller.viewers import Viewer, Viewers


class DebuggerView(Protocol):
    """A debugger of stopped ranks; `hub.MeshDebugger` implements it in a controller, and documents the methods."""

    viewers: Viewers

    def viewer(self, name: str) -> Viewer: ...

    def subscribe(self, callback: Callable[[Event], None]) -> Subscription: ...

    def mesh(self, name: str) -> Any: ...

    # -- breakpoints -------------------------------------------------------------------------------

    def break_at(
        self,
        file: str,
        line: int,
        *,
        mesh: Any = None,
        ranks: Iterable[int] | None = None,
        condition: str = "",
        hits: int = 0,
        first: bool = False,
        differs: str = "",
        log: str = "",
        owner: str = "",
    ) -> MeshBreakpoint: ...

    def break_on_error(
        self, error: str = "*", *, mesh: Any = None, ranks: Iterable[int] | None = None, owner: str = ""
    ) -> MeshBreakpoint: ...

    def replace(self, file: str, owner: str, lines: Sequence[Mapping[str, Any]]) -> list[MeshBreakpoint]: ...

    def breakpoints(self) -> list[MeshBreakpoint]: ...

    def clear(self, number: int | None = None, owner: str | None = None) -> int: ...

    # -- stops -------------------------------------------------------------------------------------

    def stops(self, mesh: Any = None) -> list[RankStop]: ...

    def wait(
        self, predicate: Callable[[list[RankStop]], bool] = bool, timeout: float | None = None
    ) -> list[RankStop]: ...

    def countdown(self, stops: Iterable[RankStop]) -> Countdown | None: ...

    def pause(self, mesh: Any = None, ranks: Iterable[int] | None = None, viewer: Viewer | None = None) -> None: ...

    def cancel_pause(
        self, mesh: Any = None, ranks: Iterable[int] | None = None, viewer: Viewer | None = None
    ) -> None: ...

    def resume(
        self, stops: Iterable[RankStop], how: str = "continue", line: int = 0, viewer: Viewer | None = None
    ) -> None: ...

    def errors(self, mesh: Any = None, ranks: Iterable[int] | None = None) -> list[RankErrorRecord]: ...

    def post_mortem(self, mesh: Any = None, ranks: Iterable[int] | None = None, key: str = "") -> list[RankStop]: ...

    # -- values ------------------------------------------------------------------------------------

    def evaluate(
        self, stops: Iterable[RankStop], source: str, frame: int = 0, timeout: float = 5.0
    ) -> dict[Key, Evaluation]: ...

    def call(
        self, stops: Iterable[RankStop], function: Callable[[Any], Any], frame: int = 0, timeout: float = 5.0
    ) -> dict[Key, Any]: ...

    def scopes(self, key: Key, frame: int) -> list[Variable]: ...

    def variables(self, key: Key, ref: int, start: int = 0, count: int = 0) -> list[Variable]: ...

    def set_variable(
        self, key: Key, ref: int, name: str, expression: str, viewer: Viewer | None = None
    ) -> Variable: ...
