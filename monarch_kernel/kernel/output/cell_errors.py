"""The error of a cell that failed on some ranks. It shows each distinct traceback once, with its ranks. Pure."""

from __future__ import annotations

import html
import linecache
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.display import publish_display_data

from monarch_kernel.actor import Extent, ProcMesh
from monarch_kernel.display import runs_hidden, tables
from monarch_kernel.display.quantities import few
from monarch_kernel.introspection import after_import
from monarch_kernel.kernel.output.render import strip_ansi
from monarch_kernel.kernel.rank.user_code import cut
from monarch_kernel.launchers import walltime
from monarch_kernel.launchers.walltime import WalltimeNotice
from monarch_kernel.meshes import format_points, format_ranks, name_ranks
from monarch_kernel.protocol.faults import Fault
from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from monarch_kernel.subscriptions import Subscribers, Subscription

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

    from monarch_kernel.actor import MeshFailure
    from monarch_kernel.kernel.session import MeshSession


# Format a rank's exception in IPython's style for local ones: coloured frames with their source, then the message.

_CONTEXT = 2
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python")

RED, GREEN, CYAN, BOLD, DIM, OFF = "\x1b[31m", "\x1b[32m", "\x1b[36m", "\x1b[1m", "\x1b[2m", "\x1b[39m\x1b[22m"

_BLANK = "\x1b[37m\x1b[39;49;00m"  # the formatter's output for line ends

#: Returns the label of a file, such as `Cell In[3]`; None means that its path is used.
FileLabel = Callable[[str], str | None]


def fault_lines(fault: Fault, file_label: FileLabel) -> list[str]:
    """Return the lines of a fault. The last element is the exception itself."""
    lines: list[str] = []
    if fault.cause is not None:
        lines += [*fault_lines(fault.cause, file_label), "", f"{DIM}caused this exception:{OFF}", ""]
    elif fault.context is not None:
        lines += [*fault_lines(fault.context, file_label), "", f"{DIM}while handling it, another:{OFF}", ""]
    for frame in fault.shown_frames:
        cell = file_label(frame.file)
        where = f"{cell}, line {frame.line}" if cell else f"File {frame.file}:{frame.line}"
        function = "" if frame.function == "<module>" else f", in {CYAN}{frame.function}{OFF}"
        lines += [f"{GREEN}{where}{OFF}{function}", *_source_lines(frame.file, frame.line, frame.source)]
        if frame.repeated:
            lines.append(f"{DIM}      (repeated {frame.repeated} more times){OFF}")
    if fault.omitted:
        lines.append(f"{DIM}… {fault.omitted} frames in the middle are left out{OFF}")
    for number, member in enumerate(fault.members, 1):
        lines += [f"{DIM}exception {number} of the group:{OFF}", *fault_lines(member, file_label)]
    lines.append(exception_line(fault.summary))
    return lines


def exception_line(summary: str) -> str:
    """Return the line that Python prints below the frames, with the exception's type in colour."""
    first, newline, notes = summary.partition("\n")
    name, colon, rest = first.partition(":")
    return f"{RED}{name}{OFF}{colon}{rest}{newline}{notes}"


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package or the standard library."""
    return any(part in file for part in _INSTALLED)


def _source_lines(file: str, at: int, source: str) -> list[str]:
    """Return line ``at`` with its context if this process has the same file, else the source that the rank sent."""
    sent = source.split("\n")[0].strip()
    here = linecache.getline(file, at)
    if not here.strip() or (sent and here.strip() != sent):
        return [f"----> {at} {_coloured(sent)}"] if sent else []
    # For library code the line alone is enough; users look for their own code.
    context = 0 if is_installed(file) else _CONTEXT
    first = max(1, at - context)
    lines: list[str] = []
    for number in range(first, at + context + 1):
        source = linecache.getline(file, number)
        if not source:
            break
        mark = "---->" if number == at else "     "
        width = len(str(at + context))
        lines.append(f"{GREEN if number == at else ''}{mark} {number:>{width}}{OFF} {_coloured(source)}")
    return [line.rstrip() for line in lines]


def _coloured(source: str) -> str:
    try:
        from pygments import highlight
        from pygments.formatters import TerminalFormatter
        from pygments.lexers import PythonLexer
    except ImportError:
        return source.rstrip("\n")
    coloured = highlight(source, PythonLexer(stripnl=False, ensurenl=False), TerminalFormatter())
    return str(coloured).replace(_BLANK, "").rstrip("\n")


# Show errors of calls and tensors in a notebook with the user's lines only, without the frames of the runtime.
#
# IPython renders an exception with its `_render_traceback_` method, if it has one. The runtime does not depend on
# IPython, so this module adds the method to the runtime's error classes.

_METHOD = "_render_traceback_"
_TORCH = (f"{os.sep}torch{os.sep}",)
#: Modules with tensors; importing them loads torch.
_OF_TENSORS = ("monarch_kernel.tensor", "monarch_kernel.distributed")

_changed: set[type[BaseException]] = set()
_shell: Any = None


def install(ip: InteractiveShell) -> None:
    """Show these errors in the shell's own traceback style, without the frames of the runtime."""
    global _shell
    _shell = ip
    for cls in (ActorError, SupervisionError):
        _change(cls, ())
    for name in _OF_TENSORS:
        after_import(name, _change_errors_of_tensors)


def _change_errors_of_tensors(_module: object) -> None:
    from monarch_kernel.tensor import MixedTensorsError

    _change(MixedTensorsError, _TORCH)


def _change(cls: type[BaseException], within: tuple[str, ...]) -> None:
    def render(error: BaseException) -> list[str]:
        traceback = cut(error.__traceback__, within=within)
        style = _shell.InteractiveTB
        return list(style.structured_traceback(type(error), error, traceback, tb_offset=style.tb_offset))

    if _shell is not None:  # otherwise the extension was unloaded before the module was loaded
        setattr(cls, _METHOD, render)
        _changed.add(cls)


def remove() -> None:
    """Undo `install`."""
    global _shell
    _shell = None
    for cls in _changed:
        delattr(cls, _METHOD)
    _changed.clear()


_MOST_GROUPS = 6
# The maximum number of message lines per group, and of ranks listed for groups that are not shown.
_MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class CellFailure:
    """A rank on which a cell failed: the cell raised (`fault`), or the rank died (`death`, the cause)."""

    rank: int
    host: str = ""
    pid: int = 0
    fault: Fault | None = None
    death: str = ""

    @property
    def of_peer(self) -> bool:
        """Whether it failed only because it waited in a collective for another rank that failed."""
        return self.fault is not None and self.fault.of_peer

    @property
    def line(self) -> str:
        """The failure in one line."""
        return self.fault.summary.split("\n")[0] if self.fault is not None else self.death


class MeshCellError(Exception):
    """A `%%mesh` cell failed on some of its ranks.

    Attributes:
        mesh: the name of the mesh.
        failures: the ranks that failed.
        released: the ranks that only waited for those in `torch.distributed`, and were released.
        values: the values of the ranks that did not fail, by rank.
    """

    def __init__(
        self,
        mesh: str,
        extent: Extent,
        ran_on: Sequence[int],
        failures: Sequence[CellFailure],
        values: Mapping[int, object],
        file_label: FileLabel | None = None,
        note: str = "",
    ) -> None:
        self.mesh = mesh
        self.extent = extent
        self.ran_on = tuple(ran_on)
        self.failures, self.released = _own_and_released(failures)
        self.values = values
        self._file_label = file_label or (lambda _file: None)
        self._note = note
        self.colours = True
        super().__init__(self._summary())

    def _summary(self) -> str:
        told = [
            f"{format_ranks([failure.rank for failure in group], limit=6)}: {group[0].line}"
            for group in grouped(self.failures)
        ]
        text = f"{self.headline}: " + "; ".join(told[:_MOST_GROUPS])
        return text + (f"; and {len(told) - _MOST_GROUPS} more kinds" if len(told) > _MOST_GROUPS else "")

    @property
    def headline(self) -> str:
        """Return which ranks failed, and how many ran the cell."""
        return headline(self.mesh, self.extent, self.ran_on, [failure.rank for failure in self.failures])

    def _waited(self) -> str:
        """Return the ranks that waited for those that failed, and where."""
        ranks, one = _counted(self.released), len(self.released) == 1
        places = dict.fromkeys(self._place(failure.fault) for failure in self.released if failure.fault is not None)
        where = f" at {', '.join(list(places)[:3])}" if places else ""
        return (
            f"{ranks[:1].upper()}{ranks[1:]} waited in torch.distributed{where} for {_counted(self.failures)}, and "
            f"{'was' if one else 'were'} released."
        )

    def _place(self, fault: Fault) -> str:
        own = [frame for frame in fault.shown_frames if not is_installed(frame.file)]
        frame = (own or fault.shown_frames)[-1]
        cell = self._file_label(frame.file)
        return f"{cell}, line {frame.line}" if cell else f"{frame.file}:{frame.line}"

    @property
    def notes(self) -> list[str]:
        """Return sentences to show besides the failures: the ranks that waited for the failed ones, and what to do."""
        return [*([self._waited()] if self.released else []), *([self._note] if self._note else [])]

    def _render_traceback_(self) -> list[str]:
        lines = [f"{BOLD}{self.headline}{OFF}"]
        groups = grouped(self.failures)
        for group in groups[:_MOST_GROUPS]:
            lines += ["", *group_lines(group, self._file_label)]
        if len(groups) > _MOST_GROUPS:
            left = [failure for group in groups[_MOST_GROUPS:] for failure in group]
            lines += ["", *(f"{_label([failure])} {failure.line}" for failure in left[:_MOST_LINES])]
            if len(left) > _MOST_LINES:
                lines.append(f"… and {len(left) - _MOST_LINES} more ranks; the exception's .failures lists all of them")
        for note in self.notes:
            lines += ["", note]
        return lines if self.colours else [strip_ansi(line) for line in lines]


class MeshCellInterrupt(MeshCellError, KeyboardInterrupt):
    """A `%%mesh` cell was interrupted on all ranks that did not finish."""


class CellSyntaxError(Exception):
    """A `%%mesh` cell is not valid Python. Raised before the cell is sent to any rank."""

    def __init__(self, error: SyntaxError, lines: list[str]) -> None:
        super().__init__(str(error))
        self.error = error
        self._lines = lines

    def _render_traceback_(self) -> list[str]:
        return self._lines


def cell_error(
    mesh: str,
    extent: Extent,
    ran_on: Sequence[int],
    failures: Sequence[CellFailure],
    values: Mapping[int, object],
    *,
    interrupted: bool,
    file_label: FileLabel | None = None,
    note: str = "",
) -> MeshCellError:
    """Return the error for these failures; a `MeshCellInterrupt` if all of them are interrupts."""
    stopped = interrupted and all(
        failure.of_peer or (failure.fault is not None and failure.fault.qualname == "KeyboardInterrupt")
        for failure in failures
    )
    kind = MeshCellInterrupt if stopped else MeshCellError
    return kind(mesh, extent, ran_on, failures, values, file_label, note)


def headline(mesh: str, extent: Extent, ran_on: Sequence[int], failed: Sequence[int]) -> str:
    """Return which ranks failed, and how many ran the cell."""
    points = format_points(failed, extent, limit=6)
    noun = "rank" if len(failed) == 1 else "ranks"
    which = f"{noun} {format_ranks(failed, limit=6)}"
    where = f" ({points})" if points else ""
    return f"Failed on {which}{where} of the {len(ran_on)} of mesh {mesh} that ran it"


def group_lines(group: Sequence[CellFailure], file_label: FileLabel) -> list[str]:
    """Return the lines for one kind of failure: ranks and processes, then the traceback, then the messages."""
    first = group[0]
    head = f"{CYAN}{_label(group)}{OFF} {DIM}{_places(group)}{OFF}".rstrip()
    if first.fault is None:
        # Not in bold as well: front ends show that in a dark red, on a red background.
        return [head, f"{RED}{first.death}{OFF}"]
    lines = [head, *fault_lines(first.fault, file_label)]
    messages: dict[str, list[CellFailure]] = {}
    for failure in group:
        if failure.fault is not None:
            messages.setdefault(failure.fault.summary, []).append(failure)
    if len(messages) > 1:
        lines.pop()
        shown = list(messages.items())
        lines += [f"{CYAN}{_label(ranks)}{OFF} {exception_line(summary)}" for summary, ranks in shown[:_MOST_LINES]]
        if len(shown) > _MOST_LINES:
            lines.append(f"… and {len(shown) - _MOST_LINES} more messages")
    return lines


def _label(group: Iterable[CellFailure]) -> str:
    return f"[{format_ranks([failure.rank for failure in group], limit=6)}]"


def _places(group: Sequence[CellFailure]) -> str:
    places = list(dict.fromkeys(f"{failure.host} pid {failure.pid}" for failure in group if failure.pid))
    return few(places)


def _own_and_released(failures: Iterable[CellFailure]) -> tuple[list[CellFailure], list[CellFailure]]:
    """Split failures into original ones and those caused by peers. Without an original one, all count as original."""
    everyone = list(failures)
    own = [failure for failure in everyone if not failure.of_peer]
    return (own, [failure for failure in everyone if failure.of_peer]) if own else (everyone, [])


def _counted(failures: Sequence[CellFailure]) -> str:
    return name_ranks([failure.rank for failure in failures], limit=6)


def grouped(failures: Iterable[CellFailure]) -> list[list[CellFailure]]:
    """Group failures with equal tracebacks, the smallest group first."""
    alike: dict[Hashable, list[CellFailure]] = {}
    for failure in failures:
        key = ("fault", failure.fault.likeness()) if failure.fault is not None else ("death", failure.death)
        alike.setdefault(key, []).append(failure)
    # The behaviour of only a few ranks is the most informative.
    return sorted(alike.values(), key=len)


# Unhandled faults in a notebook: one notice below a cell, without interrupting any code.
#
# A script ends when a failure reaches the root of the supervision tree. A kernel continues: code that waited for the
# failed mesh has already received an error, and an unrelated cell is not interrupted.


class FaultNotices:
    """Collects unhandled faults, and shows them below the running cell, or else below the next one.

    A fault that an error has already reported is not reported again.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._waiting: deque[MeshFailure] = deque()
        self._reported: deque[tuple[str, int]] = deque(maxlen=256)  # host and pid of dead ranks of `%%mesh` cells

    def install(self) -> None:
        """Set the fault hook, and subscribe to the beginning and end of cells."""
        from monarch_kernel import actor

        actor.unhandled_fault_hook = self.add
        self._shell.events.register("pre_run_cell", self._before_cell)
        self._shell.events.register("post_run_cell", self._after_cell)

    def add(self, failure: MeshFailure) -> None:
        """The fault hook; called on any thread."""
        self._waiting.append(failure)

    def _before_cell(self, info: ExecutionInfo) -> None:
        self._show()

    def _after_cell(self, result: ExecutionResult | None) -> None:
        error = None if result is None else result.error_in_exec
        for part in _chain(error):
            if isinstance(part, MeshCellError):
                self._reported += [(failed.host, failed.pid) for failed in part.failures if failed.death]
        self._show()

    def _show(self) -> None:
        if runs_hidden(self._shell):
            return
        failures: list[MeshFailure] = []
        while self._waiting:
            failure = self._waiting.popleft()
            death = failure.death
            if not failure.was_raised() and (death is None or (death.host, death.pid) not in self._reported):
                failures.append(failure)
        if failures:
            publish_display_data(render(_once_each(failures)))


def _once_each(failures: Sequence[MeshFailure]) -> list[str]:
    """Keep one report per event: the death of a process may end actors of several meshes."""
    events: dict[object, list[MeshFailure]] = {}
    for failure in failures:
        events.setdefault(failure.key if failure.key is not None else id(failure), []).append(failure)
    reports: list[str] = []
    for first, *others in events.values():
        report = first.report()
        if others:
            names = ", ".join(repr(other.mesh) for other in others)
            report += f"\nWith it went actors of {names}."
        reports.append(report)
    return reports


def render(reports: Sequence[str]) -> dict[str, str]:
    """Return the notice as a MIME bundle."""
    folded = "".join(_folded(report) for report in reports)
    return {
        "text/plain": "\n".join(reports),
        "text/html": f'<div style="{tables.WARNING_LINE}">{folded}</div>',
    }


def _folded(report: str) -> str:
    """Return a report as HTML: its first line, which expands to the others."""
    headline, _, rest = report.partition("\n")
    if not rest:
        return f"<div>{html.escape(headline)}</div>"
    return f"<details><summary>{html.escape(headline)}</summary><pre>{html.escape(rest)}</pre></details>"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


# Notify a notebook when the walltime of hosts ends soon: one notice below the running cell.


class WalltimeNotices:
    """Shows each notice of a job of this process once, immediately, and keeps it until the hosts have ended.

    A job with its own ``on_walltime`` callback has handled the event, so no notice is shown for it. Its hosts are still
    reported by `near`.

    Args:
        session: the meshes of the notebook.
        show_below: shows a MIME bundle below the running cell, and returns whether a cell can show it.
    """

    def __init__(self, session: MeshSession, show_below: Callable[[dict[str, str]], bool]) -> None:
        self._session = session
        self._show_below = show_below
        self._near: list[WalltimeNotice] = []
        self._waiting: list[str] = []  # notices that no cell can show yet
        self._lock = threading.Lock()
        self._subscription: Subscription | None = None
        #: Called with each notice and its text.
        self.changed: Subscribers[[WalltimeNotice, str]] = Subscribers("a callback on a notice of a walltime")

    def install(self) -> None:
        """Begin."""
        self._subscription = walltime.news.subscribe(self._add)

    def close(self) -> None:
        """Show no more."""
        if self._subscription is not None:
            self._subscription.close()

    def near(self) -> list[WalltimeNotice]:
        """Return the notices whose hosts have not ended yet."""
        now = time.time()
        with self._lock:
            self._near = [notice for notice in self._near if notice.ends_at > now]
            return list(self._near)

    def of_mesh(self, mesh: ProcMesh) -> list[str]:
        """Return sentences about the hosts on which a mesh has ranks now."""
        return [
            notice.text(self.otherwise(notice)) for notice in self.near() if mesh.name in self._meshes(notice, [mesh])
        ]

    def otherwise(self, notice: WalltimeNotice) -> str:
        """Return the remedy in this notebook if no replacement hosts were requested."""
        names = self._placed(notice)
        how = f"%mesh heal {names[0]}" if names else "heal(hosts=job)"
        return f"save what you need; when they have ended, {how} asks {notice.engine} for others in their places"

    def show_waiting(self) -> None:
        """Show the notices that arrived while no cell could show them."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for text in waiting:
            self._show(text)

    def _add(self, notice: WalltimeNotice) -> None:
        with self._lock:
            self._near.append(notice)
        names = self._meshes(notice, self._session.proc_meshes().values()) or self._placed(notice)
        said = notice.text(self.otherwise(notice))
        what = f"mesh{'es' * (len(names) > 1)} {', '.join(names)}" if names else f"job {notice.job} of {notice.engine}"
        if not notice.handled:
            self._show(f"{what}: {said}")
        self.changed.notify(notice, said)

    def _show(self, text: str) -> None:
        if not self._show_below(render([text])):
            with self._lock:
                self._waiting.append(text)

    def _placed(self, notice: WalltimeNotice) -> list[str]:
        """Return the names of meshes that `%mesh up` has started, or will start, on hosts of that job."""
        return [name for name, place in self._session.provider_hosts.items() if place.job.job_id == notice.job]

    @staticmethod
    def _meshes(notice: WalltimeNotice, meshes: Iterable[ProcMesh]) -> list[str]:
        """Return the names of those of these meshes that have ranks on the hosts of a notice."""
        workers = {host.worker for host in notice.hosts}
        return [mesh.name for mesh in meshes if any(ref.agent in workers for ref in mesh._target().procs)]
