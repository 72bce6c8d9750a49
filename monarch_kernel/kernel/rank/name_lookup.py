"""Completions and descriptions of names on a rank, for a cell that is being typed in the notebook.

These functions run on a rank, on a thread other than its main thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from monarch_kernel.kernel.rank.cell_activity import CellActivity
from monarch_kernel.kernel.rank.lazy_shell import GIVEN, LazyShell

#: Names with this prefix are hidden.
_HIDDEN = "_"


def look_up(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call one of the functions below with the shell of this rank; None if the rank cannot run cells."""
    shell = CellActivity.shell
    return None if shell is None else function(shell, *args)


def receive_comm(number: str, kind: str, content: dict[str, Any], buffers: list[bytes]) -> bool:
    """Pass a message of the front end to a widget of this rank; returns whether it exists."""
    from monarch_kernel.kernel.rank.rank_comms import receive

    return receive(number, kind, content, buffers)


def variables(shell: LazyShell) -> list[str]:
    """The variables of user code in the namespace of the cells."""
    return sorted(name for name in shell.names if not name.startswith(_HIDDEN) and name not in GIVEN)


def completions(shell: LazyShell, code: str, cursor: int) -> tuple[str, list[tuple[str, str]]] | None:
    """Completions at a position in the body of a cell.

    Returns:
        The prefix that the completions replace, and each completion with its type; None without IPython.
    """
    ip = shell.get()
    if ip is None:
        return None
    from IPython.core.completer import provisionalcompleter, rectify_completions

    with provisionalcompleter(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(rectify_completions(code, ip.Completer.completions(code, cursor)))
    start = found[0].start if found else cursor
    return code[start:cursor], [(each.text, each.type or "") for each in found]


def description(shell: LazyShell, name: str, detail: int, omit: tuple[str, ...]) -> dict[str, Any] | None:
    """The output of `name?` as a MIME bundle; None for an unknown name, or without IPython."""
    ip = shell.get()
    if ip is None:
        return None
    from monarch_kernel.kernel.rank.plain_display import jsonable

    try:
        return jsonable(ip.object_inspect_mime(name, detail_level=detail, omit_sections=omit))
    except KeyError:
        return None
