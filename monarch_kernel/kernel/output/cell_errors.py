"""What a cell that failed on some ranks says: each distinct traceback once, in colour, with its ranks. Pure."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.actor import Extent
from monarch_kernel.kernel.output.ansi import strip_ansi
from monarch_kernel.meshes import format_points, format_ranks

_CONTEXT = 2
_MOST_GROUPS = 6
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python")

_RED, _GREEN, _CYAN, _BOLD, _DIM, _OFF = "\x1b[31m", "\x1b[32m", "\x1b[36m", "\x1b[1m", "\x1b[2m", "\x1b[39m\x1b[22m"

_BLANK = "\x1b[37m\x1b[39;49;00m"  # what the formatter makes of line ends

FileLabel = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank on which a cell failed: it raised (`fault`) or cannot answer any more (`death`, the cause)."""

    rank: int
    host: str = ""
    pid: int = 0
    fault: Any = None
    death: str = ""

    @property
    def of_peer(self) -> bool:
        """Whether it failed only because another rank had: it waited for that one in a collective."""
        return self.fault is not None and bool(self.fault.of_peer)

    @property
    def line(self) -> str:
        """What went wrong, in one line."""
        return _last_line(self.fault) if self.fault is not None else self.death


class MeshCellError(Exception):
    """A `%%mesh` cell failed on some of its ranks.

    Attributes:
        mesh: the name of the mesh.
        failures: the ranks that failed.
        released: those that only waited for them in `torch.distributed`, until their wait was ended.
        values: the values of the ranks that did not, by rank.
    """

    def __init__(
        self,
        mesh: str,
        extent: Extent,
        ran_on: Sequence[int],
        failures: Sequence[Failed],
        values: dict[int, Any],
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
            for group in _grouped(self.failures)
        ]
        text = f"{self._headline()}: " + "; ".join(told[:_MOST_GROUPS])
        return text + (f"; and {len(told) - _MOST_GROUPS} more kinds" if len(told) > _MOST_GROUPS else "")

    def _headline(self) -> str:
        return headline(self.mesh, self.extent, self.ran_on, [failure.rank for failure in self.failures])

    def _waited(self) -> str:
        """Which ranks waited for those that failed, and where."""
        ranks, one = _counted(self.released), len(self.released) == 1
        places = dict.fromkeys(self._place(failure.fault) for failure in self.released)
        where = f" at {', '.join(list(places)[:3])}" if places else ""
        return (
            f"{ranks[:1].upper()}{ranks[1:]} waited in torch.distributed{where} for {_counted(self.failures)}, and "
            f"{'was' if one else 'were'} released."
        )

    def _place(self, fault: Any) -> str:
        frames = [frame for frame in fault.shown_frames if not any(part in frame.file for part in _INSTALLED)]
        frame = (frames or fault.shown_frames)[-1]
        cell = self._file_label(frame.file)
        return f"{cell}, line {frame.line}" if cell else f"{frame.file}:{frame.line}"

    def _render_traceback_(self) -> list[str]:
        lines = [f"{_RED}{_BOLD}{self._headline()}{_OFF}"]
        groups = _grouped(self.failures)
        for group in groups[:_MOST_GROUPS]:
            lines += ["", *group_lines(group, self.extent, self._file_label)]
        if len(groups) > _MOST_GROUPS:
            left = [failure for group in groups[_MOST_GROUPS:] for failure in group]
            lines += ["", *(f"{_label([failure])} {failure.line}" for failure in left[:20])]
            if len(left) > 20:
                lines.append(f"… and {len(left) - 20} more ranks; the exception's .failures has all")
        if self.released:
            lines += ["", self._waited()]
        if self._note:
            lines += ["", self._note]
        return lines if self.colours else [strip_ansi(line) for line in lines]


class MeshCellInterrupt(MeshCellError, KeyboardInterrupt):
    """A `%%mesh` cell was interrupted on all ranks that did not finish."""


class CellSyntaxError(Exception):
    """A `%%mesh` cell that is no Python; found before any rank got it."""

    def __init__(self, error: SyntaxError, lines: list[str]) -> None:
        super().__init__(str(error))
        self.error = error
        self._lines = lines

    def _render_traceback_(self) -> list[str]:
        return self._lines


def cell_error(failures: Sequence[Failed], interrupted: bool, *args: Any, **kwargs: Any) -> MeshCellError:
    """The error for these failures: an interrupt if they all are nothing else."""
    stopped = interrupted and all(
        failure.of_peer or (failure.fault is not None and failure.fault.qualname == "KeyboardInterrupt")
        for failure in failures
    )
    kind = MeshCellInterrupt if stopped else MeshCellError
    mesh, extent, ran_on, values = args
    return kind(mesh, extent, ran_on, failures, values, **kwargs)


def headline(mesh: str, extent: Extent, ran_on: Sequence[int], failed: Sequence[int]) -> str:
    """Which ranks failed, of how many."""
    points = format_points(failed, extent, limit=6)
    noun = "rank" if len(failed) == 1 else "ranks"
    which = f"{noun} {format_ranks(failed, limit=6)}"
    where = f" ({points})" if points else ""
    return f"Failed on {which}{where} of the {len(ran_on)} of mesh {mesh} that ran it"


def group_lines(group: Sequence[Failed], extent: Extent, file_label: FileLabel) -> list[str]:
    """One kind of failure: its ranks and where they are, then the traceback, then what they said."""
    first = group[0]
    head = f"{_CYAN}{_label(group)}{_OFF} {_DIM}{_places(group)}{_OFF}".rstrip()
    if first.fault is None:
        return [head, f"{_RED}{_BOLD}{first.death}{_OFF}"]
    lines = [head, *fault_lines(first.fault, file_label)]
    said: dict[str, list[Failed]] = {}
    for failure in group:
        said.setdefault(failure.fault.summary, []).append(failure)
    if len(said) > 1:
        lines.pop()
        told = list(said.items())
        lines += [f"{_CYAN}{_label(who)}{_OFF} {_exception(summary)}" for summary, who in told[:20]]
        if len(told) > 20:
            lines.append(f"… and {len(told) - 20} more messages")
    return lines


def fault_lines(fault: Any, file_label: FileLabel) -> list[str]:
    """A remote exception as IPython shows a local one; the exception itself is the last element."""
    lines: list[str] = []
    if fault.cause is not None:
        lines += [*fault_lines(fault.cause, file_label), "", f"{_DIM}caused this exception:{_OFF}", ""]
    elif fault.context is not None:
        lines += [*fault_lines(fault.context, file_label), "", f"{_DIM}while handling it, another:{_OFF}", ""]
    for frame in fault.shown_frames:
        lines += _frame(frame, file_label)
    if fault.omitted:
        lines.append(f"{_DIM}… {fault.omitted} frames in the middle are left out{_OFF}")
    for number, member in enumerate(fault.members, 1):
        lines += [f"{_DIM}exception {number} of the group:{_OFF}", *fault_lines(member, file_label)]
    lines.append(_exception(fault.summary))
    return lines


def _frame(frame: Any, file_label: FileLabel) -> list[str]:
    cell = file_label(frame.file)
    where = f"{cell}, line {frame.line}" if cell else f"File {frame.file}:{frame.line}"
    function = "" if frame.function == "<module>" else f", in {_CYAN}{frame.function}{_OFF}"
    lines = [f"{_GREEN}{where}{_OFF}{function}", *_source(frame)]
    if frame.repeated:
        lines.append(f"{_DIM}      (repeated {frame.repeated} more times){_OFF}")
    return lines


def _source(frame: Any) -> list[str]:
    """The line with its neighbours, if this process has the same file; else the line that the rank sent."""
    told = frame.source.split("\n")[0].strip()
    here = linecache.getline(frame.file, frame.line)
    if not here.strip() or (told and here.strip() != told):
        return [f"----> {frame.line} {_coloured(told)}"] if told else []
    # Of a library's code the line is enough: what one looks for is one's own.
    context = 0 if any(part in frame.file for part in _INSTALLED) else _CONTEXT
    first = max(1, frame.line - context)
    lines: list[str] = []
    for number in range(first, frame.line + context + 1):
        source = linecache.getline(frame.file, number)
        if not source:
            break
        mark = "---->" if number == frame.line else "     "
        width = len(str(frame.line + context))
        lines.append(f"{_GREEN if number == frame.line else ''}{mark} {number:>{width}}{_OFF} {_coloured(source)}")
    return [line.rstrip() for line in lines]


def _exception(summary: str) -> str:
    name, colon, rest = summary.partition(":")
    return f"{_RED}{name}{_OFF}{colon}{rest}"


def _coloured(source: str) -> str:
    try:
        from pygments import highlight
        from pygments.formatters import TerminalFormatter
        from pygments.lexers import PythonLexer
    except ImportError:
        return source.rstrip("\n")
    coloured = highlight(source, PythonLexer(stripnl=False, ensurenl=False), TerminalFormatter())
    return str(coloured).replace(_BLANK, "").rstrip("\n")


def _label(group: Iterable[Failed]) -> str:
    return f"[{format_ranks([failure.rank for failure in group], limit=6)}]"


def _places(group: Sequence[Failed]) -> str:
    places = list(dict.fromkeys(f"{failure.host} pid {failure.pid}" for failure in group if failure.pid))
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


def _last_line(fault: Any) -> str:
    return str(fault.summary).split("\n")[0]


def _own_and_released(failures: Iterable[Failed]) -> tuple[list[Failed], list[Failed]]:
    """Ranks that failed for reasons of their own, and those that did as others had; if none has one, all are own."""
    everyone = list(failures)
    own = [failure for failure in everyone if not failure.of_peer]
    return (own, [failure for failure in everyone if failure.of_peer]) if own else (everyone, [])


def _counted(failures: Sequence[Failed]) -> str:
    return f"rank{'s' * (len(failures) != 1)} {format_ranks([failure.rank for failure in failures], limit=6)}"


def _grouped(failures: Iterable[Failed]) -> list[list[Failed]]:
    alike: dict[Any, list[Failed]] = {}
    for failure in failures:
        key = ("fault", failure.fault.likeness()) if failure.fault is not None else ("death", failure.death)
        alike.setdefault(key, []).append(failure)
    # The smallest group first: what few ranks do is what one looks for.
    return sorted(alike.values(), key=len)
