"""IPython hooks for completion and inspection in `%mesh` lines and `%%mesh` cells."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.utils.tokenutil import token_at_cursor

from monarch_kernel.debugger.commands.grammar import COMMANDS
from monarch_kernel.kernel.cell import split_header
from monarch_kernel.kernel.cell_run import CellRun
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay
from monarch_kernel.kernel.magics.arguments import parser_for, parser_of
from monarch_kernel.kernel.magics.dispatch import FUNCTIONS, TOPICS
from monarch_kernel.kernel.magics.mesh_magics import MeshMagics
from monarch_kernel.kernel.magics.value_magics import handle_named
from monarch_kernel.kernel.mesh_lifecycle import kept_by_others
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.output.cell_errors import MeshCellError
from monarch_kernel.kernel.rank import name_lookup
from monarch_kernel.launchers.host_request import job_ids, source_names
from monarch_kernel.meshes import KeptError
from monarch_kernel.runtime.actor.errors import ActorError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from monarch_kernel.kernel.session import ManagedMesh, MeshSession

# Completion and inspection in `%%mesh` cells, with the names of a rank instead of those of the notebook.
#
# The notebook queries the first rank of the cell that it believes to be idle. If that rank does not answer within a
# moment, the notebook continues without an answer and does not query the rank again for a while.

#: The time for ranks to answer (seconds): the first time, when they may have to import IPython, and later.
FIRST, LATER = 3.0, 1.0
#: The delay before a rank that has not answered is queried again (seconds).
REST = 20.0

#: Returns the mesh and the ranks that the first line of a cell addresses, or None.
Addressed = Callable[[str], "tuple[ManagedMesh, Sequence[int]] | None"]


class Introspection:
    """Queries ranks about names in cells that are being typed.

    Args:
        session: the meshes.
        addressed: parses the first line of a cell.
    """

    def __init__(self, session: MeshSession, addressed: Addressed) -> None:
        self._session = session
        self._addressed = addressed
        self._answered: set[tuple[str, int]] = set()
        self._late: dict[tuple[str, int], float] = {}

    def complete(self, code: str, cursor: int) -> tuple[str, list[tuple[str, str]]] | None:
        """Return `name_lookup.completions` at a position in a cell; None if no rank was queried, or none answered."""
        split = split_header(code)
        if split is None or cursor < len(split[0]):
            return None
        header, body = split
        return self._ask(header, name_lookup.completions, body, cursor - len(header))

    def describe(self, code: str, cursor: int, name: str, detail: int, omit: Sequence[str]) -> dict[str, object] | None:
        """Return the description of a name in a cell as a MIME bundle; None without an answer, or if it is unknown."""
        split = split_header(code)
        if split is None or cursor < len(split[0]):
            return None
        return self._ask(split[0], name_lookup.description, name, detail, tuple(omit))

    def variables(self) -> list[str]:
        """Return the variables of a rank of the mesh in use."""
        return self._ask("%%mesh", name_lookup.variables) or []

    def _ask(self, first_line: str, function: Callable[..., object], *args: object) -> Any:
        found = self._addressed(first_line.strip().removeprefix("%%mesh"))
        if found is None:
            return None
        managed, ranks = found
        from monarch_kernel.debugger.controller.query import ask

        for rank in self._order(managed, ranks)[:2]:
            key = (managed.procs.name, rank)
            timeout = LATER if key in self._answered else FIRST
            answers = ask(managed.procs, name_lookup.look_up, function, args, ranks=[rank], timeout=timeout)
            if rank in answers.values:
                self._answered.add(key)
                return answers.values[rank]
            if rank in answers.late:
                self._late[key] = time.monotonic() + REST
                return None
        return None

    def _order(self, managed: ManagedMesh, ranks: Sequence[int]) -> list[int]:
        """Return the ranks to query, best first, without those that recently failed to answer."""
        now = time.monotonic()
        name = managed.procs.name
        runs = [run for run in get_relay().background if isinstance(run, CellRun) and run.managed is managed]
        busy = set[int]().union(*(run.waiting for run in runs))
        silent = managed.procs.unresponsive()
        fit = [rank for rank in ranks if rank not in silent and self._late.get((name, rank), 0.0) <= now]
        return sorted(fit, key=lambda rank: rank in busy)


# Complete `%mesh` and `%%mesh` lines: subcommands, options, mesh names, dimensions, variables. Pure.


@dataclass(frozen=True, slots=True)
class Known:
    """The names that a line can use now.

    Attributes:
        meshes: the dimensions and sizes of each mesh, by name.
        current: the mesh in use.
        variables: the variables of the notebook.
        kept: the kept meshes that can be attached.
        breakpoints: the numbers of breakpoints.
        files: source files for breakpoints.
        tensors: the variables of the notebook that are tensors on meshes.
        places: looks up providers, profiles and jobs.
        jobs: looks up the ids of jobs.
        of_ranks: queries a rank for the names of its variables.
        folders: looks up the folders whose paths begin with a word.
    """

    meshes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    current: str | None = None
    variables: Iterable[str] = ()
    kept: Iterable[str] = ()
    breakpoints: Iterable[int] = ()
    files: Iterable[str] = ()
    of_ranks: Callable[[], Iterable[str]] = tuple
    folders: Callable[[str], Iterable[str]] = lambda word: ()
    tensors: Iterable[str] = ()
    places: Callable[[], Iterable[str]] = tuple
    jobs: Callable[[], Iterable[str]] = tuple


class MeshCompleter:
    """Completes one line.

    Args:
        subcommands: returns the parser of each subcommand of `%mesh`, for the words after it.
        cell: the parser of `%%mesh`.
        known: called at each completion.
        topics: the topics of `%mesh help`.
    """

    def __init__(
        self,
        subcommands: Mapping[str, Callable[[list[str]], argparse.ArgumentParser]],
        cell: argparse.ArgumentParser,
        known: Callable[[], Known],
        topics: Iterable[str] = (),
    ) -> None:
        self._topics = tuple(topics)
        self._subcommands = subcommands
        self._cell = cell
        self._known = known

    def complete(self, before: str) -> tuple[list[str], str] | None:
        """Complete the part of a line before the cursor.

        Returns:
            The completions, and the word that they replace; None if the line is not `%mesh` or `%%mesh`.
        """
        text = before.lstrip()
        cell = text.startswith("%%mesh ")
        if not cell and not text.startswith("%mesh "):
            return None
        words = text.split(" ")[1:]
        word = words.pop()
        words = [each for each in words if each]
        if cell:
            return self._matching(word, self._arguments(self._cell, words, word, "cell"))
        if not words:
            return self._matching(word, [*self._subcommands, "--help", "help"])
        if words[0] == "help":
            return self._matching(word, self._topics)
        parser = self._subcommands.get(words[0])
        if parser is None:
            return [], word
        return self._matching(word, self._arguments(parser(words[1:]), words[1:], word, words[0]))

    @staticmethod
    def _matching(word: str, candidates: Iterable[str]) -> tuple[list[str], str]:
        return sorted({each for each in candidates if each.startswith(word) and each != word}), word

    def _arguments(self, parser: argparse.ArgumentParser, words: list[str], word: str, command: str) -> list[str]:
        known = self._known()
        options = {option: action for action in parser._actions for option in action.option_strings}
        previous = options.get(words[-1]) if words else None
        if previous is not None and previous.nargs != 0:
            return self._values(previous, known, words)
        if word.startswith("-"):
            used = {id(options[each]) for each in words if each in options}
            return [
                option
                for option, action in options.items()
                if option.startswith("--") and (id(action) not in used or _repeatable(action))
            ] + ["--help"]
        if command == "sync":
            return list(known.folders(word))
        return self._positional(command, known, words, options)

    def _values(self, action: argparse.Action, known: Known, words: list[str]) -> list[str]:
        if action.choices is not None:
            return [str(choice) for choice in action.choices]
        if action.dest == "on" and action.metavar == "ENGINE":
            return list(known.places())
        if action.dest in ("on", "name"):
            return list(known.meshes)
        if action.dest in ("ranks", "where"):
            return self._dimensions(known, words)
        if action.dest == "preload":
            return ["torch"]
        return []

    def _positional(self, command: str, known: Known, words: list[str], options: Mapping[str, object]) -> list[str]:
        if command == "up":
            return ["gpus=", "--procs"]
        if command == "push":
            return [name for name in known.variables if not name.startswith("_")]
        if command in ("diff", "plot"):
            return [*known.of_ranks(), *known.tensors]
        if command in ("watch", "memory"):
            return list(known.tensors)
        if command == "plan":
            return ["on", "off", "clear"]
        if command == "pull":
            return list(known.of_ranks())
        if command == "clear":
            return [*map(str, known.breakpoints), "all"]
        if command == "break":
            return [f"{file}:" for file in known.files]
        if command == "jobs":
            return list(known.jobs()) if words else ["logs", "kill"]
        if command == "pm":
            return []
        if command == "debug":
            left = [each for each in _without_values(words, options) if not each.startswith("-")]
            return [] if left else [each.name for each in COMMANDS]
        given = any(not each.startswith("-") for each in _without_values(words, options))
        if command == "attach":
            return [] if given else list(known.kept)
        return [] if given else list(known.meshes)

    @staticmethod
    def _dimensions(known: Known, words: list[str]) -> list[str]:
        named = next((word for word in words if word in known.meshes), known.current)
        sizes = known.meshes.get(named or "", {})
        return [f"{label}=" for label in sizes]


def _repeatable(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _without_values(words: Iterable[str], options: Mapping[str, Any]) -> list[str]:
    left: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        action = options.get(word)
        skip = action is not None and action.nargs != 0
        left.append(word)
    return left


def matcher(notebook: Notebook, ranks: Introspection) -> object:
    """Return an IPython completion matcher for `%mesh` lines and `%%mesh` cells."""
    parsers = {word: partial(parser_for, function) for word, function in FUNCTIONS.items()}
    completer = MeshCompleter(
        parsers, parser_of(MeshMagics.mesh_cell), lambda: known(notebook, ranks.variables), TOPICS
    )

    @context_matcher()
    def mesh_matcher(context: CompletionContext) -> object:
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


class _Nothing(tuple[object, ...]):
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

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> object:
        name = token_at_cursor(code, cursor_pos)
        bundle = ranks.describe(code, cursor_pos, name, detail_level, tuple(omit_sections)) if name else None
        if bundle is None:
            return inspect(code, cursor_pos, detail_level, *([omit_sections] if omit_sections else []))
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
