"""The error of a call or a cell as a value: one line for each kind of failure, which opens to its traceback."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from monarch_kernel.display import styles
from monarch_kernel.errors import ActorError, SupervisionError
from monarch_kernel.kernel.output.ansi import ansi_to_html
from monarch_kernel.kernel.output.cell_errors import CellFailure, MeshCellError, group_lines, grouped
from monarch_kernel.kernel.output.fault_text import FileLabel
from monarch_kernel.meshes import format_ranks

#: How many kinds of failures are shown.
MOST_GROUPS = 20
#: How much of a message the line of a group has (characters).
LONGEST = 160


def error_html(error: ActorError | SupervisionError | MeshCellError, file_label: FileLabel) -> str:
    """An error with the failures of ranks in groups of equal tracebacks, the smallest first."""
    if isinstance(error, MeshCellError):
        title, failures, values = error.headline, list(error.failures), error.values
        notes = error.notes
    else:
        failures = _failures(error)
        values, notes = getattr(error, "values", None) or {}, []
        title = f"{type(error).__name__}: {str(error).split(chr(10), 1)[0]}"
    groups = grouped(failures)
    parts = [f'<div style="{styles.HEADLINE};{styles.BAD}">{escape(title)}</div>']
    parts += [_group(group, file_label, len(groups) == 1) for group in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        parts.append(f'<div style="{styles.DIM}">… and {len(groups) - MOST_GROUPS} more kinds of failures</div>')
    parts += [f'<div style="{styles.DIM}">{escape(note)}</div>' for note in notes]
    if values:
        who = f"{'rank' if len(values) == 1 else 'ranks'} {format_ranks(values, limit=8)}"
        parts.append(f'<div style="{styles.DIM}">{escape(who)} did not fail; .values has what they returned</div>')
    return f'<div style="{styles.VIEW}">{"".join(parts)}</div>'


def _failures(error: Any) -> list[CellFailure]:
    return [
        CellFailure(
            each.rank,
            each.host,
            each.pid,
            fault=each.fault,
            death="" if each.fault is not None or each.death is None else each.death.cause,
        )
        for each in getattr(error, "failures", ())
    ]


def _group(group: Sequence[CellFailure], file_label: FileLabel, is_only: bool) -> str:
    ranks = format_ranks([failure.rank for failure in group], limit=8)
    line = group[0].line
    short = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
    head = f'<span style="{styles.RANKS}">[{escape(ranks)}]</span> {escape(short)}'
    if group[0].fault is None:
        return f'<div style="{styles.NEWS}">{head}</div>'
    body = ansi_to_html("\n".join(group_lines(group, file_label)))
    return (
        f'<details{" open" if is_only else ""} style="{styles.NEWS}"><summary style="cursor:pointer">{head}</summary>'
        f'<div style="{styles.SCROLLED}"><pre style="{styles.UNWRAPPED}">{body}</pre></div></details>'
    )
