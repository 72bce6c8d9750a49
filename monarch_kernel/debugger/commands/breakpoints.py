"""Setting, listing and clearing breakpoints: the same for `break` at a prompt and for `%mesh break` in a cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_kernel.debugger.commands import frontend
from monarch_kernel.debugger.commands.grammar import BREAK_OPTIONS, CommandError, read_spot, split_options
from monarch_kernel.debugger.commands.stop_text import Label, columns, file_name
from monarch_kernel.meshes import format_ranks, parse_ranks


def arm(debugger: Any, line: str, command: str, shown: str = "") -> Any:
    """Set the breakpoint that a line describes: `FILE_OR_CELL:LINE` or `--on-error [TYPE]`, and options.

    Args:
        command: how errors call the command.
        shown: the file that a line without one is in.

    Raises:
        CommandError: it cannot be set; says why in one sentence.
    """
    where, options = split_options(line, BREAK_OPTIONS, command)
    mesh, ranks = _addressed(options, command)
    if "--on-error" in options:
        extra = [option for option in options if option not in ("--on-error", "--on", "-r", "--ranks")]
        if where or extra:
            what = extra[0] if extra else where
            raise CommandError(f"{command}: --on-error goes with -r and --on only, not with {what}")
        return _checked(command, debugger.break_on_error, options["--on-error"] or "*", mesh=mesh, ranks=ranks)
    if not where:
        raise CommandError(f"{command}: say where: FILE:LINE, 5:LINE for a cell, :LINE for the last %%mesh cell")
    if " " in where and not where.startswith(("'", '"', "In", "Cell")):
        raise CommandError(f"{command}: {where!r} is more than one place; a condition follows --if")
    spot = read_spot(where, command)
    file, number = frontend.current().file(spot, shown, command)
    return _checked(
        command,
        debugger.break_at,
        file,
        number,
        mesh=mesh,
        ranks=ranks,
        condition=options.get("--if", ""),
        hits=_hits(options, command),
        first="--first" in options,
        differs=options.get("--when-differs", ""),
        log=options.get("--log", ""),
    )


def _checked(command: str, function: Any, *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except (ValueError, LookupError) as error:
        raise CommandError(f"{command}: {error.args[0] if error.args else error}") from None


def _addressed(options: dict[str, str], command: str) -> tuple[str | None, tuple[int, ...] | None]:
    mesh = options.get("--on")
    text = options.get("-r") or options.get("--ranks")
    if text is None:
        return mesh, None
    around = frontend.current()
    mesh = mesh or around.mesh()
    if mesh is None:
        raise CommandError(f"{command}: ranks are of a mesh; say which with --on NAME")
    try:
        return mesh, parse_ranks(text, around.extent(mesh))
    except (ValueError, TypeError, IndexError) as error:
        raise CommandError(f"{command}: {error.args[0] if error.args else error}") from None


def _hits(options: dict[str, str], command: str) -> int:
    text = options.get("--hits", "0")
    if not text.isdigit():
        raise CommandError(f"{command}: --hits takes a whole number, not {text!r}")
    return int(text)


def clear(debugger: Any, rest: str, command: str) -> str:
    """Remove the breakpoints with these numbers, or all; what to say about it.

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
            raise CommandError(f"{command}: {word!r} is no number of a breakpoint; give numbers, or all")
        _checked(command, debugger.clear, int(word))
    return f"Breakpoint{'s' * (len(words) != 1)} {', '.join(words)} cleared."


def listing(debugger: Any, label: Label | None = None) -> str:
    """All breakpoints, one on a line, with what has become of them."""
    found = debugger.breakpoints()
    if not found:
        return "There are no breakpoints."
    return columns([(str(each.id), described(each, label)) for each in found])


def armed_text(made: Any, label: Label | None = None) -> str:
    """What to say of a breakpoint that has just been set."""
    return f"Breakpoint {made.id}: {described(made, label)}"


def described(made: Any, label: Label | None = None) -> str:
    """A breakpoint in one line: where, on which ranks, under which condition, and whether it is in place."""
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


def _line(made: Any) -> int:
    """The line where it stops: it may have moved to the next one with code."""
    lines = {bound.line for bound in made.bound.values() if bound.verified}
    return int(lines.pop()) if len(lines) == 1 else int(made.spec.line)


def _notes(made: Any) -> list[str]:
    notes: list[str] = []
    line = _line(made)
    if not made.spec.error and line != made.spec.line:
        notes.append(f"line {made.spec.line} has no code; it is at line {line}")
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
