"""IPython hooks for completion and inspection in `%mesh` lines and `%%mesh` cells."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.utils.tokenutil import token_at_cursor

from monarch_kernel.kernel.magics.arguments import parser_for, parser_of
from monarch_kernel.kernel.magics.completion import Known, MeshCompleter
from monarch_kernel.kernel.magics.dispatch import FUNCTIONS, TOPICS
from monarch_kernel.kernel.magics.mesh_magics import MeshMagics
from monarch_kernel.kernel.magics.rank_introspection import Introspection
from monarch_kernel.kernel.magics.value_magics import handle_named
from monarch_kernel.kernel.mesh_lifecycle import kept_by_others
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.output.cell_errors import MeshCellError
from monarch_kernel.launchers.host_request import job_ids, source_names
from monarch_kernel.meshes import KeptError
from monarch_kernel.runtime.actor.errors import ActorError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def matcher(notebook: Notebook, ranks: Introspection) -> Any:
    """Return an IPython completion matcher for `%mesh` lines and `%%mesh` cells."""
    parsers = {word: partial(parser_for, function) for word, function in FUNCTIONS.items()}
    completer = MeshCompleter(
        parsers, parser_of(MeshMagics.mesh_cell), lambda: known(notebook, ranks.variables), TOPICS
    )

    @context_matcher()
    def mesh_matcher(context: CompletionContext) -> Any:
        lines = context.full_text.split("\n")
        line = lines[context.cursor_line][: context.cursor_position]
        found = completer.complete(line)
        if found is not None:
            texts, word = found
            matches = [SimpleCompletion(text, type="mesh") for text in texts]
        else:
            offset = sum(len(each) + 1 for each in lines[: context.cursor_line]) + context.cursor_position
            of_rank = ranks.complete(context.full_text, offset)
            if of_rank is None:
                return {"completions": [], "suppress": False}
            word, named = of_rank
            matches = [SimpleCompletion(text, type=kind) for text, kind in named]
        return {"completions": matches or _Nothing(), "matched_fragment": word, "suppress": True}

    return mesh_matcher


class _Nothing(tuple[Any, ...]):
    """An empty result that still suppresses the notebook's completions: IPython checks that it is not empty."""

    def __len__(self) -> int:
        return 1


def inspecting(ip: InteractiveShell, ranks: Introspection) -> Callable[[], None]:
    """Make the kernel describe names in `%%mesh` cells by the definitions on a rank.

    Returns:
        A function that undoes this.
    """
    kernel = getattr(ip, "kernel", None)
    if kernel is None:
        return lambda: None
    inspect = kernel.do_inspect

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        name = token_at_cursor(code, cursor_pos)
        bundle = ranks.describe(code, cursor_pos, name, detail_level, tuple(omit_sections)) if name else None
        if bundle is None:
            return inspect(code, cursor_pos, detail_level, omit_sections)
        if not ip.enable_html_pager:
            bundle.pop("text/html", None)
        return {"status": "ok", "data": bundle, "metadata": {}, "found": True}

    kernel.do_inspect = do_inspect

    def undo() -> None:
        del kernel.do_inspect

    return undo


def debugging(ip: InteractiveShell) -> Callable[[], None]:
    """Make `%debug` open `%mesh pm` after an error of ranks: the frames of the notebook only show the wait.

    Returns:
        A function that undoes this.
    """
    debugger = ip.debugger

    def debug(force: bool = False) -> None:
        error = getattr(sys, "last_value", None)
        if isinstance(error, MeshCellError):
            print(f"The error is of ranks of mesh {error.mesh}, so this is %mesh pm --on {error.mesh}:")
            ip.run_line_magic("mesh", f"pm --on {error.mesh}")
            return
        if isinstance(error, ActorError):
            print("The frames below are the notebook's; %mesh pm opens those of the ranks.")
        debugger(force)

    ip.debugger = debug

    def undo() -> None:
        if ip.debugger is debug:
            ip.debugger = debugger

    return undo


def known(notebook: Notebook, of_ranks: Callable[[], Iterable[str]]) -> Known:
    """Return the names that a line can use now."""
    session, shell = notebook.session, notebook.shell
    meshes = {name: dict(mesh.extent) for name, mesh in session.proc_meshes().items()}
    hidden = getattr(shell, "user_ns_hidden", {})
    variables = [name for name in shell.user_ns if name not in hidden]
    kept: list[str] = []
    with suppress(KeptError):  # %mesh ls shows the error
        kept = [info.name for info in kept_by_others()]
    hub = sys.modules.get("monarch_kernel.debugger.controller.hub")
    debugger = hub.existing_debugger() if hub is not None else None
    breakpoints = [each.id for each in debugger.breakpoints()] if debugger is not None else []
    tensors = [name for name in variables if handle_named(name, shell.user_ns) is not None]
    files = sorted(file.name for file in os.scandir() if file.name.endswith(".py"))
    return Known(
        meshes, session.current, variables, kept, breakpoints, files, of_ranks, _folders, tensors, source_names, job_ids
    )


def _folders(word: str) -> list[str]:
    """Return the folders whose paths begin with a word, spelled as in the word; hidden ones only for a leading dot."""
    above, _, begun = word.rpartition("/")
    above = above + "/" if "/" in word else ""
    try:
        entries = list(os.scandir(os.path.expanduser(above) or "."))
    except OSError:
        return []
    shown = (each.name for each in entries if each.is_dir() and (begun.startswith(".") or each.name[0] != "."))
    return [f"{above}{name}/" for name in shown]
