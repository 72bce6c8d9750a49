"""Handle one front end's debugging session with ranks: DAP requests in, replies and events out.

`RankSession` is independent of the transport. Requests are answered on the thread that calls `answer`, which may take
as long as the mesh debugger does (it has deadlines). Events of the mesh debugger and of the kernel's own debugger
arrive at any time, and are sent through `publish` in an order that the front end can handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from monarch_kernel.actor import ProcMesh
from monarch_kernel.debugger.controller.viewers import DriverError
from monarch_kernel.debugger.dap.messages import (
    MOVES,
    Arguments,
    Body,
    BreakpointLine,
    Event,
    Request,
    RequestError,
    Response,
    arguments_of,
    breakpoint_of,
    breakpoint_reply,
    evaluation_reply,
    frame_reply,
    is_in_editor,
    is_shown,
    refusal,
    response,
    value_reply,
)
from monarch_kernel.debugger.dap.stop_table import BASE, DebugState, FrameOf, StopTable
from monarch_kernel.debugger.events import (
    BreakpointsChanged,
    MeshBreakpoint,
    RankGone,
    RankRanOff,
    RankResumed,
    RankStop,
    RankStopped,
    frames_of_an_ide,
)
from monarch_kernel.debugger.events import Event as MeshEvent
from monarch_kernel.debugger.rank.frame_tools import complete, copy_to_globals, read_source, rich_value

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger

#: The owner of the breakpoints that front ends set.
OWNER = "dap"
#: The exception filter for ranks.
ERROR_FILTER = "mesh"
ERROR_FILTERS = [
    {
        "filter": ERROR_FILTER,
        "label": "Mesh: exceptions that end an endpoint or cell on a rank",
        "description": "Stops the rank where it was raised, with all its frames",
        "default": False,
    }
]
#: Front ends that show a single thread, and have no list of threads.
_ONE_THREAD = ("", "jupyterlab")
#: How many children of a value are returned to a front end that does not request a range of them.
MOST_CHILDREN = 500

# Requests by the argument that names their subject.
_BY_FRAME = ("scopes", "evaluate", "completions", "setExpression", "richInspectVariables")
_BY_THREAD = ("stackTrace", "exceptionInfo", "pause", *MOVES)
_BY_NUMBER = (*_BY_FRAME, *_BY_THREAD, "variables", "setVariable", "copyToGlobals")
_NUMBERS = ("threadId", "frameId", "variablesReference", "srcFrameId")
_OURS = ("mesh/state", "mesh/focus", "mesh/resume", "mesh/pause")

_T = TypeVar("_T")


class RankSession:
    """A front end's session with all ranks.

    Args:
        debugger: the debugger of this controller.
        publish: sends an event; called on any thread, one at a time, and must not block.
        later: calls a function after a delay in seconds.
        meshes: returns the existing proc meshes.
        waited: returns the ranks that the kernel's main thread waits for now, by mesh.
        bundle: converts a value, on a rank, to what `richInspectVariables` shows: data and metadata by MIME type.
    """

    def __init__(
        self,
        debugger: MeshDebugger,
        publish: Callable[[Event], None],
        later: Callable[[float, Callable[[], None]], object],
        meshes: Callable[[], Iterable[ProcMesh]] = tuple,
        waited: Callable[[], Mapping[str, Iterable[int]]] = dict,
        bundle: Callable[[object], tuple[Body, Body]] | None = None,
    ) -> None:
        self._debugger = debugger
        self._table = StopTable(publish, later, meshes)
        self._waited = waited
        self._bundle = bundle
        self._error_breakpoint: int | None = None
        self._viewer = debugger.viewer("JupyterLab")
        self._unsubscribe: Callable[[], None] | None = None
        self._answers: dict[str, Callable[[Arguments], Body]] = {
            "stackTrace": self._stack_trace,
            "scopes": self._scopes,
            "variables": self._variables,
            "evaluate": self._evaluate,
            "setVariable": self._set_variable,
            "setExpression": self._set_expression,
            "completions": self._completions,
            "exceptionInfo": self._exception_info,
            "richInspectVariables": self._rich,
            "copyToGlobals": self._copy_to_globals,
            "pause": self._pause,
            "mesh/state": self._state,
            "mesh/focus": self._focus,
            "mesh/resume": self._resume_many,
            "mesh/pause": self._pause_many,
            **{command: partial(self._move, how) for command, how in MOVES.items()},
        }

    # -- beginning and end -----------------------------------------------------------------------

    def initialize(self, arguments: Arguments) -> None:
        """Handle `initialize` from a front end; another front end may send it later."""
        client = str(arguments.get("clientID") or "")
        self._table.lists_threads = client.lower() not in _ONE_THREAD
        self._viewer.name = str(arguments.get("clientName") or client or "a Jupyter front end")

    @property
    def lists_threads(self) -> bool:
        """Whether the front end shows more than one thread."""
        return self._table.lists_threads

    def attach(self) -> None:
        """Begin to report stops, starting with the existing ones. May be called again."""
        if self._unsubscribe is None:
            self._unsubscribe = self._debugger.subscribe(self.on_event)
            for at in self._debugger.stops():
                self.on_event(RankStopped(at))
        else:
            self._table.show_again()

    def close(self) -> None:
        """End the session because the front end has turned the debugger off.

        Clears its breakpoints, and resumes stopped ranks unless another viewer controls them.
        """
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._debugger.clear(owner=OWNER)
        stops = self._debugger.stops()
        if stops and (self._viewer.is_driver or len(self._debugger.viewers.names()) == 1):
            self._debugger.resume(stops)
        self._viewer.close()

    # -- events ----------------------------------------------------------------------------------

    def on_event(self, event: MeshEvent) -> None:
        """Handle an event of the mesh debugger."""
        if isinstance(event, RankStopped):
            self._table.stopped(event.at)
        elif isinstance(event, RankResumed):
            self._table.resumed(event.key)
        elif isinstance(event, RankGone):
            self._table.rank_gone(event.mesh, event.rank)
        elif isinstance(event, RankRanOff):
            self._table.ran_off(event.key)
        else:
            assert isinstance(event, BreakpointsChanged)

    def kernel_event(self, event: Event) -> None:
        """Handle an event for the front end from the kernel's own debugger."""
        self._table.kernel_event(event)

    def kernel_moves(self, command: str) -> None:
        """Record that one of `MOVES` is about to be requested from the kernel's own debugger."""
        if command in MOVES and command != "continue":
            self._table.kernel_steps()

    # -- which requests are about ranks ------------------------------------------------------------

    def owns(self, request: Request) -> bool:
        """Return whether a request concerns a rank, and so is for `answer`, not for the kernel's own debugger."""
        command = str(request.get("command"))
        arguments = arguments_of(request)
        if command in _OURS:
            return True
        number = next((arguments.get(name) for name in _NUMBERS if name in arguments), None)
        if isinstance(number, int) and number >= BASE:
            return command in _BY_NUMBER  # the object may be gone; `answer` then reports that
        if command == "pause":
            # JupyterLab's button sends "pause" until it receives a stop, and the running code may be on ranks.
            return not self._table.lists_threads and (self._table.shows_stop or bool(self._waited()))
        if command in _BY_THREAD:
            return self._table.names_stop(arguments)
        return command in _BY_FRAME and self._table.names_frame(arguments)

    # -- replies -----------------------------------------------------------------------------------

    def answer(self, request: Request) -> Response:
        """Return the reply to a request that `owns` assigns to ranks; never raises."""
        try:
            body = self._answers[str(request.get("command"))](arguments_of(request))
        except (RequestError, DriverError, LookupError, ValueError, TypeError, RuntimeError, TimeoutError) as error:
            text = str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)
            return refusal(request, text or type(error).__name__)
        return response(request, body)

    def _stack_trace(self, arguments: Arguments) -> Body:
        at = self._table.stop_at(arguments)
        frames = frames_of_an_ide(at.stop.frames)
        start = int(arguments.get("startFrame") or 0)
        levels = int(arguments.get("levels") or 0) or len(frames)
        prefix = self._table.frame_prefix(at)
        part = frames[start : start + levels]
        numbers = self._table.frame_ids(at, [frame.index for frame in part])
        replies = [frame_reply(frame, number, prefix) for frame, number in zip(part, numbers, strict=True)]
        return {"stackFrames": replies, "totalFrames": len(frames)}

    def _scopes(self, arguments: Arguments) -> Body:
        frame = self._table.frame_at(arguments)
        return {
            "scopes": [
                {
                    "name": scope.name.capitalize(),
                    "variablesReference": self._table.value_id(frame.key, scope.ref, scope.indexed, scope=True),
                    "expensive": scope.name.lower() != "locals",
                    **({"presentationHint": "locals"} if scope.name.lower() == "locals" else {}),
                }
                for scope in self._debugger.scopes(frame.key, frame.index)
            ]
        }

    def _variables(self, arguments: Arguments) -> Body:
        value = self._table.value_at(arguments)
        which = arguments.get("filter")
        start, count = int(arguments.get("start") or 0), int(arguments.get("count") or 0)
        if which == "named":
            start += value.indexed
        elif which == "indexed":
            count = min(count or value.indexed, max(0, value.indexed - start))
        most = count or MOST_CHILDREN + 1
        found = self._debugger.variables(value.key, value.ref, start, most)
        more = not count and len(found) > MOST_CHILDREN
        if value.scope:
            found = [each for each in found if is_shown(each.name)]
        replies = [
            value_reply(each, self._table.value_id(value.key, each.ref, each.indexed), value.scope)
            for each in found[: count or MOST_CHILDREN]
        ]
        if more:
            replies.append({"name": "…", "value": f"more than {MOST_CHILDREN}", "type": "", "variablesReference": 0})
        return {"variables": replies}

    def _evaluate(self, arguments: Arguments) -> Body:
        frame = self._table.frame_at(arguments)
        at = self._table.stop_of(frame.key)
        raw = bool((arguments.get("format") or {}).get("rawString"))  # VS Code parses such strings
        found = self._debugger.evaluate([at], str(arguments.get("expression") or ""), frame.index, raw=raw)[at.key]
        if found.error:
            raise RequestError(found.error)
        if arguments.get("context") == "repl" and not self._table.lists_threads:
            # JupyterLab then requests the frames, to show what has changed.
            self._table.renew_frames(frame.key)
        return evaluation_reply(found, self._table.value_id(frame.key, found.ref, found.indexed))

    def _set_variable(self, arguments: Arguments) -> Body:
        value = self._table.value_at(arguments)
        name, expression = str(arguments.get("name")), str(arguments.get("value"))
        made = self._debugger.set_variable(value.key, value.ref, name, expression, viewer=self._viewer)
        return value_reply(made, self._table.value_id(value.key, made.ref, made.indexed), value.scope)

    def _set_expression(self, arguments: Arguments) -> Body:
        target, source = arguments.get("expression"), arguments.get("value")
        self._assign(self._table.frame_at(arguments), f"{target} = {source}")
        body = self._evaluate({"frameId": arguments.get("frameId"), "expression": target})
        return {**body, "value": body["result"]}

    def _copy_to_globals(self, arguments: Arguments) -> Body:
        source, target = str(arguments.get("srcVariableName")), str(arguments.get("dstVariableName"))
        if not source.isidentifier() or not target.isidentifier():
            raise RequestError(f"{source!r} cannot be copied to {target!r}: give the names of two variables")
        frame = self._table.frame_at({"frameId": arguments.get("srcFrameId")})
        self._debugger.viewers.check(self._viewer)
        self._call(frame, partial(copy_to_globals, source, target))
        return {"value": "", "variablesReference": 0}

    def _assign(self, frame: FrameOf, statement: str) -> None:
        at = self._table.stop_of(frame.key)
        self._debugger.viewers.check(self._viewer)
        error = self._debugger.evaluate([at], statement, frame.index)[at.key].error
        if error:
            raise RequestError(error)

    def _completions(self, arguments: Arguments) -> Body:
        text = str(arguments.get("text") or "")[: max(0, int(arguments.get("column") or 1) - 1)]
        word = text[len(text.rstrip("_." + "".join(c for c in text if c.isalnum()))) :]
        found = self._call(self._table.frame_at(arguments), partial(complete, word)) if word else []
        start = len(text) - len(word)
        return {"targets": [{"label": each, "start": start, "length": len(word)} for each in found]}

    def _exception_info(self, arguments: Arguments) -> Body:
        at = self._table.stop_at(arguments)
        kind, _, what = at.stop.text.partition(": ")
        return {"exceptionId": kind or at.stop.reason, "description": what, "breakMode": "unhandled"}

    def _rich(self, arguments: Arguments) -> Body:
        name = str(arguments.get("variableName"))
        if self._bundle is None or not name.isidentifier():
            return {"data": {}, "metadata": {}}
        data, metadata = self._call(self._table.frame_at(arguments), partial(rich_value, name, self._bundle))
        return {"data": data, "metadata": metadata}

    def _call(self, frame: FrameOf, function: Callable[[FrameType], _T]) -> _T:
        """Call a function with a frame, in the rank, on the stopped thread."""
        at = self._table.stop_of(frame.key)
        found = self._debugger.call([at], function, frame.index)[at.key]
        if isinstance(found, Exception):
            raise RequestError(str(found))
        return found

    # -- resuming and pausing ------------------------------------------------------------------------

    def _move(self, how: str, arguments: Arguments) -> Body:
        stops = self._table.begin_move(arguments, how)
        try:
            self._debugger.resume(stops, how, viewer=self._viewer)
        except BaseException:
            self._table.move_refused(stops)
            raise
        return {"allThreadsContinued": False} if how == "continue" else {}

    def _pause(self, arguments: Arguments) -> Body:
        thread = self._table.thread_named(arguments.get("threadId"))
        if thread is not None:
            self._debugger.pause(thread.mesh, [thread.rank], viewer=self._viewer)
        elif not self._table.shows_stop or not self._table.show_again():
            for mesh, ranks in self._waited().items():
                self._debugger.pause(mesh, list(ranks), viewer=self._viewer)
        return {}

    def _pause_many(self, arguments: Arguments) -> Body:
        self._debugger.pause(arguments.get("mesh"), arguments.get("ranks"), viewer=self._viewer)
        return {}

    def _resume_many(self, arguments: Arguments) -> Body:
        how = str(arguments.get("how") or "continue")
        stops = [at for at in self._debugger.stops(arguments.get("mesh")) if _chosen(at, arguments.get("ranks"))]
        if how != "continue":
            self._table.keep_turn(stops)
        self._debugger.resume(stops, how, viewer=self._viewer)
        return {"ranks": [[at.mesh, at.rank] for at in stops]}

    # -- all ranks ---------------------------------------------------------------------------------

    def focus(self, rank: int, mesh: str | None = None) -> str:
        """Make the front end show a stopped rank. Return the name of the rank. See `StopTable.focus`."""
        return self._table.focus(rank, mesh)

    def state(self) -> DebugState:
        """Return what all ranks of all meshes are doing."""
        return self._table.state()

    def threads(self) -> list[Body]:
        """Return the ranks as threads: the stopped ones, by location, and the others."""
        return self._table.threads()

    @property
    def stopped_threads(self) -> list[int]:
        """Return the threads that a newly connected front end shows, for `debugInfo`."""
        return self._table.stopped_threads

    def _focus(self, arguments: Arguments) -> Body:
        return {"shown": self.focus(int(arguments["rank"]), arguments.get("mesh"))}

    def _state(self, _arguments: Arguments) -> Body:
        return {**self.state(), "driving": self._viewer.is_driver}

    # -- shared by ranks and the kernel ----------------------------------------------------------------

    def set_breakpoints(self, arguments: Arguments, kernel: Iterable[Body] | None) -> list[Body]:
        """Make ranks stop at exactly these lines of a file. Return the result for each.

        Args:
            arguments: the arguments of `setBreakpoints`.
            kernel: the replies of the kernel's own debugger; None if it could not set them.
        """
        path = str((arguments.get("source") or {}).get("path") or "")
        asked: list[Arguments] = list(arguments.get("breakpoints") or ())
        wanted: list[BreakpointLine] = []
        made: list[int | str] = []  # for each requested breakpoint: its index in `wanted`, or why it has none
        for each in asked:
            try:
                wanted.append(breakpoint_of(each))
                made.append(len(wanted) - 1)
            except RequestError as error:
                made.append(str(error))
        set_now: list[MeshBreakpoint] = []
        if is_in_editor(path):
            made = ["this document is not part of the notebook, so neither the kernel nor a rank runs it"] * len(asked)
        else:
            try:
                set_now = self._debugger.replace(path, OWNER, wanted)
            except (RuntimeError, ValueError) as error:
                made = [str(error) for _ in asked]
        replies = list(kernel or ())
        return [
            breakpoint_reply(
                replies[at] if at < len(replies) else None, which if isinstance(which, str) else set_now[which], each
            )
            for at, (each, which) in enumerate(zip(asked, made, strict=True))
        ]

    def set_exception_filters(self, filters: Iterable[str]) -> list[str]:
        """Enable or disable stops at failures on ranks. Return the remaining filters, for the kernel's own debugger."""
        filters = list(filters)
        wanted = ERROR_FILTER in filters
        if wanted and self._error_breakpoint is None:
            self._error_breakpoint = self._debugger.break_on_error(owner=OWNER).id
        elif not wanted and self._error_breakpoint is not None:
            number, self._error_breakpoint = self._error_breakpoint, None
            if any(each.id == number for each in self._debugger.breakpoints()):  # the user may have cleared it
                self._debugger.clear(number)
        return [each for each in filters if each != ERROR_FILTER]

    def source(self, path: str) -> str:
        """Return the text of a file, from a stopped rank that has it; "" if none does."""
        at = self._table.stop_with_file(path)
        if at is None:
            return ""
        loaded = next((frame.loaded for frame in at.stop.frames if frame.file == path), "")
        found = self._debugger.call([at], partial(read_source, loaded or path))[at.key]
        return found if isinstance(found, str) else ""


def _chosen(at: RankStop, ranks: Iterable[int] | None) -> bool:
    return ranks is None or at.rank in ranks
