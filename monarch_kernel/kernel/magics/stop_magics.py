"""`%mesh break`, `%mesh clear`, `%mesh debug`, `%mesh pm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.debugger import get_debugger
from monarch_kernel.debugger.commands import breakpoint_commands
from monarch_kernel.debugger.commands.grammar import CommandError
from monarch_kernel.debugger.controller.breakpoints import extend
from monarch_kernel.debugger.controller.viewers import DriverError
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.debug.stop_notices import live
from monarch_kernel.kernel.magics.arguments import (
    Arguments,
    OptionsAt,
    Subcommands,
    mesh_option,
    ranks_option,
    select,
    text_argument,
)
from monarch_kernel.kernel.notebook import Notebook

if TYPE_CHECKING:
    from monarch_kernel.debugger.commands.console import Console

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Printed instead of opening a prompt.
_NOT_HELD = "Other cells are already waiting, so no prompt opens here; {line} in another cell opens it."


class StopMagics(Subcommands):
    """Setting breakpoints, and examining stopped ranks."""

    def __init__(self, notebook: Notebook, *more: Any) -> None:
        super().__init__(notebook, *more)
        self._console: Console | None = None

    @magic_arguments("mesh break")
    @text_argument(
        "where",
        OptionsAt.WITHIN,
        nargs="?",
        metavar="FILE_OR_CELL:LINE",
        help="train.py:12; 5:3 or In[5]:3; :3 in the last cell",
    )
    @ranks_option()
    @mesh_option("only on this mesh (default: all meshes, later ones too)")
    @argument("--if", dest="condition", metavar="EXPR", help="stop only where this is true")
    @argument("--hits", metavar="N", help="from the Nth hit on")
    @argument("--first", action="store_true", help="stop only the first rank that gets there")
    @argument("--when-differs", metavar="EXPR", help="only if ranks disagree on this")
    @argument("--log", metavar="TEXT", help="print this instead of stopping; {EXPR} in it is evaluated")
    @argument("--on-error", nargs="?", metavar="TYPE", help="where an endpoint or a cell fails with that exception")
    def set_breakpoint(self, found: Arguments) -> None:
        """Stop ranks at a line, or at an exception; without arguments, list the breakpoints."""
        debugger = get_debugger()
        if not found.where:
            self.say(breakpoint_commands.listing(debugger, self._notebook.file_label))
            return
        made = _refused(
            breakpoint_commands.arm, debugger, found.where, found.magic, self._notebook.frontend
        )  # the same options as at the prompt
        self._notebook.stops.notices.setters[made.id] = self._notebook.cell_key
        self.say(breakpoint_commands.armed_text(made, self._notebook.file_label))

    @magic_arguments("mesh clear")
    @argument("numbers", nargs="*", metavar="N", help="numbers of breakpoints, as in %%mesh break; or all")
    def clear(self, found: Arguments) -> None:
        """Remove breakpoints."""
        self.say(_refused(breakpoint_commands.clear, get_debugger(), " ".join(found.numbers), found.magic))

    @magic_arguments("mesh debug")
    @ranks_option()
    @mesh_option("the mesh (default: all that have stopped ranks)")
    @argument(
        "--extend-timeout",
        type=float,
        metavar="SECONDS",
        help="let later collectives of the mesh wait at least so long for ranks that are stopped",
    )
    @text_argument(
        "command",
        OptionsAt.BEGINNING,
        nargs="*",
        metavar="COMMAND",
        help="execute this instead of opening a prompt: where, print x",
    )
    def debug(self, found: Arguments) -> None:
        """Examine and resume stopped ranks: a prompt in this cell, or a single command; help lists the commands."""
        debugger = get_debugger()
        if found.extend_timeout is not None:
            if not 0 < found.extend_timeout < 1e9:
                raise UsageError(f"{found.magic}: --extend-timeout takes a number of seconds above 0")
            self.say(extend(debugger, self._session.find(found.on, found.magic), found.extend_timeout))
            return
        prompt = self._notebook.stops
        if not found.command:
            if not live(debugger.stops()):
                self.say(
                    "No rank is stopped. %mesh break sets a breakpoint, %mesh debug pause stops ranks where they are."
                )
                for name, procs in self._session.proc_meshes().items():
                    if other := tool_runtime().driver_of(procs, ask=False):
                        self.say(
                            f"Of job {name}, {other} has control: its stops are its own, and %mesh stacks shows where; "
                            f"%mesh join {name} --drive takes them."
                        )
                return
            if prompt.may_hold() and not prompt.is_open:
                first = f"mesh {found.on}" if found.on else f"ranks {found.ranks}" if found.ranks else ""
                prompt.talk(debugger, lambda: not live(debugger.stops()), first=first, patient=True)
                return
            if prompt.may_ask() and not prompt.is_open:
                self.say(_NOT_HELD.format(line=f"{found.magic} {found.line}".rstrip()))
        self._run_command(found.command or "groups", found)

    def _run_command(self, command: str, found: Arguments) -> None:
        console = self._one_shot()
        mesh, ranks = self._stops_at(found)
        try:
            if mesh is not None and command in ("pause", "unpause"):  # these ranks need not be stopped yet
                _refused(console.pause if command == "pause" else console.unpause, mesh, ranks)
            elif mesh is not None and command.split()[0] not in ("pause", "unpause", "ranks", "mesh"):
                console.run_on(mesh, ranks, command)
            else:
                console.run(f"{command} {found.ranks}" if found.ranks else command)
        finally:
            console.close()

    @magic_arguments("mesh pm")
    @argument("failure", nargs="?", metavar="NAME", help="an earlier failure, by the name that %%mesh pm offers: In[3]")
    @ranks_option()
    @mesh_option()
    def pm(self, found: Arguments) -> None:
        """Open the frames of the last failure of a cell or an endpoint, with or without breakpoints."""
        debugger = get_debugger()
        found.on = self._session.find(found.on, found.magic).name
        mesh, ranks = self._stops_at(found)
        assert mesh is not None
        prompt = self._notebook.stops
        if prompt.may_hold() and not prompt.is_open:
            prompt.post_mortem(debugger, mesh, ranks, found.failure or "", self._one_shot())
            return
        if prompt.may_ask() and not prompt.is_open:
            self.say(_NOT_HELD.format(line=f"{found.magic} {found.line}".rstrip()))
        if self._one_shot().post_mortem(mesh, ranks, found.failure or "", found.magic):
            self.say(
                "%mesh debug print EXPR, where, up, locals look into these frames; %mesh debug continue closes them."
            )

    def _stops_at(self, found: Arguments) -> tuple[str | None, tuple[int, ...] | None]:
        """Return the mesh and the ranks that `--on` and `-r` select; None for all stopped ranks."""
        if found.on is None and found.ranks is None:
            return None, None
        mesh = self._session.find(found.on, found.magic)
        if found.ranks is None:
            return mesh.name, None
        return mesh.name, select(found.magic, found.ranks, [], mesh.extent, mesh.name)

    def _one_shot(self) -> Console:
        """Return the console for single commands. It keeps the frame, and the selection of `ranks` and `group`."""
        from monarch_kernel.debugger.commands.console import Console

        debugger = get_debugger()
        if self._console is None or self._console.debugger is not debugger:
            self._console = Console(debugger, lambda text: self.say(text.rstrip("\n")), name=self.name)
        return self._console


def _refused(function: Callable[[*Ts], T], *args: *Ts) -> T:
    try:
        return function(*args)
    except (CommandError, DriverError) as error:
        raise UsageError(str(error)) from None
