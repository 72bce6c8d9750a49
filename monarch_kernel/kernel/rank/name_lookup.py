"""Names on a rank: completions and descriptions for a cell that is being typed, and variables for a view.

These functions run on a rank, on a thread other than its main thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.rank.lazy_shell import GIVEN, LazyShell
from monarch_kernel.kernel.rank.monitor import CellActivity
from monarch_kernel.kernel.rank.sent_values import shortened

#: Names with this prefix are hidden.
_HIDDEN = "_"
#: The maximum number of variables that `variables_here` lists, and the maximum length of a value (characters).
MOST, _LONGEST = 200, 200


def look_up(function: Callable[..., object], args: tuple[object, ...]) -> object:
    """Call one of the functions below with the shell of this rank; None if the rank cannot run cells."""
    shell = CellActivity.shell
    return None if shell is None else function(shell, *args)


def receive_comm(number: str, kind: str, content: dict[str, object], buffers: list[bytes]) -> bool:
    """Pass a message of the front end to a widget of this rank; returns whether it exists."""
    from monarch_kernel.kernel.rank.rank_comms import receive

    return receive(number, kind, content, buffers)


def variables(shell: LazyShell) -> list[str]:
    """Return the variables of user code in the namespace of the cells."""
    return sorted(name for name in shell.names if not name.startswith(_HIDDEN) and name not in GIVEN)


def completions(shell: LazyShell, code: str, cursor: int) -> tuple[str, list[tuple[str, str]]] | None:
    """Return completions at a position in the body of a cell.

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


def description(shell: LazyShell, name: str, detail: int, omit: tuple[str, ...]) -> dict[str, object] | None:
    """Return the output of `name?` as a MIME bundle; None for an unknown name, or without IPython."""
    ip = shell.get()
    if ip is None:
        return None
    from monarch_kernel.kernel.rank.sent_values import jsonable

    try:
        return jsonable(ip.object_inspect_mime(name, detail_level=detail, omit_sections=omit))
    except KeyError:
        return None


def variables_here() -> list[tuple[str, str, str]]:
    """Return name, type and short value of the variables of cells, then of the attributes of actors: `trainer.loss`."""
    found: list[tuple[str, str, str]] = []
    shell = CellActivity.shell
    if shell is not None:
        names = shell.names
        found += [(name, *_described(names[name])) for name in variables(shell) if name in names]
    for uid, actor in tool_runtime().actors_here().items():
        if actor is None or getattr(type(actor), "__tool__", False):
            continue
        of = uid.rsplit("-", 1)[0]
        for name, value in list(getattr(actor, "__dict__", {}).items()):
            if not name.startswith("_"):
                found.append((f"{of}.{name}", *_described(value)))
    return found[:MOST]


def _described(value: object) -> tuple[str, str]:
    kind = type(value).__name__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is not None and isinstance(shape, tuple) and shape:
        # Its elements may be on a GPU that computes: reading them would wait for it.
        return kind, f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    return kind, shortened(value, _LONGEST)
