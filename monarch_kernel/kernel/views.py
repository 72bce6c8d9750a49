"""Serve the panel and the widgets: their comm, and the requests that they send."""

from __future__ import annotations

import re
import shlex
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monarch_kernel.actor import ProcMesh
from monarch_kernel.debugger import existing_debugger
from monarch_kernel.debugger.commands import breakpoint_commands
from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.events import user_frames
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.magics.dispatch import MeshCommands
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.notebook_facts import listed
from monarch_kernel.kernel.rank.name_lookup import MOST, variables_here
from monarch_kernel.launchers.listing import list_jobs
from monarch_kernel.meshes import format_ranks
from monarch_kernel.output import RankOutput, subscribe
from monarch_kernel.watch.model import plain
from monarch_kernel.widgets.connection import Closable, ViewConnection, ViewRequestError, comm_sender
from monarch_kernel.widgets.open_views import is_view
from monarch_kernel.widgets.plotting import mesh_of

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hang.verdict import Verdict
    from monarch_kernel.debugger.controller.stacks import Stacks
    from monarch_kernel.debugger.events import RankStop
    from monarch_kernel.debugger.model.stops import StackFrame


# Serve requests from the panel and widgets by running the corresponding `%mesh` commands.

# Translate a click into a `%mesh` line, which is executed, or inserted into a cell on request. Pure.

#: The default number of requested log lines.
LOG_LINES = 200


@dataclass(frozen=True, slots=True)
class Click:
    """An action requested in a view.

    Attributes:
        what: the word of the message, such as "heal".
        mesh: the name of the mesh; "" if no mesh is involved.
        size: the number of ranks of the mesh.
        ranks: the selected ranks, sorted; empty: all ranks.
        options: the other fields of the message.
    """

    what: str
    mesh: str = ""
    size: int = 0
    ranks: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Return the selected ranks."""
        return self.ranks or tuple(range(self.size))


def line_of(click: Click) -> str:
    """Return the arguments of the equivalent `%mesh` line.

    Raises:
        LookupError: there is no such action.
        ValueError: a required field, such as the rank, is missing.
    """
    if click.what not in _LINES:
        raise LookupError(f"there is nothing called {click.what!r} that a view can do")
    return _LINES[click.what](click)


def _named(word: str) -> Callable[[Click], str]:
    return lambda click: f"{word} {shlex.quote(click.mesh)}"


def _down(click: Click) -> str:
    return f"{_named('down')(click)}{' --force' if click.options.get('force') else ''}"


def _with_ranks(word: str) -> Callable[[Click], str]:
    return lambda click: f"{word} {shlex.quote(click.mesh)}{_ranks(click)}"


def _debug(command: str) -> Callable[[Click], str]:
    return lambda click: f"debug --on {shlex.quote(click.mesh)}{_ranks(click)} {command}"


def _ranks(click: Click) -> str:
    some = 0 < len(click.ranks) < click.size
    return f" -r {format_ranks(click.ranks)}" if some else ""


def _kill(click: Click) -> str:
    return f"kill {shlex.quote(click.mesh)} -r {format_ranks(click.all_ranks)}"


def _focus(click: Click) -> str:
    if len(click.ranks) != 1:
        raise ValueError("the debugger shows one rank: choose one")
    return f"focus {click.ranks[0]} --on {shlex.quote(click.mesh)}"


def _log(click: Click) -> str:
    return f"{_with_ranks('logs')(click)} -n {lines_wanted(click)}"


def lines_wanted(click: Click) -> int:
    """Return how many log lines per rank are requested."""
    lines = click.options.get("lines")
    return lines if isinstance(lines, int) and lines > 0 else LOG_LINES


def _kept(word: str) -> Callable[[Click], str]:
    def line(click: Click) -> str:
        name = click.options.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError("this needs the name of a kept mesh")
        return f"{word} {shlex.quote(name)}{' --force' if click.options.get('force') else ''}"

    return line


def _kill_job(click: Click) -> str:
    job = click.options.get("job")
    if not isinstance(job, str) or not job:
        raise ValueError("this needs the id of a job")
    return f"jobs kill {shlex.quote(job)}"


def _sync(click: Click) -> str:
    options = _options(click)
    words = ["sync", *map(shlex.quote, _texts(options.get("dirs")))]
    words += [f"--{name}" for name in ("env", "verify", "reload", "respawn", "restart") if options.get(name)]
    return " ".join([*words, "--on", shlex.quote(click.mesh)])


def _up(click: Click) -> str:
    """Return `%mesh up` with the fields of a form: name, procs or dims, dist, env, preload, keep, idle, sync."""
    options = _options(click)
    words = ["up"]
    if options.get("name"):
        words.append(shlex.quote(str(options["name"])))
    dims = options.get("dims")
    if isinstance(dims, Mapping):
        words += [shlex.quote(f"{label}={size}") for label, size in dims.items()]
    for name in ("procs", "dist", "idle"):
        if options.get(name):
            words += [f"--{name}", shlex.quote(str(options[name]))]
    env = options.get("env")
    pairs = [f"{key}={value}" for key, value in env.items()] if isinstance(env, Mapping) else _texts(env)
    for name, values in (("env", pairs), ("preload", _texts(options.get("preload")))):
        for value in values:
            words += [f"--{name}", shlex.quote(value)]
    words += [f"--{name}" for name in ("keep", "sync", "reuse", "replace") if options.get(name)]
    return " ".join(words)


def _options(click: Click) -> Mapping[str, object]:
    options = click.options.get("options")
    return options if isinstance(options, Mapping) else {}


def _texts(value: object) -> Sequence[str]:
    if isinstance(value, str):
        return [value] if value else []
    return [str(each) for each in value] if isinstance(value, list | tuple) else []


def _plot(click: Click) -> str:
    return f"plot {click.options.get('expression') or ''} --on {shlex.quote(click.mesh)}"


_LINES: dict[str, Callable[[Click], str]] = {
    "interrupt": _with_ranks("interrupt"),
    "kill": _kill,
    "heal": _with_ranks("heal"),
    "debug": _debug("pause"),
    "undebug": _debug("unpause"),
    "resume": _debug("continue"),
    "focus": _focus,
    "use": _named("use"),
    "sync": _sync,
    "down": _down,
    "restart": _named("restart"),
    "up": _up,
    "attach": _kept("attach"),
    "stop_kept": _kept("down"),
    "kill_job": _kill_job,
    "stack": _with_ranks("stacks"),
    "log": _log,
    "variables": _debug("locals"),
    "breakpoints": lambda _click: "break",
    "hang": _with_ranks("hang"),
    "plot": _plot,
}
#: Actions that change state. `ask` rejects them.
ACTIONS = frozenset(_LINES) - {"stack", "log", "variables", "breakpoints", "hang", "plot"}
#: Actions that need no mesh of this notebook.
OF_NO_MESH = frozenset(("up", "attach", "stop_kept", "kill_job", "breakpoints", "jobs"))


#: The time for ranks to list their variables (seconds).
VARIABLES_TIMEOUT = 5.0
#: The name of a view for other viewers of the debugger.
NAME = "a view in the front end"


#: The minimum interval between pushes of lines (seconds).
PERIOD = 0.2


#: The maximum number of lines per push; older lines beyond it are dropped and counted.
MOST_LINES = 500


#: The maximum length of a pushed line (characters).
LONGEST = 4_000


class NotebookServices:
    """The `Services` of the front ends of one notebook. Any thread may use them.

    Args:
        notebook: the notebook.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._questions: dict[str, Callable[[Click], object]] = {
            "stack": self._stack,
            "log": self._log,
            "variables": self._variables,
            "breakpoints": self._breakpoints,
            "hang": self._hang,
            "code": self._code,
            "jobs": self._jobs,
        }

    @property
    def is_busy(self) -> bool:
        """See `Services`."""
        return self._notebook.is_busy

    def ask(self, request: Mapping[str, object]) -> Any:
        """See `Services`."""
        what = str(request.get("what"))
        if what not in self._questions:
            raise ViewRequestError(f"there is nothing called {what!r} to ask")
        of_none = what in OF_NO_MESH or (what == "code" and request.get("action") in OF_NO_MESH)
        return self._questions[what](self._click(request, what, of_none))

    def act(self, request: Mapping[str, object]) -> str:
        """See `Services`."""
        what = str(request.get("what"))
        if what not in ACTIONS:
            raise ViewRequestError(f"there is nothing called {what!r} to do")
        said: list[str] = []
        value = self._run(self._click(request, what, what in OF_NO_MESH), said.append)
        if value is not None:  # the receipt of a sync
            said.append(str(value))
        return "\n".join(said)

    def follow(self, request: Mapping[str, object], push: Callable[[dict[str, object]], object]) -> Closable:
        """See `Services`."""
        click = self._click(request, "log", False)
        return LogFollower(click.mesh, click.ranks or None, str(request.get("search") or ""), push)

    # -- what is meant ----------------------------------------------------------------------------

    def _click(self, request: Mapping[str, Any], what: str, of_none: bool) -> Click:
        if of_none:
            return Click(what, options=request)
        mesh = self._mesh(request)
        ranks = sorted({int(rank) for rank in request.get("ranks") or ()})
        for rank in ranks:
            if not 0 <= rank < len(mesh):
                raise ViewRequestError(f"mesh {mesh.name} has no rank {rank}: it has {len(mesh)}")
        return Click(what, mesh.name, len(mesh), tuple(ranks), request)

    def _mesh(self, request: Mapping[str, object]) -> ProcMesh:
        mesh = mesh_of(str(request.get("mesh")))
        if self._notebook.session.proc_meshes().get(mesh.name) is not mesh:
            raise ViewRequestError(
                f"a newer mesh is called {mesh.name}, too, so that name means the other one",
                "give each mesh a different name",
            )
        return mesh

    def _run(self, click: Click, say: Callable[[str], object]) -> Any:
        return MeshCommands(self._notebook, say, NAME).run(line_of(click))

    def _code(self, click: Click) -> dict[str, str]:
        action = str(click.options.get("action"))
        return {"code": f"%mesh {line_of(Click(action, click.mesh, click.size, click.ranks, click.options))}"}

    # -- answers ----------------------------------------------------------------------------------

    def _stack(self, click: Click) -> dict[str, object]:
        found: Stacks = self._run(click, _nothing)
        groups: list[dict[str, object]] = [
            {"ranks": list(note.ranks), "frames": [], "note": note.text} for note in found.notes if note.ranks
        ]
        for each in found.classes:
            outside = any(found.snapshots[rank].outside for rank in each.ranks)
            by = ["by py-spy"] if outside else []
            for stack in each.stacks:
                note = ", ".join(filter(None, [stack.state, *by]))
                frames = [self._frame(frame) for frame in stack.frames]
                groups.append({"ranks": list(each.ranks), "frames": frames, "note": note})
        if found.idle:
            groups.append({"ranks": list(found.idle), "frames": [], "note": "idle: waiting for a message"})
        return {"stacks": groups}

    def _frame(self, frame: StackFrame) -> dict[str, object]:
        place = frame.place
        return {
            "function": place.name,
            "file": self._label(place.file),
            "line": place.line,
            "text": frame.source,
        }

    def _log(self, click: Click) -> dict[str, object]:
        lines = lines_wanted(click)
        mesh = self._notebook.session.proc_meshes()[click.mesh]
        texts = tool_runtime().logs(mesh, ranks=click.all_ranks, tail=lines)
        found: list[list[Any]] = []
        for rank in click.all_ranks:
            # The agent keeps one text: the stream of a line is known only while it is written.
            found += [[rank, "stdout", line] for line in texts.get(rank).splitlines()]
        return {"lines": found[-lines * len(click.all_ranks) :], "dropped": 0}

    def _variables(self, click: Click) -> dict[str, object]:
        if len(click.all_ranks) != 1:
            raise ViewRequestError("variables are shown of one rank at a time", "choose a rank")
        (rank,) = click.all_ranks
        stop = self._stop_of(click.mesh, rank)
        if stop is not None:
            return self._of_frame(stop, click.options.get("frame"))
        mesh = self._notebook.session.proc_meshes()[click.mesh]
        answers = ask(mesh, variables_here, ranks=[rank], timeout=VARIABLES_TIMEOUT)
        if rank not in answers.values:
            why = answers.dead.get(rank) or answers.error_of(rank) or f"no answer within {VARIABLES_TIMEOUT:g} s"
            raise ViewRequestError(f"rank {rank} of mesh {click.mesh}: {why}")
        named = [{"name": name, "type": kind, "text": text} for name, kind, text in answers.values[rank]]
        return {"frame": None, "variables": named}

    @staticmethod
    def _stop_of(mesh: str, rank: int) -> RankStop | None:
        debugger = existing_debugger()
        if debugger is None:
            return None
        stops = [at for at in debugger.stops(mesh) if at.rank == rank and at.stop.thread]
        return stops[-1] if stops else None

    def _of_frame(self, at: RankStop, wanted: object) -> dict[str, object]:
        debugger = existing_debugger()
        assert debugger is not None
        frames = user_frames(at.stop.frames)
        frame = frames[min(max(0, wanted if isinstance(wanted, int) else 0), len(frames) - 1)]
        scopes = debugger.scopes(at.key, frame.index)
        found = debugger.variables(at.key, scopes[0].ref, 0, MOST) if scopes else []
        return {
            "frame": {"function": frame.name, "file": self._label(frame.file), "line": frame.line},
            "variables": [{"name": each.name, "type": each.type, "text": each.value} for each in found[:MOST]],
        }

    def _breakpoints(self, _click: Click) -> dict[str, object]:
        debugger = existing_debugger()
        found: list[dict[str, object]] = []
        for each in debugger.breakpoints() if debugger is not None else ():
            found.append(
                {
                    "id": str(each.id),
                    "file": self._label(each.spec.file) if each.spec.file else "",
                    "line": each.spec.line,
                    "condition": each.spec.condition,
                    "ranks": None if each.ranks is None else list(each.ranks),
                    "text": breakpoint_commands.described(each, self._notebook.file_label),
                }
            )
        return {"breakpoints": found}

    def _jobs(self, _click: Click) -> dict[str, object]:
        places = self._notebook.session.provider_hosts
        found = list_jobs(places.awaited())
        return {"jobs": [plain(listed(job, places)) for job in found.jobs], "notes": list(found.notes)}

    def _hang(self, click: Click) -> dict[str, object]:
        from monarch_kernel.debugger.controller.hang.verdict import NOTHING

        verdict: Verdict = self._run(click, _nothing)
        return {"hangs": verdict.kind != NOTHING, "text": str(verdict)}

    def _label(self, file: str) -> str:
        label = self._notebook.file_label(file)
        return label.removeprefix("Cell ") if label else file


def _nothing(_text: str) -> None:
    """Discard the text of a command: views use only its value."""


class LogFollower:
    """Pushes the lines that ranks of one mesh write, from construction until `close`.

    Args:
        mesh: the name of the mesh.
        ranks: the ranks; None for all.
        search: only push lines that contain this, or match it if it is a valid regular expression.
        push: called with `lines` and `dropped`, on a thread of this object.
    """

    def __init__(
        self, mesh: str, ranks: Iterable[int] | None, search: str, push: Callable[[dict[str, object]], object]
    ) -> None:
        self._mesh = mesh
        self._ranks = None if ranks is None else frozenset(ranks)
        self._found = _searcher(search)
        self._push = push
        self._changed = threading.Condition()
        self._lines: deque[tuple[int, str, str]] = deque()
        self._dropped = 0
        self._begun: dict[tuple[str, str], str] = {}  # the unfinished line, by process and stream
        self._closed = False
        self._subscription = subscribe(self._on_output)
        threading.Thread(target=self._run, name="monarch-log", daemon=True).start()

    def close(self) -> None:
        """Stop pushing. Closing again has no effect."""
        self._subscription.close()
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _on_output(self, output: RankOutput) -> None:
        """Store output. Called on the polling thread, so it must be fast."""
        if output.mesh != self._mesh or (self._ranks is not None and output.rank not in self._ranks):
            return
        if output.kind != "text":
            return
        key = (output.proc, output.stream)
        *whole, rest = f"{self._begun.get(key, '')}{output.data}".split("\n")
        self._begun[key] = rest[-LONGEST:]
        for line in whole:
            # A tqdm bar returns to the beginning of its line; only its last state is shown.
            text = line.rstrip("\r").rpartition("\r")[2]
            if self._found(text):
                with self._changed:
                    self._lines.append((output.rank, output.stream, text[:LONGEST]))
                    if len(self._lines) > MOST_LINES:
                        self._lines.popleft()
                        self._dropped += 1
                    self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines) or self._closed)
                if self._closed:
                    return
                lines, self._lines = self._lines, deque()
                dropped, self._dropped = self._dropped, 0
            self._push({"lines": [list(line) for line in lines], "dropped": dropped})
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, PERIOD):
                    return


def _searcher(search: str) -> Callable[[str], object]:
    if not search:
        return lambda _text: True
    try:
        return re.compile(search, re.IGNORECASE).search
    except re.error:
        wanted = search.casefold()
        return lambda text: wanted in text.casefold()


# The comm `monarch_kernel.views`: one for each page that shows this kernel's meshes.
#
# Messages from the page bypass IPython's hooks, which would run `pre_execute` in the middle of a cell, and the kernel
# publishes no busy or idle status for them. Messages to the page are sent from threads of the connection. A running
# cell therefore does not delay them, and they do not show its kernel as idle.

TARGET = "monarch_kernel.views"


class CommTarget:
    """The pages that are connected to one kernel.

    Args:
        kernel: the kernel.
    """

    def __init__(self, kernel: Any) -> None:
        self._comms: Any = kernel.comm_manager
        self._open: dict[str, ViewConnection] = {}
        self._status = QuietStatus(kernel, self._is_ours)
        self._comms.register_target(TARGET, self._on_open)

    def close(self) -> None:
        """End all connections, and accept no new ones."""
        self._comms.targets.pop(TARGET, None)
        self._status.close()
        for connection in list(self._open.values()):
            connection.close()
        self._open.clear()

    def _is_ours(self, message: Mapping[str, Any]) -> bool:
        kind, content = message.get("header", {}).get("msg_type"), message.get("content", {})
        if kind == "comm_open":
            return content.get("target_name") == TARGET
        number = content.get("comm_id")
        return kind in ("comm_msg", "comm_close") and (number in self._open or is_view(number))

    def _on_open(self, comm: Any, message: dict[str, object]) -> None:
        connection = self._open[comm.comm_id] = ViewConnection(comm_sender(comm))

        def on_message(received: dict[str, Any]) -> None:
            data = received["content"].get("data")
            if isinstance(data, dict):
                connection.receive(data)

        def on_close(_received: dict[str, object]) -> None:
            self._open.pop(comm.comm_id, None)
            connection.close()

        comm.handle_msg = on_message
        comm.on_close(on_close)
        on_message(message)  # a page may send its first lease with the comm_open


class QuietStatus:
    """Keep the kernel from publishing busy and idle for the messages of a page.

    The kernel publishes the status around each message, also on a subshell. JupyterLab shows the last status, so each
    renewed lease of a page would show a kernel in the middle of a cell as idle.

    Args:
        kernel: the kernel.
        is_quiet: returns whether to publish no status for a message; called before the message is handled, on any
            thread.
    """

    def __init__(self, kernel: Any, is_quiet: Callable[[Mapping[str, object]], bool]) -> None:
        self._kernel = kernel
        self._is_quiet = is_quiet
        self._publish: Callable[..., None] = kernel._publish_status
        self._under_way: set[str] = set()
        kernel._publish_status = self._filtered

    def close(self) -> None:
        """Publish the status around all messages again."""
        self._kernel.__dict__.pop("_publish_status", None)

    def _filtered(self, status: str, channel: str, parent: Mapping[str, object] | None = None) -> None:
        message: Mapping[str, Any] = parent or self._kernel.get_parent(channel) or {}
        number = str(message.get("header", {}).get("msg_id", ""))
        if status == "busy" and self._is_quiet(message):
            self._under_way.add(number)
        elif status == "idle" and number in self._under_way:
            self._under_way.discard(number)
        else:
            self._publish(status, channel, parent)
