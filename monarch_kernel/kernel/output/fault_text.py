"""Format a rank's exception in IPython's style for local ones: coloured frames with their source, then the message."""

from __future__ import annotations

import linecache
from collections.abc import Callable

from monarch_kernel.protocol.faults import Fault

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
