"""`%mesh diff`."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.actor import ActorMesh
from monarch_kernel.kernel.magics import arguments as args_of
from monarch_kernel.kernel.magics.arguments import parse, usage_error

if TYPE_CHECKING:
    from monarch_kernel.kernel.notebook import Notebook
    from monarch_kernel.kernel.session import MeshSession

#: Subcommands of `%mesh` that are here.
SUBCOMMANDS: tuple[str, ...] = ("diff",)

_WITH_VALUE = ("-r", "--ranks", "--on", "--up", "--timeout")
_FLAGS = ("--in-frame", "--grads", "-h", "--help")
_LEADING = re.compile(rf"(?:({'|'.join(_WITH_VALUE)})(?:\s+|=)(\S+)|({'|'.join(_FLAGS)}))(?:\s+|$)")
_TRAILING = re.compile(rf"(?:^|\s)(?:({'|'.join(_WITH_VALUE)})(?:\s+|=)(\S+)|({'|'.join(_FLAGS)}))$")
_UNKNOWN = re.compile(r"(?:^|\s)(--[A-Za-z][\w-]*)")


class ValueMagics:
    """Mixed into `MeshMagics`."""

    _notebook: Notebook
    _session: MeshSession

    @magic_arguments("mesh diff")
    @argument("expression", nargs="?", metavar="EXPR", help="of Python; the rest of the line, as it is")
    @argument("-r", "--ranks", metavar="RANKS", help="ranks, such as 0-3,7, or dimensions: gpus=0-3 (default: all)")
    @argument("--on", metavar="NAME", help="the mesh (default: the one in use), or a variable with actors: their self")
    @argument("--in-frame", action="store_true", help="look into stopped frames, also those of %%mesh pm")
    @argument("--up", type=int, default=0, metavar="N", help="so many of your frames up from the innermost one")
    @argument("--grads", action="store_true", help="of a module, compare the gradients")
    @argument("--timeout", type=float, metavar="S", help="how long ranks may take (default: 30 seconds)")
    def diff(self, line: str) -> Any:
        """Evaluate an expression on every rank: one line per distinct value, and where the values differ.

        It looks into stopped frames while ranks of the mesh are stopped, and else sees what cells on the ranks see.
        Tensors, modules and whatever contains them stay where they are: ranks reduce them to figures and digests.
        """
        command = "%mesh diff"
        options, expression = split_line(line)
        words = [*options, "--", expression] if expression else options
        found = parse(ValueMagics.diff, shlex.join(words))
        if found is None:
            return None
        unknown = _UNKNOWN.search(expression)
        if unknown is not None:
            raise usage_error(command, f"there is no option {unknown[1]}; see {command} --help")
        if not found.expression:
            raise usage_error(command, "say what to compare, such as loss or net.fc.weight")
        if found.timeout is not None and not found.timeout > 0:
            raise usage_error(command, f"--timeout takes a number of seconds above 0, not {found.timeout:g}")
        from monarch_kernel.debugger.controller.values import diff

        mesh, name = self._meant(found.on, command)
        ranks = args_of.select(command, found.ranks, [], mesh.extent, name)
        limit = {} if found.timeout is None else {"timeout": found.timeout}
        try:
            return diff(
                mesh,
                found.expression,
                ranks=ranks,
                in_frame=found.in_frame or None,
                up=found.up,
                grads=found.grads,
                **limit,
            )
        except ValueError as error:
            raise usage_error(command, str(error)) from None

    def _meant(self, name: str | None, command: str) -> tuple[Any, str]:
        """The proc mesh of that name (or the one in use), or the actors in the variable of that name."""
        if name is not None and name not in self._session.proc_meshes():
            value = self._notebook.shell.user_ns.get(name)
            if isinstance(value, ActorMesh):
                return value, name
        mesh = self._session.find(name, command)
        return mesh, mesh.name


def split_line(line: str) -> tuple[list[str], str]:
    """The options at both ends of a line, as words, and what stands between: an expression, quotes and all."""
    text = line.strip()
    options: list[str] = []
    while match := _LEADING.match(text):
        options += _words(match)
        text = text[match.end() :]
    while match := _TRAILING.search(text):
        options += _words(match)
        text = text[: match.start()].rstrip()
    return options, text


def _words(match: re.Match[str]) -> list[str]:
    return [match[3]] if match[3] else [match[1], match[2]]
