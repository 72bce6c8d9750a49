"""Set, list and clear breakpoints, both for `break` at a prompt and for `%mesh break` in a cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from monarch_kernel.debugger.commands.grammar import BreakLine, CommandError, read_break
from monarch_kernel.debugger.commands.stop_text import columns, file_name
from monarch_kernel.debugger.events import MeshBreakpoint
from monarch_kernel.debugger.frontend import Frontend
from monarch_kernel.debugger.source_locations import Label
from monarch_kernel.meshes import format_ranks, parse_ranks

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger

_T = TypeVar("_T")


def arm(debugger: MeshDebugger, line: str, command: str, frontend: Frontend, shown: str = "") -> MeshBreakpoint:
    """Set the breakpoint that a line describes: `FILE_OR_CELL:LINE` or `--on-error [TYPE]`, and options.

    It parses the line, resolves the names in it with the front end, and then sends the breakpoint to the ranks.

    Args:
        command: the name of the command in error messages.
        frontend: resolves cells, and the mesh in use.
        shown: the file to use for a line number without a file.

    Raises:
        CommandError: it cannot be set; the message says why in one sentence.
    """
    asked = read_break(line, command)
    mesh, ranks = _target(asked, frontend, command)
    if asked.spot is None:
        return _checked(command, partial(debugger.break_on_error, asked.error, mesh=mesh, ranks=ranks))
    file, number = frontend.file(asked.spot, shown, command)
    return _checked(
        command,
        partial(
            debugger.break_at,
            file,
            number,
            mesh=mesh,
            ranks=ranks,
            condition=asked.condition,
            hits=asked.hits,
            first=asked.first,
            differs=asked.differs,
            log=asked.log,
        ),
    )


def _checked(command: str, function: Callable[[], _T]) -> _T:
    try:
        return function()
    except (ValueError, LookupError) as error:
        raise CommandError(f"{command}: {error.args[0] if error.args else error}") from None


def _target(asked: BreakLine, frontend: Frontend, command: str) -> tuple[str | None, tuple[int, ...] | None]:
    """Return the mesh and the ranks that the breakpoint applies to; None for all."""
    if not asked.ranks:
        return asked.mesh, None
    mesh = asked.mesh or frontend.mesh()
    if mesh is None:
        raise CommandError(f"{command}: ranks are of a mesh; say which with --on NAME")
    try:
        return mesh, parse_ranks(asked.ranks, frontend.extent(mesh))
    except (ValueError, TypeError, IndexError) as error:
        raise CommandError(f"{command}: {error.args[0] if error.args else error}") from None


def clear(debugger: MeshDebugger, rest: str, command: str) -> str:
    """Remove the breakpoints with these numbers, or all of them, and return the message for the user.

    Raises:
        CommandError: there is no such breakpoint.
    """
    words = rest.replace(",", " ").split()
    mine = [each for each in debugger.breakpoints() if not each.owner]
    if not words or words == ["all"]:
        if not words and len(mine) > 1:
            raise CommandError(f"{command}: say which: a number, or all")
        for each in mine:
            debugger.clear(each.id)
        return f"{len(mine)} breakpoint{'s' * (len(mine) != 1)} cleared." if mine else "There are no breakpoints."
    for word in words:
        if not word.isdigit():
            raise CommandError(f"{command}: {word!r} is not the number of a breakpoint; give numbers, or all")
        _checked(command, partial(debugger.clear, int(word)))
    return f"Breakpoint{'s' * (len(words) != 1)} {', '.join(words)} cleared."


def listing(debugger: MeshDebugger, label: Label | None = None) -> str:
    """List all breakpoints, one per line, with their states on ranks."""
    found = debugger.breakpoints()
    if not found:
        return "There are no breakpoints."
    return columns([(str(each.id), described(each, label)) for each in found])


def armed_text(made: MeshBreakpoint, label: Label | None = None) -> str:
    """Return the message for the user about a breakpoint that has just been set."""
    return f"Breakpoint {made.id}: {described(made, label)}"


def described(made: MeshBreakpoint, label: Label | None = None) -> str:
    """Describe a breakpoint in one line: location, ranks, condition, and whether it is armed."""
    spec = made.spec
    if spec.error:
        what = "any exception" if spec.error == "*" else spec.error
        parts = [f"where an endpoint or cell fails with {what}"]
    else:
        parts = [f"{file_name(spec.file, label)}:{_line(made)}"]
    if made.mesh is not None or made.ranks is not None:
        mesh = made.mesh or "every mesh"
        parts.append(f"on {mesh}" + (f" {format_ranks(made.ranks, limit=6)}" if made.ranks is not None else ""))
    parts += [f"if {spec.condition}"] if spec.condition else []
    parts += [f"from hit {spec.hits} on"] if spec.hits > 1 else []
    parts += ["the first rank only"] if spec.first else []
    parts += [f"if ranks disagree on {spec.differs}"] if spec.differs else []
    parts += [f"prints {spec.log!r}"] if spec.log else []
    if made.owner:
        parts.append(f"set by {made.owner}")
    text = ", ".join(parts)
    notes = _notes(made)
    return "\n".join([text, *notes])


def _line(made: MeshBreakpoint) -> int:
    """Return the line where it stops, which may have moved to the next line with code."""
    lines = {bound.line for bound in made.bound.values() if bound.verified}
    return lines.pop() if len(lines) == 1 else made.spec.line


def _notes(made: MeshBreakpoint) -> list[str]:
    if made.lost:
        return [made.lost]
    notes: list[str] = []
    line = _line(made)
    if not made.spec.error and line != made.spec.line:
        notes.append(f"line {made.spec.line} has no code; it is at line {line}")
    notes += [f"{mesh}: {why}" for mesh, why in sorted(made.apart.items())]
    alike: dict[str, list[tuple[str, int]]] = {}
    for key, bound in sorted(made.bound.items()):
        if bound.message:
            alike.setdefault(bound.message.rstrip("."), []).append(key)
    for message, keys in alike.items():
        who = "" if len(keys) == len(made.bound) else f"{_who(keys)}: "
        notes.append(f"{who}{message}")
    return notes


def _who(keys: Sequence[tuple[str, int]]) -> str:
    meshes = dict.fromkeys(mesh for mesh, _ in keys)
    return "; ".join(f"{mesh} {format_ranks([rank for m, rank in keys if m == mesh], limit=6)}" for mesh in meshes)
