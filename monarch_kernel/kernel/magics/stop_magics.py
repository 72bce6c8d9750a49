"""`%mesh break`, `%mesh clear`, `%mesh debug`, `%mesh pm`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.debugger import get_debugger
from monarch_kernel.debugger.commands import breakpoints
from monarch_kernel.debugger.commands.grammar import CommandError
from monarch_kernel.kernel.debug.stop_notices import live
from monarch_kernel.kernel.magics import arguments as args_of
from monarch_kernel.kernel.magics.arguments import help_text, usage_error, without_comment

if TYPE_CHECKING:
    from monarch_kernel.debugger.commands.console import Console
    from monarch_kernel.kernel.notebook import Notebook
    from monarch_kernel.kernel.session import MeshSession

#: Subcommands of `%mesh` that are here.
SUBCOMMANDS: tuple[str, ...] = ("break", "clear", "debug", "pm")

_ADDRESSED = {"-r": "word", "--ranks": "word", "--on": "word"}
_RANKS = "ranks, such as 0-3,7 or 0:8:2, or dimensions, such as hosts=1,gpus=0-3 (default: all)"
#: Said instead of opening a prompt.
_NOT_HELD = "Other cells wait already, so no prompt opens here; {line} in a cell of its own opens it."


class StopMagics:
    """Mixed into `MeshMagics`."""

    _notebook: Notebook
    _session: MeshSession
    _console: Console | None = None

    # Expressions follow options as they are, so these lines are not split as a shell would.

    @magic_arguments("mesh break")
    @argument("where", nargs="?", metavar="FILE_OR_CELL:LINE", help="train.py:12; 5:3 or In[5]:3; :3 in the last cell")
    @argument("-r", "--ranks", metavar="RANKS", help=_RANKS)
    @argument("--on", metavar="NAME", help="only on this mesh (default: all meshes, later ones too)")
    @argument("--if", dest="condition", metavar="EXPR", help="stop only where this is true")
    @argument("--hits", metavar="N", help="from the Nth hit on")
    @argument("--first", action="store_true", help="only the first rank that gets there")
    @argument("--when-differs", metavar="EXPR", help="only if ranks disagree on this")
    @argument("--log", metavar="TEXT", help="print this instead of stopping; {EXPR} in it is evaluated")
    @argument("--on-error", nargs="?", metavar="TYPE", help="where an endpoint or a cell fails with that exception")
    def _break(self, line: str) -> None:
        """Stop ranks at a line, or at an exception; without arguments, list the breakpoints."""
        if _asks_for_help(line, StopMagics._break):
            return
        debugger = get_debugger()
        if not line.strip():
            print(breakpoints.listing(debugger, self._notebook.file_label))
            return
        made = _refused(breakpoints.arm, debugger, line, "%mesh break")
        self._notebook.stops.notices.setters[made.id] = self._notebook.cell_key
        print(breakpoints.armed_text(made, self._notebook.file_label))

    @magic_arguments("mesh clear")
    @argument("numbers", nargs="*", metavar="N", help="of breakpoints, as %%mesh break lists them; or all")
    def clear(self, line: str) -> None:
        """Remove breakpoints."""
        if not _asks_for_help(line, StopMagics.clear):
            print(_refused(breakpoints.clear, get_debugger(), without_comment(line).strip(), "%mesh clear"))

    @magic_arguments("mesh debug")
    @argument("-r", "--ranks", metavar="RANKS", help=_RANKS)
    @argument("--on", metavar="NAME", help="the mesh (default: all that have stopped ranks)")
    @argument("command", nargs="*", metavar="COMMAND", help="execute this instead of opening a prompt: where, print x")
    def debug(self, line: str) -> None:
        """Look into stopped ranks and move them on: a prompt in this cell, or one command; help lists the commands."""
        if _asks_for_help(line, StopMagics.debug):
            return
        debugger = get_debugger()
        options, command = _leading_options(line, "%mesh debug")
        prompt = self._notebook.stops
        if not command:
            if not live(debugger.stops()):
                print(
                    "No rank is stopped. %mesh break sets a breakpoint, %mesh debug pause stops ranks where they are."
                )
                return
            if prompt.may_hold() and not prompt.is_open:
                choice = f"ranks {options['ranks']}" if "ranks" in options else ""
                if "on" in options:
                    choice = f"mesh {options['on']}"
                prompt.talk(debugger, lambda: not live(debugger.stops()), first=choice, patient=True)
                return
            if prompt.may_ask() and not prompt.is_open:
                print(_NOT_HELD.format(line=f"%mesh debug {line.strip()}".rstrip()))
            command = "groups"
        console = self._one_shot()
        mesh, ranks = self._addressed_stops(options)
        try:
            if options and command.split()[0] not in ("pause", "ranks", "mesh"):
                console.run_on(mesh, ranks, command)
            else:
                console.run(_with_ranks(command, options))
        finally:
            console.close()

    @magic_arguments("mesh pm")
    @argument("-r", "--ranks", metavar="RANKS", help=_RANKS)
    @argument("--on", metavar="NAME", help="the mesh (default: the one in use)")
    def pm(self, line: str) -> None:
        """Open the frames of the last exceptions of ranks, whether or not there were breakpoints."""
        if _asks_for_help(line, StopMagics.pm):
            return
        options, rest = _leading_options(line, "%mesh pm")
        if rest:
            raise usage_error("%mesh pm", f"there is one argument too many: {rest.split()[0]!r}; see %mesh pm --help")
        debugger = get_debugger()
        mesh, ranks = self._addressed_stops({"on": self._session.find(None, "%mesh pm").name, **options})
        assert mesh is not None
        prompt = self._notebook.stops
        if prompt.may_hold() and not prompt.is_open:
            prompt.post_mortem(debugger, mesh, ranks, self._one_shot())
            return
        if prompt.may_ask() and not prompt.is_open:
            print(_NOT_HELD.format(line=f"%mesh pm {line.strip()}".rstrip()))
        if self._one_shot().post_mortem(mesh, ranks):
            print("%mesh debug print EXPR, where, up, locals look into these frames; %mesh debug continue closes them.")

    def _addressed_stops(self, options: dict[str, str]) -> tuple[str | None, tuple[int, ...] | None]:
        """The mesh and the ranks that `--on` and `-r` name."""
        on, text = options.get("on"), options.get("ranks")
        if on is None and text is None:
            return None, None
        mesh = self._session.find(on, "%mesh debug")
        ranks = args_of.select("%mesh debug", text, [], mesh.extent, mesh.name) if text is not None else None
        return mesh.name, ranks

    def _one_shot(self) -> Console:
        """The console of single commands; it remembers the frame, and what `ranks` and `group` chose."""
        from monarch_kernel.debugger.commands.console import Console

        debugger = get_debugger()
        if self._console is None or self._console.debugger is not debugger:
            self._console = Console(debugger, _write, name="a cell of the notebook")
        return self._console


# `break` is no name that Python allows; `%mesh` looks its subcommands up by theirs.
setattr(StopMagics, "break", StopMagics._break)


def _with_ranks(command: str, options: dict[str, str]) -> str:
    """`-r 0-3 pause` is `pause 0-3`: those ranks need not be stopped yet."""
    return f"{command} {options['ranks']}" if "ranks" in options else command


def _write(text: str) -> None:
    sys.stdout.write(text)


def _asks_for_help(line: str, function: Any) -> bool:
    words = line.split()
    if words and words[0] in ("-h", "--help"):
        print(help_text(function))
        return True
    return False


def _refused(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except CommandError as error:
        raise UsageError(str(error)) from None


def _leading_options(line: str, command: str) -> tuple[dict[str, str], str]:
    """`-r RANKS` and `--on NAME` at the beginning of a line, and what follows them."""
    found: dict[str, str] = {}
    rest = line.strip()
    while rest.startswith("-"):
        option, _, after = rest.partition(" ")
        option, equals, value = option.partition("=")
        if option not in _ADDRESSED:
            raise usage_error(command, f"there is no option {option}; see {command} --help")
        if not equals:
            value, _, after = after.strip().partition(" ")
        if not value:
            raise usage_error(command, f"{option} takes a value; see {command} --help")
        found["on" if option == "--on" else "ranks"] = value
        rest = after.strip()
    return found, rest
