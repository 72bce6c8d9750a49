"""One front end's debugging session, as far as it concerns ranks: DAP requests in, replies and events out.

`RankSession` knows nothing of who carries the messages. Requests are answered on whatever thread calls `answer`, which
may take as long as the mesh debugger does (it has deadlines); events of the mesh debugger and of the kernel's own
debugger come in at any time, and go out through `publish` in an order that makes sense to the front end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.controller.viewers import DriverError
from monarch_kernel.debugger.dap.id_table import BASE, FrameOf, RankThread, StopKey
from monarch_kernel.debugger.dap.stop_queue import Event
from monarch_kernel.debugger.dap.stop_table import RankTable
from monarch_kernel.debugger.dap.translate import (
    MOVES,
    RequestError,
    breakpoint_of,
    breakpoint_reply,
    evaluation_reply,
    frame_reply,
    is_shown,
    refusal,
    response,
    stopped_body,
    value_reply,
)
from monarch_kernel.debugger.events import BreakpointsChanged, RankGone, RankRanOff, RankResumed, RankStop, RankStopped
from monarch_kernel.debugger.events import Event as MeshEvent
from monarch_kernel.debugger.frames import frames_of_an_ide
from monarch_kernel.debugger.rank.frame_tools import complete, copy_to_globals, read_source, rich_value

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.view import DebuggerView

#: Whose the breakpoints of front ends are.
OWNER = "dap"
#: The exception filter that ranks know.
ERROR_FILTER = "mesh"
ERROR_FILTERS = [
    {
        "filter": ERROR_FILTER,
        "label": "Mesh: exceptions that end an endpoint or cell on a rank",
        "description": "Stops the rank where it was raised, with all its frames",
        "default": False,
    }
]
#: Front ends that show one thread, and have no list of them.
_ONE_THREAD = ("", "jupyterlab")
#: How long a step may take before another stopped thread is shown (seconds).
STEP_PATIENCE = 1.0
#: As many children of a value are given at once to a front end that does not ask for a part of them.
MOST_CHILDREN = 500

# Requests by what they name what they are about by.
_BY_FRAME = ("scopes", "evaluate", "completions", "setExpression", "richInspectVariables")
_BY_THREAD = ("stackTrace", "exceptionInfo", "pause", *MOVES)
_ABOUT = (*_BY_FRAME, *_BY_THREAD, "variables", "setVariable", "copyToGlobals")
_NAMED_BY = ("threadId", "frameId", "variablesReference", "srcFrameId")
_OURS = ("mesh/state", "mesh/focus", "mesh/resume", "mesh/pause")


class RankSession(RankTable):
    """A front end's session with all ranks.

    Args:
        debugger: of this controller.
        publish: takes an event; called on any thread, one at a time, and must not block.
        later: calls a function after so many seconds.
        meshes: the proc meshes there are.
        waited: for whom the kernel's main thread waits now, as mesh and ranks.
        bundle: makes of a value, on a rank, what `richInspectVariables` shows: data and metadata by MIME type.
    """

    def __init__(
        self,
        debugger: DebuggerView,
        publish: Callable[[Event], None],
        later: Callable[[float, Callable[[], None]], Any],
        meshes: Callable[[], Iterable[Any]] = tuple,
        waited: Callable[[], Mapping[str, Iterable[int]]] = dict,
        bundle: Callable[[Any], Any] | None = None,
    ) -> None:
        self._debugger = debugger
        super().__init__(publish, meshes)
        self._later = later
        self._waited = waited
        self._bundle = bundle
        self._kernel_threads: set[int] = set()
        self._steps = 0
        self._step_from: StopKey | None = None  # of a rank: where the last step began
        self._error_breakpoint: int | None = None
        self._viewer = debugger.viewer("JupyterLab")
        self._unsubscribe: Callable[[], None] | None = None

    # -- beginning and end -----------------------------------------------------------------------

    def initialize(self, arguments: Mapping[str, Any]) -> None:
        """The front end says who it is; another one may do so later."""
        client = str(arguments.get("clientID") or "")
        with self._lock:
            self._queue.lists_threads = client.lower() not in _ONE_THREAD
            self._viewer.name = str(arguments.get("clientName") or client or "a Jupyter front end")

    @property
    def lists_threads(self) -> bool:
        """Whether the front end shows more than one thread."""
        return self._queue.lists_threads

    def attach(self) -> None:
        """Begin to tell of stops, first of those that there are. May be called again."""
        if self._unsubscribe is None:
            self._unsubscribe = self._debugger.subscribe(self.on_event)
            for at in self._debugger.stops():
                self.on_event(RankStopped(at))
        else:
            with self._lock:
                self._send(self._queue.show_again())

    def close(self) -> None:
        """The front end has turned the debugger off: its breakpoints go, and what is stopped goes on, unless that is
        another viewer's."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._debugger.clear(owner=OWNER)
        stops = self._debugger.stops()
        if stops and (self._viewer.is_driver or len(self._debugger.viewers.names()) == 1):
            self._debugger.resume(stops)
        self._viewer.close()

    # -- events ----------------------------------------------------------------------------------

    def on_event(self, event: MeshEvent) -> None:
        """An event of the mesh debugger."""
        with self._lock:
            if isinstance(event, RankStopped):
                self._stopped(event.at)
            elif isinstance(event, RankResumed):
                self._resumed(event.key)
            elif isinstance(event, RankGone):
                for key in [key for key in self._at if key[:2] == (event.mesh, event.rank)]:
                    self._resumed(key)
                for thread in self._ids.forget_rank(event.mesh, event.rank):
                    self._send(self._queue.gone(thread))
            elif isinstance(event, RankRanOff):
                if event.key == self._step_from:  # the thread will not stop again: its turn is over
                    self._send(self._queue.overdue())
            else:
                assert isinstance(event, BreakpointsChanged)

    def _stopped(self, at: RankStop) -> None:
        if at.key in self._at:
            return
        ident = at.stop.thread or -at.stop.id  # a post mortem has no thread; it is told from others by its number
        thread = self._ids.thread(at.mesh, at.rank, ident)
        self._at[at.key] = at
        self._thread_of[at.key] = thread
        self._send(self._queue.stopped(thread, stopped_body(at)))

    def _resumed(self, key: StopKey) -> None:
        thread = self._thread_of.pop(key, None)
        if thread is None:
            return
        del self._at[key]
        self._ids.forget_stop(key)
        if thread not in self._thread_of.values():  # else it has stopped again already
            self._send(self._queue.resumed(thread))

    def kernel_event(self, event: Event) -> None:
        """An event of the kernel's own debugger, on its way to the front end."""
        body: dict[str, Any] = event.get("body") or {}
        with self._lock:
            if event.get("event") == "stopped" and "threadId" in body:
                self._kernel_threads.add(body["threadId"])
                self._send(self._queue.stopped(body["threadId"], body))
            elif event.get("event") == "continued":
                everyone = body.get("allThreadsContinued", True)
                over = self._kernel_threads if everyone else self._kernel_threads & {body.get("threadId")}
                self._kernel_threads = self._kernel_threads - over
                for thread in sorted(over):
                    self._send(self._queue.resumed(thread))
            else:
                self._publish(event)

    def kernel_moves(self, command: str) -> None:
        """The kernel's own debugger is about to be asked for one of `MOVES`."""
        with self._lock:
            if command != "continue" and self._queue.shown in self._kernel_threads:
                self._step(self._queue.shown)

    def _step(self, thread: int) -> None:
        self._queue.step(thread)
        self._steps += 1
        number = self._steps

        def overdue() -> None:
            with self._lock:
                if number == self._steps:
                    self._send(self._queue.overdue())

        self._later(STEP_PATIENCE, overdue)

    # -- whose a request is ------------------------------------------------------------------------

    def owns(self, request: Mapping[str, Any]) -> bool:
        """Whether a request is about a rank: such are for `answer`, others for the kernel's own debugger."""
        command = str(request.get("command"))
        arguments: Mapping[str, Any] = request.get("arguments") or {}
        if command in _OURS:
            return True
        named = next((arguments.get(name) for name in _NAMED_BY if name in arguments), None)
        if isinstance(named, int) and named >= BASE:
            return command in _ABOUT  # it may be over, which is for us to say
        with self._lock:
            if command == "pause":
                # JupyterLab's button says pause until it has heard of a stop; and what runs may well be the ranks.
                return not self._queue.lists_threads and (self._queue.shown is not None or bool(self._waited()))
            if command in _BY_THREAD:
                return self._thread(arguments) is not None
            return command in _BY_FRAME and self._frame(arguments) is not None

    # -- replies -----------------------------------------------------------------------------------

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a request that is ours; never raises."""
        command = str(request.get("command"))
        arguments: Mapping[str, Any] = request.get("arguments") or {}
        try:
            body = self._answer(command, arguments)
        except (RequestError, DriverError, LookupError, ValueError, TypeError, RuntimeError, TimeoutError) as error:
            text = str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)
            return refusal(request, text or type(error).__name__)
        return response(request, body)

    def _answer(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if command in MOVES:
            return self._move(command, arguments)
        names = {
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
        }
        return names[command](arguments)

    def _stack_trace(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            at = self._stop(self._thread(arguments))
            frames = frames_of_an_ide(at.stop.frames)
            start = int(arguments.get("startFrame") or 0)
            levels = int(arguments.get("levels") or 0) or len(frames)
            prefix = "" if self._queue.lists_threads else f"[{self._rank_name(at.mesh, at.rank)}] "
            part = frames[start : start + levels]
            replies = [frame_reply(frame, self._ids.frame(at.key, frame.index), prefix) for frame in part]
        return {"stackFrames": replies, "totalFrames": len(frames)}

    def _scopes(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        frame = self._wanted_frame(arguments)
        scopes = self._debugger.scopes(frame.key, frame.index)
        with self._lock:
            return {
                "scopes": [
                    {
                        "name": scope.name.capitalize(),
                        "variablesReference": self._ids.value(frame.key, scope.ref, scope.indexed, scope=True),
                        "expensive": scope.name.lower() != "locals",
                        **({"presentationHint": "locals"} if scope.name.lower() == "locals" else {}),
                    }
                    for scope in scopes
                ]
            }

    def _variables(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        value = self._wanted_value(arguments)
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
        with self._lock:
            replies = [
                value_reply(each, self._ids.value(value.key, each.ref, each.indexed), value.scope)
                for each in found[: count or MOST_CHILDREN]
            ]
        if more:
            replies.append({"name": "…", "value": f"more than {MOST_CHILDREN}", "type": "", "variablesReference": 0})
        return {"variables": replies}

    def _evaluate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        frame = self._wanted_frame(arguments)
        at = self._stop(frame.key)
        found = self._debugger.evaluate([at], str(arguments.get("expression") or ""), frame.index)[at.key]
        if found.error:
            raise RequestError(found.error)
        with self._lock:
            if arguments.get("context") == "repl" and not self._queue.lists_threads:
                # JupyterLab asks for the frames after this, to show what has changed; but it only looks into frames
                # that it has not seen before.
                self._ids.renew_frames(frame.key)
            return evaluation_reply(found, self._ids.value(frame.key, found.ref, found.indexed))

    def _set_variable(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        value = self._wanted_value(arguments)
        name, expression = str(arguments.get("name")), str(arguments.get("value"))
        made = self._debugger.set_variable(value.key, value.ref, name, expression, viewer=self._viewer)
        with self._lock:
            return value_reply(made, self._ids.value(value.key, made.ref, made.indexed), value.scope)

    def _set_expression(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        target, source = arguments.get("expression"), arguments.get("value")
        self._assign(self._wanted_frame(arguments), f"{target} = {source}")
        body = self._evaluate({"frameId": arguments.get("frameId"), "expression": target})
        return {**body, "value": body["result"]}

    def _copy_to_globals(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        source, target = str(arguments.get("srcVariableName")), str(arguments.get("dstVariableName"))
        if not source.isidentifier() or not target.isidentifier():
            raise RequestError(f"{source!r} cannot be copied to {target!r}: give the names of two variables")
        frame = self._wanted_frame({"frameId": arguments.get("srcFrameId")})
        self._debugger.viewers.check(self._viewer)
        self._call(frame, partial(copy_to_globals, source, target))
        return {"value": "", "variablesReference": 0}

    def _assign(self, frame: FrameOf, statement: str) -> None:
        at = self._stop(frame.key)
        self._debugger.viewers.check(self._viewer)
        error = self._debugger.evaluate([at], statement, frame.index)[at.key].error
        if error:
            raise RequestError(error)

    def _completions(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        text = str(arguments.get("text") or "")[: max(0, int(arguments.get("column") or 1) - 1)]
        word = text[len(text.rstrip("_." + "".join(c for c in text if c.isalnum()))) :]
        found: Any = self._call(self._wanted_frame(arguments), partial(complete, word)) if word else []
        start = len(text) - len(word)
        return {"targets": [{"label": each, "start": start, "length": len(word)} for each in found]}

    def _exception_info(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        at = self._stop(self._thread(arguments))
        kind, _, what = at.stop.text.partition(": ")
        return {"exceptionId": kind or at.stop.reason, "description": what, "breakMode": "unhandled"}

    def _rich(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name = str(arguments.get("variableName"))
        if self._bundle is None or not name.isidentifier():
            return {"data": {}, "metadata": {}}
        data, metadata = self._call(self._wanted_frame(arguments), partial(rich_value, name, self._bundle))
        return {"data": data, "metadata": metadata}

    def _call(self, frame: FrameOf, function: Callable[[Any], Any]) -> Any:
        at = self._stop(frame.key)
        found = self._debugger.call([at], function, frame.index)[at.key]
        if isinstance(found, Exception):
            raise RequestError(str(found))
        return found

    # -- going on ------------------------------------------------------------------------------------

    def _move(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            at = self._stop(self._thread(arguments))
            if command != "continue":
                if not at.stop.steppable:
                    raise RequestError("these frames have ended with an error: they can be looked at, or continued")
                self._step_from = at.key
                self._step(self._thread_of[at.key])
            stops = self._together(at) if command == "continue" else [at]
            self._queue.withdraw(self._thread_of[each.key] for each in stops if each is not at)
        try:
            self._debugger.resume(stops, MOVES[command], viewer=self._viewer)
        except BaseException:
            with self._lock:
                self._queue.hold()
                for each in stops:  # that have not gone on
                    if each.key in self._at and self._thread_of[each.key] not in self._queue:
                        self._send(self._queue.stopped(self._thread_of[each.key], stopped_body(each)))
            raise
        return {"allThreadsContinued": False} if command == "continue" else {}

    def _together(self, at: RankStop) -> list[RankStop]:
        """The stops that Continue means: where one thread is shown, those of all ranks of its mesh."""
        if self._queue.lists_threads or not at.stop.thread:
            return [at]
        return [each for each in self._at.values() if each.mesh == at.mesh and each.stop.thread]

    def _pause(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        thread = self._ids.thing(arguments.get("threadId"))
        if isinstance(thread, RankThread):
            self._debugger.pause(thread.mesh, [thread.rank], viewer=self._viewer)
            return {}
        with self._lock:
            shown = self._queue.shown is not None
            if shown:
                self._send(self._queue.show_again())
        if not shown:
            for mesh, ranks in self._waited().items():
                self._debugger.pause(mesh, list(ranks), viewer=self._viewer)
        return {}

    def _pause_many(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self._debugger.pause(arguments.get("mesh"), arguments.get("ranks"), viewer=self._viewer)
        return {}

    def _resume_many(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        how = str(arguments.get("how") or "continue")
        stops = [at for at in self._debugger.stops(arguments.get("mesh")) if _chosen(at, arguments.get("ranks"))]
        with self._lock:
            shown = self._shown_key()
            if how != "continue" and any(at.key == shown for at in stops) and self._queue.shown is not None:
                self._step(self._queue.shown)
        self._debugger.resume(stops, how, viewer=self._viewer)
        return {"ranks": [[at.mesh, at.rank] for at in stops]}

    # -- which rank is shown ---------------------------------------------------------------------------

    def _focus(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"shown": self.focus(int(arguments["rank"]), arguments.get("mesh"))}

    def _state(self, _arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.state(), "driving": self._viewer.is_driver}

    # -- what ranks and the kernel have in common ------------------------------------------------------

    def set_breakpoints(
        self, arguments: Mapping[str, Any], kernel: Iterable[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """Have ranks stop at these lines of a file, and no others; gives what became of each.

        Args:
            arguments: those of `setBreakpoints`.
            kernel: what the kernel's own debugger said of each; None if it could not.
        """
        path = str((arguments.get("source") or {}).get("path") or "")
        asked: list[Mapping[str, Any]] = list(arguments.get("breakpoints") or ())
        made: list[Any] = []
        wanted: list[dict[str, Any]] = []
        for each in asked:
            try:
                wanted.append(breakpoint_of(each))
                made.append(len(wanted) - 1)
            except RequestError as error:
                made.append(str(error))
        try:
            set_now = self._debugger.replace(path, OWNER, wanted)
        except (RuntimeError, ValueError) as error:
            set_now, made = [], [str(error)] * len(asked)
        said = list(kernel or ())
        return [
            breakpoint_reply(
                said[at] if at < len(said) else None,
                made[at] if isinstance(made[at], str) else set_now[made[at]],
                each,
            )
            for at, each in enumerate(asked)
        ]

    def set_exception_filters(self, filters: Iterable[str]) -> list[str]:
        """Have ranks stop at failures, or no more; gives the filters that are left for the kernel's own debugger."""
        filters = list(filters)
        wanted = ERROR_FILTER in filters
        if wanted and self._error_breakpoint is None:
            self._error_breakpoint = self._debugger.break_on_error(owner=OWNER).id
        elif not wanted and self._error_breakpoint is not None:
            number, self._error_breakpoint = self._error_breakpoint, None
            if any(each.id == number for each in self._debugger.breakpoints()):  # a person may have cleared it
                self._debugger.clear(number)
        return [each for each in filters if each != ERROR_FILTER]

    def source(self, path: str) -> str:
        """The text of a file as a stopped rank knows it; "" if none does."""
        with self._lock:
            stops = [at for at in self._at.values() if any(frame.file == path for frame in at.stop.frames)]
        for at in stops[:1]:
            found = self._debugger.call([at], partial(read_source, path))[at.key]
            if isinstance(found, str):
                return found
        return ""


def _chosen(at: RankStop, ranks: Any) -> bool:
    return ranks is None or at.rank in ranks
