"""The notebook as the magics see it: the running cell, its text, and its output areas."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pwd
import re
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.display import display

from monarch_kernel import environment
from monarch_kernel.actor import ActorMesh
from monarch_kernel.debugger.commands.grammar import CommandError
from monarch_kernel.debugger.frontend import Frontend
from monarch_kernel.display import runs_hidden
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import begin_record, trace_records
from monarch_kernel.kernel.call_progress import CallProgress
from monarch_kernel.kernel.cell import (
    Cell,
    blank_lines,
    check_syntax,
    ends_quietly,
    header_lines,
    is_mesh_cell,
    remember_source,
)
from monarch_kernel.kernel.debug.stop_prompt import StopPrompt
from monarch_kernel.kernel.notebook_facts import NotebookFacts
from monarch_kernel.kernel.output.cell_errors import CellSyntaxError, WalltimeNotices
from monarch_kernel.kernel.output.cell_output import CellOutput, OutputRouter
from monarch_kernel.kernel.output.publisher import OwnOutput, Publisher, Source, publisher_for
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.kernel.sync_run import Workspaces
from monarch_kernel.launchers.host_request import nearest
from monarch_kernel.meshes import format_points
from monarch_kernel.output import set_origin
from monarch_kernel.private_files import AppendOnlyFile
from monarch_kernel.workers import placement_of
from workspace_sync.receipt import names

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

    from monarch_kernel.actor import Extent
    from workspace_sync.environment.kinds import Installed


# Notices below an ordinary cell: packages that hosts lack, actors of a redefined class, and costs on meshes.

# A line that may change an environment: `%pip install x`, `!uv pip install x`, `%conda update x`, `!python -m pip ...`.
_INSTALLS = re.compile(
    r"^\s*[%!]{1,2}.*\b(?:pip|uv|conda|mamba|micromamba|pixi)3?\b.*\b"
    r"(?:install|uninstall|remove|update|upgrade|add|sync|create)\b",
    re.MULTILINE,
)


class EnvironmentChanges:
    """Offers a sync below a cell that has installed packages, because hosts do not receive them automatically.

    Args:
        session: the notebook's meshes.
    """

    def __init__(self, session: MeshSession) -> None:
        self._session = session
        self._before: dict[str, Installed] | None = None

    def before(self, cell: str) -> None:
        """Record the installed packages before a cell whose text may change them."""
        self._before = _installed() if _INSTALLS.search(cell) and self._concerned() else None

    def notice(self) -> str:
        """Return the line to print below the cell; empty if nothing has changed, or no host has a synced tree."""
        before, self._before = self._before, None
        if before is None:
            return ""
        from workspace_sync.environment.kinds import changed_distributions

        after, meshes = _installed(), self._concerned()
        if after is None or not meshes:
            return ""
        found = changed_distributions(before, after)
        new = [f"{name} {version}" for name, version in found.added.items()]
        new += [f"{name} {now}" for name, (_, now) in found.changed.items()]
        parts = [f"installed {names(new)}"] if new else []
        parts += [f"removed {names(list(found.removed))}"] if found.removed else []
        if not parts:
            return ""
        return f"{'; '.join(parts)}: %mesh sync --env brings this to the hosts of {names(meshes)}"

    def _concerned(self) -> list[str]:
        """Return the meshes with hosts that have a synced tree."""
        if "sync" not in tool_runtime().OFFERS:
            return []
        return [name for name, mesh in self._session.proc_meshes().items() if any(placement_of(mesh))]


def _installed() -> dict[str, Installed] | None:
    """Return the packages installed in the environment of this kernel; None if it has no environment."""
    from workspace_sync.environment.kinds import distributions, environment
    from workspace_sync.model.errors import ScanError
    from workspace_sync.model.workspace import CondaEnvironment

    try:
        return distributions(environment(CondaEnvironment()))
    except (ValueError, ScanError):
        return None


class StaleClasses:
    """Warns once about each actor named in a cell whose class was redefined: the actor keeps the old definition.

    Args:
        names: the variables of the notebook.
    """

    def __init__(self, names: dict[str, object]) -> None:
        self._names = names
        self._told: set[tuple[str, int]] = set()

    def notices(self, cell: str) -> list[str]:
        """Return the warnings to print below a cell with this text."""
        said: list[str] = []
        for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", cell)):
            mesh = self._names.get(name)
            if not isinstance(mesh, ActorMesh):
                continue
            old = mesh._cls_or_pickle
            new = self._names.get(old.__qualname__) if isinstance(old, type) else None
            if not isinstance(old, type) or not isinstance(new, type) or not _differ(old, new):
                continue
            if (mesh._actor, id(new)) not in self._told:
                self._told.add((mesh._actor, id(new)))
                said.append(
                    f"{name}: these actors run the class {old.__qualname__} as it was when they were spawned; spawn "
                    "them again to use the new definition."
                )
        return said


def _differ(old: type, new: type) -> bool:
    """Return whether the code of two classes differs. Rerunning an unchanged cell makes no difference."""
    return old is not new and old.__module__ == new.__module__ == "__main__" and _code(old) != _code(new)


def _code(cls: type) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, member in vars(cls).items():
        function = getattr(member, "__wrapped__", None) or member
        code = getattr(function, "__code__", None)
        if code is not None:
            found[name] = code
        elif isinstance(member, int | float | str | bytes | tuple) and not name.startswith("__"):
            found[name] = member
    return found


class CellPlans:
    """Shows the cost of mesh operations below each cell while `%mesh plan on` is active.

    Attributes:
        is_on: whether it is active.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._plan: Any = None

    def before_cell(self) -> None:
        """Start recording a plan for the cell."""
        self._plan = None
        if self.is_on:
            from monarch_kernel.tensor import Explanation

            self._plan = Explanation().__enter__()

    def after_cell(self) -> None:
        """Show the plan of the cell that has ended."""
        plan, self._plan = self._plan, None
        if plan is not None and self.is_on:
            plan.__exit__(None, None, None)
            if plan.lines:
                display(plan)


# The audit log: JSON lines that record which code ran where and when. ``MONARCH_KERNEL_AUDIT_LOG`` enables it.
#
# Each action writes two lines with the same ``id``. The first is written before the action begins, so it exists even
# if the action kills the kernel. The second has the outcome::
#
#     {"time": "2026-11-22T14:00:00.123Z", "id": "4f1c-7", "user": "alice", "host": "node1", "pid": 4711, "notebook":
#      "train.ipynb", "did": "mesh cell", "sha256": "…", "lines": 12, "mesh": "m", "ranks": "0-7", "hosts": ["node1"]}
#     {"time": "2026-11-22T14:00:09.456Z", "id": "4f1c-7", "outcome": "ok", "seconds": 9.333}
#
# The log is a record for this user, not a security boundary: code in the kernel can act without being logged.

#: The maximum length of a logged text (characters).
LONGEST = 65_536

#: The variable in which VS Code stores the path of the notebook; Jupyter servers set an environment variable.
_VSCODE_FILE = "__vsc_ipynb_file__"

End = Callable[[str], None]


class AuditLog:
    """Writes the actions of a kernel to a file. It is thread-safe, and its methods never raise.

    Args:
        path: the file, created with mode 0600; empty: write nothing.
        texts: whether to write the text of cells in addition to their digests.
        names: the variables of the notebook; VS Code stores its file in one of them.
    """

    def __init__(self, path: str, texts: bool, names: Mapping[str, object] = MappingProxyType({})) -> None:
        self._path = os.path.abspath(os.path.expanduser(path)) if path else ""
        self._texts = texts
        self._names = names
        self._file: AppendOnlyFile | None = None
        self._lock = threading.Lock()
        self._run = os.urandom(4).hex()
        self._numbers = itertools.count(1)

    @classmethod
    def of_environment(cls, names: Mapping[str, object] = MappingProxyType({})) -> AuditLog:
        """Return the log configured by environment variables."""
        return cls(environment.AUDIT_LOG.get(), bool(environment.AUDIT_TEXT.get()), names)

    @property
    def is_on(self) -> bool:
        """Whether the log is enabled."""
        return bool(self._path)

    def begin(self, did: str, text: str = "", *, line: str = "", **where: object) -> End:
        """Write that an action begins.

        Args:
            did: the kind of action: "cell", "mesh cell", "hidden code", "command".
            text: the code of a cell; its digest is written.
            line: a command line, written verbatim.
            where: mesh, ranks, hosts and similar fields; empty fields are omitted.

        Returns:
            A function that writes the outcome.
        """
        if not self._path:
            return _nothing
        number = f"{self._run}-{next(self._numbers)}"
        entry: dict[str, object] = {
            "id": number,
            "user": _user(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "notebook": os.environ.get("JPY_SESSION_NAME") or str(self._names.get(_VSCODE_FILE, "")),
            "did": did,
            "line": line[:LONGEST],
        }
        if text:
            entry["sha256"] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            entry["lines"] = text.count("\n") + 1
            if self._texts:
                entry["text"] = text[:LONGEST]
                entry["cut"] = len(text) > LONGEST
        self._write({name: value for name, value in {**entry, **where}.items() if value not in ("", (), None, False)})
        began = time.monotonic()
        return lambda outcome: self._write(
            {"id": number, "outcome": outcome[:LONGEST], "seconds": round(time.monotonic() - began, 3)}
        )

    @contextmanager
    def during(self, did: str, text: str = "", *, line: str = "", **where: object) -> Generator[None]:
        """Log a ``with`` block as an action. The outcome is "ok", or the exception that leaves the block."""
        end = self.begin(did, text, line=line, **where)
        try:
            yield
        except BaseException as error:
            end(outcome_of(error))
            raise
        end("ok")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, entry: dict[str, object]) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        try:
            with self._lock:
                if self._file is None:
                    self._file = AppendOnlyFile(self._path)
                self._file.append(json.dumps({"time": stamp, **entry}))
        except OSError as error:
            why = str(error) if error.strerror is None else error.strerror
            print(f"This is not in the audit log: {self._path} cannot be written: {why}", file=sys.stderr)


def outcome_of(error: BaseException) -> str:
    """Format an exception as a one-line outcome."""
    said = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _nothing(_outcome: str) -> None:
    """Do nothing: the log is disabled."""


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


#: The time that the end of a cell waits for output in transit (seconds).
ARRIVAL = 0.5

_MOST_CELLS = 500

_count = itertools.count(1)
#: The prefix of the keys of this kernel's cells. Kept ranks may still run cells of an earlier kernel.
RUN = f"cell-{os.urandom(3).hex()}"


class _RunningCell(threading.local):
    """The cell that runs on a thread, or its last one. Subshells run cells in parallel to the main thread."""

    key = ""
    raw = ""

    def __init__(self) -> None:
        #: Key and text of the cell before each piece of hidden code that runs now.
        self.before_hidden: list[tuple[str, str]] = []


class NotebookFrontend(Frontend):
    """Information about this notebook for debugger consoles, including those of other programs."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def label(self, file: str) -> str | None:
        """Return the label of a cell's file, such as `Cell In[3]`."""
        return self._notebook.file_label(file)

    def mesh(self) -> str | None:
        """The mesh in use."""
        return self._notebook.session.current or super().mesh()

    def cell(self, number: int) -> tuple[str, str]:
        """Return a cell by its execution number; 0 means the last `%%mesh` cell."""
        if number == 0:
            if self._notebook.last_cell is None:
                raise CommandError("no %%mesh cell has run yet; give the number of a cell, as in 5:3")
            return self._notebook.last_cell
        return self._notebook.cell_source(number)

    def extent(self, mesh: str) -> Extent:
        """Return the extent of a mesh."""
        try:
            return self._notebook.session.find(mesh, "debug").extent
        except UsageError:
            with suppress(LookupError):
                return tool_runtime().get_mesh(mesh).extent
        return super().extent(mesh)


class Notebook:
    """One IPython shell, with the functions that the magics need.

    Args:
        shell: the shell.
        session: the meshes.
    """

    def __init__(self, shell: Any, session: MeshSession) -> None:
        self.shell = shell
        self.session = session
        self.frontend = NotebookFrontend(self)
        self.stops = StopPrompt(self)
        self.workspaces = Workspaces()
        self.router = OutputRouter(self._ordinary_output, self._tooltip)
        self._own_output = OwnOutput(self._make_way)
        self._calls = CallProgress(self.router, self._replaceable, session, self.file_label)
        self._running = _RunningCell()
        self._stale = StaleClasses(shell.user_ns)
        self._environment = EnvironmentChanges(session)
        # For each ordinary cell, the publisher for the output of the actors that it called.
        self._publishers: OrderedDict[str, Publisher] = OrderedDict()
        self._numbers: dict[str, int] = {}  # the number of each of these cells, as in In[...]
        #: Hosts of jobs whose walltime ends soon.
        self.walltimes = WalltimeNotices(session, self.show_below)
        #: The source of facts about this notebook for watches.
        self.watched = NotebookFacts(session, self._numbers, self.walltimes)
        self._latest = ""  # the key of the cell that began last
        #: Shows the cost of mesh operations below each cell, if enabled.
        self.plans = CellPlans()
        self.last_cell: tuple[str, str] | None = None  # the file and the text of the latest `%%mesh` cell
        self._end_record: Callable[[int], None] = lambda _mark: None
        self.audit = AuditLog.of_environment(shell.user_ns)
        self._end_entry: Callable[[str], None] = lambda _outcome: None
        self.is_busy = False  # a cell runs
        self.missed_view = False  # the user was told that no live view is connected
        self._foreign: list[str] = []  # cells of an earlier kernel, whose output goes to the running cell

    @property
    def colours(self) -> bool:
        """Return whether errors may use colours."""
        return str(getattr(self.shell, "colors", "")).lower() != "nocolor"

    @property
    def has_no_panel(self) -> bool:
        """Whether the notebook is in VS Code or Colab, which load no extensions of JupyterLab."""
        return _VSCODE_FILE in self.shell.user_ns or "google.colab" in sys.modules

    # -- events of the shell -------------------------------------------------------------------

    def before_cell(self, info: ExecutionInfo) -> None:
        """The callback for IPython's `pre_run_cell`."""
        self.is_busy = True
        if runs_hidden(self.shell):
            self._begin_hidden(info)
            return
        self._running.before_hidden.clear()
        self._running.raw = info.raw_cell or ""
        self._running.key = self._latest = f"{RUN}-{next(_count)}"
        set_origin(self.cell_key)
        self._publishers[self.cell_key] = publisher_for(self.shell)
        self._own_output.watch()
        # Some versions of IPython count a cell before this event, others at the end of the cell.
        self._numbers[self.cell_key] = min(
            self.shell.execution_count, len(self.shell.history_manager.input_hist_parsed)
        )
        self.watched.cell(self.cell_key, self._numbers[self.cell_key])
        self._end_entry = self.audit.begin("cell", self._running.raw)
        self._end_record = begin_record(trace_records.CELL, f"In[{self._numbers[self.cell_key]}]")
        while len(self._publishers) > _MOST_CELLS:
            self._numbers.pop(self._publishers.popitem(last=False)[0], None)
        self.plans.before_cell()
        if not is_mesh_cell(self._running.raw):
            self._environment.before(self._running.raw)
            self._calls.begin(self.cell_key)

    def after_cell(self, result: ExecutionResult) -> None:
        """The callback for IPython's `post_run_cell`: show what actors printed during an ordinary cell."""
        self.is_busy = False
        error = getattr(result, "error_before_exec", None) or getattr(result, "error_in_exec", None)
        self._end_entry("ok" if error is None else outcome_of(error))
        if self._running.before_hidden:
            self._end_hidden()
            return
        self._end_record(int(not getattr(result, "success", True)))
        if error is not None:
            self.watched.call_failed(self.cell_key, error)
        self._calls.end()
        self.plans.after_cell()
        self.stops.after_cell()
        if not is_mesh_cell(self._running.raw):  # a `%%mesh` cell has already waited for its output
            _let_output_arrive()
            for notice in (*self._stale.notices(self._running.raw), self._environment.notice()):
                if notice:
                    print(notice)
        for key in (*self._foreign, self.cell_key):
            output = self.router.get(key)
            if output is not None:
                output.show()
        self._foreign.clear()
        self._own_output.stop()
        self.walltimes.show_waiting()

    def _begin_hidden(self, info: Any) -> None:
        """Begin code that a front end runs for itself. It is no cell: notices wait, since nobody would see them."""
        self._running.before_hidden.append((self._running.key, self._running.raw))
        self._running.raw = info.raw_cell or ""
        self._running.key = f"{RUN}-{next(_count)}"
        set_origin(self.cell_key)
        self._publishers[self.cell_key] = publisher_for(self.shell)
        self._end_entry = self.audit.begin("hidden code", self._running.raw)

    def _end_hidden(self) -> None:
        """End it. Later output of the ranks is shown in the last cell that the user sees."""
        output = self.router.get(self.cell_key)
        if output is not None:
            output.show()
        self._publishers.pop(self.cell_key, None)
        self._running.key, self._running.raw = self._running.before_hidden.pop()
        set_origin(self.cell_key)

    def close(self) -> None:
        """Detach from the shell."""
        self.workspaces.unwatch()
        self.walltimes.close()
        self.audit.close()
        self._own_output.stop()
        self._calls.close()
        self.stops.close()
        self.router.close()

    def _make_way(self) -> None:
        output = self.router.get(self.cell_key)
        if output is not None:
            output.make_way()

    # -- cells ---------------------------------------------------------------------------------

    def make_cell(self, body: str) -> Cell:
        """Create the cell that ranks run from the body of a `%%mesh` cell.

        Raises:
            CellSyntaxError: the body is not valid Python.
        """
        raw = self._running.raw if body and self._running.raw.endswith(body.rstrip("\n")) else ""
        raw = raw or self._containing(body)
        header = header_lines(raw, body)
        transformed = self.shell.transform_cell(body)
        dropped = blank_lines(body) - blank_lines(transformed)  # by IPython, unless its debugger is on
        source = "\n" * (header + dropped) + transformed
        compiler = self.shell.compile
        number = self._numbers.get(self.cell_key, self.shell.execution_count)
        filename = compiler.get_code_name(raw, self.shell.transform_cell(raw), number)
        try:
            check_syntax(source, filename)
        except SyntaxError as error:
            remember_source(filename, raw)
            raise CellSyntaxError(error, self._syntax_lines(error)) from None
        remember_source(filename, raw)
        self.watched.cell(filename, number or 0)
        self.last_cell = filename, raw
        return Cell(f"{self.cell_key}.{next(_count)}", source, filename, raw, ends_quietly(transformed))

    def again(self, cell: Cell) -> Cell:
        """Return a copy of a cell for running it again: its output goes to the running cell."""
        return replace(cell, id=f"{self.cell_key}.{next(_count)}")

    def _containing(self, body: str) -> str:
        """Return the whole cell around this body; reconstructed if a program has run the cell."""
        raw = self._running.raw
        return raw if body.strip() and body.strip() in raw else f"%%mesh\n{body}"

    def cell_source(self, number: int) -> tuple[str, str]:
        """Return the file and the text of the cell with this execution number.

        Raises:
            CommandError: no such cell has run in this session.
        """
        history = self.shell.history_manager
        texts: list[str] = history.input_hist_raw if history is not None else []
        if not 0 < number < len(texts):
            raise CommandError(f"there is no cell In[{number}]; the last one is In[{len(texts) - 1}]")
        raw = texts[number]
        return self.shell.compile.get_code_name(raw, self.shell.transform_cell(raw), number), raw

    def _syntax_lines(self, error: SyntaxError) -> list[str]:
        lines: list[str] = self.shell.SyntaxTB.structured_traceback(type(error), error, [])
        return lines

    def file_label(self, file: str) -> str | None:
        """Return IPython's name for a cell, given its file or its key: `Cell In[3]`; None for other files."""
        if file.startswith(RUN):
            number = self._numbers.get(file.partition(".")[0])
            return None if number is None else f"Cell In[{number}]"
        name = self.shell.compile.format_code_name(file)
        return f"{name[0]} {name[1]}" if name else None

    # -- output --------------------------------------------------------------------------------

    def output(self, *, raw: bool = False, expected: Any = ()) -> CellOutput:
        """Create an output area in the running cell."""
        return CellOutput(publisher_for(self.shell), raw=raw, expected=expected)

    @property
    def cell_key(self) -> str:
        """The key of the cell that runs on this thread, or of the last one. Ids of its runs on ranks extend it."""
        return self._running.key or self._latest

    def output_of(self, cell: str) -> CellOutput | None:
        """Return the output area of a cell; None if this notebook does not know the cell."""
        output = self.router.get(cell)
        if output is None and cell in self._publishers:
            output = self.router.open(cell, CellOutput(self._publishers[cell]))
        return output

    def parent_of(self, cell: str) -> Any:
        """Return the header of the request that ran a cell, by the key of the cell or of its run; None if unknown."""
        return getattr(self._publishers.get(cell.partition(".")[0]), "parent", None)

    def progress_output(self) -> CellOutput | None:
        """Return the output area for a progress line; None under `%%capture`, which would keep it."""
        publisher = self._publishers.get(self.cell_key)
        captured = publisher is None or (publisher.live and getattr(self.shell.display_pub, "session", None) is None)
        return None if captured else self.output_of(self.cell_key)

    def show_below(self, bundle: dict[str, str]) -> bool:
        """Show a MIME bundle at once, below the output of the running cell, or else of the last one. Thread-safe.

        Returns:
            False if no cell can show it: none has run, or it runs under `%%capture`, which would keep it.
        """
        publisher = self._publishers.get(self.cell_key)
        if publisher is None or (publisher.live and getattr(self.shell.display_pub, "session", None) is None):
            return False
        self._make_way()
        publisher.show(-next(_count), bundle, {}, update=False)
        return True

    def _replaceable(self, cell: str) -> CellOutput | None:
        """Return the output area of a cell if it can show a line and remove it later.

        A terminal cannot, since the line would overwrite the cell's output. Neither can a cell under `%%capture`, which
        keeps everything that is displayed.
        """
        publisher = self._publishers.get(cell)
        captured = getattr(self.shell.display_pub, "session", None) is None
        return None if publisher is None or not publisher.live or captured else self.output_of(cell)

    def _ordinary_output(self, cell: str) -> tuple[str, CellOutput] | None:
        """Return the output area for an ordinary cell: the cell that called the actor, else the latest cell."""
        if cell and not cell.startswith(RUN) and cell not in self._publishers and self.cell_key in self._publishers:
            self._publishers[cell] = self._publishers[self.cell_key]  # collect all cells of an earlier kernel in one
            self._foreign.append(cell)
        key = cell if cell in self._publishers else self.cell_key
        publisher = self._publishers.get(key)
        if publisher is None:
            return None
        return key, self.router.get(key) or CellOutput(publisher)

    def _tooltip(self, sources: frozenset[Source]) -> str:
        meshes = {mesh.name: mesh for mesh in tool_runtime().list_proc_meshes()}
        lines: list[str] = []
        for name in sorted({source.mesh for source in sources}):
            ranks = sorted(source.rank for source in sources if source.mesh == name)
            mesh = meshes.get(name)
            points = format_points(ranks, mesh.extent, limit=8) if mesh is not None else ""
            lines.append(f"{name} {points}".strip())
        if len(sources) <= 8:
            for source in sorted(sources):
                host, pid = self.router.whereabouts(source)
                if pid:
                    lines.append(f"{source.rank}: {host} pid {pid}")
        return "\n".join(lines)

    def keep(self, value: Any) -> None:
        """Make `value` the cell's result, `_` and `Out[n]`, without showing it: the ranks have shown their values."""
        if value is not None:
            self.shell.displayhook.update_user_ns(value)

    # -- variables -----------------------------------------------------------------------------

    def variable(self, name: str, command: str) -> Any:
        """Return a variable of the notebook."""
        try:
            return self.shell.user_ns[name]
        except KeyError:
            known = [each for each in self.shell.user_ns if not each.startswith("_")]
            raise UsageError(
                f"{command}: there is no variable {name!r} in the notebook{nearest(name, known)}"
            ) from None

    def place(self, file: str, line: int, function: str) -> str:
        """Format a location in code as a short text."""
        label = self.file_label(file)
        if label is None and os.path.basename(os.path.dirname(file)).startswith("ipykernel_"):
            return f"line {line} of a cell of an earlier kernel"
        name = (label or os.path.basename(file)).removeprefix("Cell ")
        return f"{name}:{line}" + ("" if function in ("", "<module>") else f" in {function}")


def _let_output_arrive() -> None:
    """Wait for the output that ranks wrote before they replied to this cell.

    Output arrives through the host agents, but replies arrive directly. An agent answers a query after it has forwarded
    earlier output.
    """
    deadline = time.monotonic() + ARRIVAL
    # A query about one rank of each mesh reaches its agent at little cost.
    asked = [mesh.slice(**mesh.extent.point(0)).status() for mesh in tool_runtime().list_proc_meshes()]
    for answer in asked:
        with suppress(Exception):  # a dead or stuck agent must not prevent the cell from ending
            answer.get(max(0.0, deadline - time.monotonic()))
