"""Parse command lines: commands, options that take expressions, and locations in files and cells. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class CommandError(ValueError):
    """A command cannot be executed; the message is one sentence for the user at the prompt."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the console.

    Attributes:
        name: its full name.
        aliases: its other names.
        usage: its arguments, as the help shows them.
        help: what it does, in one line.
        steps: whether it moves stopped threads; an empty line then repeats it.
    """

    name: str
    aliases: tuple[str, ...]
    usage: str
    help: str
    steps: bool = False


#: Every command, in the order of the help.
COMMANDS: tuple[Command, ...] = (
    Command("where", ("w", "bt"), "[all]", "the stack of the ranks in the set; all: with runtime and library frames"),
    Command("up", ("u",), "[N]", "look at the caller's frame"),
    Command("down", ("d",), "[N]", "back toward the innermost frame"),
    Command("print", ("p", "pp"), "EXPR", "evaluate on every rank of the set; identical answers stand together"),
    Command("locals", (), "[NAME ...]", "the local variables of the frame"),
    Command("source", ("l", "ll"), "[N]", "the source around the current line"),
    Command("next", ("n",), "", "to the next line of this function", steps=True),
    Command("step", ("s",), "", "to the next line, into calls", steps=True),
    Command("out", ("return", "r", "finish"), "", "until this function has returned", steps=True),
    Command("until", ("unt",), "[LINE]", "until a line below this one, or LINE, is reached", steps=True),
    Command("continue", ("c", "cont"), "", "let the set run"),
    Command("pause", (), "[RANKS]", "stop running ranks at their next line"),
    Command("unpause", (), "[RANKS]", "let ranks run that pause has not stopped yet"),
    Command("groups", ("g",), "", "which ranks are stopped where"),
    Command("group", (), "N", "choose one of those groups"),
    Command("ranks", ("rank",), "RANKS", "choose ranks: 0-3,7, 0:8:2, hosts=1, or 3.12 for one of a rank's stops"),
    Command("mesh", (), "NAME", "choose a mesh, where several have stopped ranks"),
    Command("all", (), "", "choose all stopped ranks"),
    Command("break", ("b",), "[FILE_OR_CELL:LINE | LINE] [OPTIONS]", "set a breakpoint, or list them; see help break"),
    Command("clear", ("cl",), "[N ... | all]", "remove breakpoints"),
    Command("pm", (), "[NAME | RANKS]", "open the frames of the last failure, or of an earlier one by its name"),
    Command("diff", (), "EXPR", "compare a value over the set: tensors, modules and containers, without moving them"),
    Command("stacks", (), "[RANKS]", "what all ranks of the mesh are doing, stopped or not"),
    Command("hang", (), "", "why the mesh makes no progress"),
    Command("list", (), "", "all stopped ranks; the source, if one rank is attached"),
    Command("attach", (), "NAME RANK", "choose one rank, by the name of a mesh or an actor mesh"),
    Command("detach", (), "", "leave the attached rank; without one, leave the prompt"),
    Command("cast", (), "NAME ranks(RANKS) COMMAND", "one command on these ranks, with its output"),
    Command("drive", (), "[--force]", "take control of stopped ranks; --force takes it from another viewer"),
    Command("quit", ("q", "exit"), "", "leave the prompt; stopped ranks stay stopped"),
    Command("help", ("h", "?"), "[COMMAND]", "this list, or more about one command"),
)

#: The text that must follow the word `rank` for it to be a command.
_SOME_RANKS = re.compile(r"\s+(\d|[a-zA-Z_]\w*=(?!=))")

_BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}

BREAK_HELP = """\
break FILE_OR_CELL:LINE  a path, 5:3 or In[5]:3 for line 3 of the cell with that number, :3 for the last %%mesh cell
break LINE               a line of the file that is shown
break --on-error [TYPE]  where an endpoint or a cell fails with that exception; any without TYPE
  -r RANKS               only on these ranks
  --on MESH              only on this mesh (default: all, later ones too)
  --if EXPR              only where EXPR is true
  --hits N               from the Nth hit on
  --first                only the first rank that gets there stops
  --when-differs EXPR    only if ranks disagree on EXPR
  --log TEXT             print TEXT instead of stopping; {EXPR} in it is evaluated"""


def read_command(line: str) -> tuple[Command | None, str]:
    """The command at the beginning of a line, and the rest of the line.

    As in pdb, a line that does not begin with a command is Python, and so is an assignment to the name of a command.
    The command is then None, and the rest is the source. `!SOURCE` is always Python. `rank` is Python unless ranks
    follow it.
    """
    text = line.strip()
    if text.startswith("!"):
        return None, text[1:].strip()
    match = re.match(r"[a-zA-Z_]+|\?", text)
    command = _BY_NAME.get(match[0]) if match else None
    if match is None or command is None:
        return None, text
    rest = text[match.end() :]
    if match[0] == "rank" and not _SOME_RANKS.match(rest):
        return None, text  # many programs have a variable of this name
    if (rest and not rest[0].isspace()) or re.match(r"\s*(?:[-+*/%&|^@]|//|\*\*|<<|>>)?=(?!=)", rest):
        return None, text  # print(x), next.y, list = 3
    return command, rest.strip()


def help_of(name: str) -> str:
    """The output of `help NAME`.

    Raises:
        CommandError: there is no such command.
    """
    if not name:
        width = max(len(f"{command.name} {command.usage}") for command in COMMANDS if len(command.usage) < 20)
        lines: list[str] = []
        for command in COMMANDS:
            usage = f"{command.name} {command.usage}".strip()
            short = f" ({', '.join(command.aliases)})" if command.aliases else ""
            if len(usage) > width:
                lines.append(f"  {usage}")
                usage = ""
            lines.append(f"  {usage:<{width}}  {command.help}{short}")
        return "\n".join([*lines, "Anything else is Python, evaluated on every rank of the set; so is !SOURCE."])
    command = _BY_NAME.get(name)
    if command is None:
        raise CommandError(f"there is no command {name!r}; help lists them")
    if command.name == "break":
        return BREAK_HELP
    short = f" (short: {', '.join(command.aliases)})" if command.aliases else ""
    return f"{command.name} {command.usage}".strip() + f"{short}\n  {command.help}"


def complete(before: str, names: Iterable[str] = ()) -> list[str]:
    """Return the words that may complete the line `before`: commands first, then `names`."""
    words = before.split(" ")
    word = words[-1]
    if len(words) == 1:
        return sorted(command.name for command in COMMANDS if command.name.startswith(word))
    command = _BY_NAME.get(words[0])
    if command is not None and command.name == "break":
        return [option for option in BREAK_OPTIONS if option.startswith("--") and option.startswith(word)]
    if command is not None and command.name == "help":
        return sorted(one.name for one in COMMANDS if one.name.startswith(word))
    return sorted(name for name in set(names) if name.startswith(word))


# -- options whose values are expressions ----------------------------------------------------------

#: Options of `break`, and the value of each: none, a word, or text up to the next option.
BREAK_OPTIONS: Mapping[str, str] = {
    "-r": "word",
    "--ranks": "word",
    "--on": "word",
    "--if": "text",
    "--hits": "word",
    "--first": "",
    "--when-differs": "text",
    "--log": "text",
    "--on-error": "maybe",
}


def split_options(line: str, known: Mapping[str, str], command: str) -> tuple[str, dict[str, str]]:
    """Split a line into the text before its options, and the value of each option.

    Expressions may be unquoted (`--if x["a"] > 3 --hits 2`), or in quotes as in a shell.

    Args:
        line: the line, without the command.
        known: the options, and the value of each: "" (none), "word", "text" (up to the next option), "maybe" (a word
            or none).
        command: the name of the command in error messages.

    Raises:
        CommandError: an option is unknown, lacks its value, or is given twice.
    """
    starts = [at for at in _word_starts(line) if re.match(r"--?[a-zA-Z]", line[at:])]
    cuts: list[tuple[int, str]] = []
    for at in starts:
        option = re.split(r"[\s=]", line[at:], maxsplit=1)[0]
        if option in known:
            cuts.append((at, option))
        elif not cuts or known[cuts[-1][1]] != "text":
            raise CommandError(f"{command}: there is no option {option}")
    found: dict[str, str] = {}
    before = line[: cuts[0][0]].strip() if cuts else line.strip()
    for index, (at, option) in enumerate(cuts):
        end = cuts[index + 1][0] if index + 1 < len(cuts) else len(line)
        value = line[at + len(option) : end].strip().removeprefix("=").strip()
        kind = known[option]
        if option in found:
            raise CommandError(f"{command}: {option} is given twice")
        if kind in ("word", "text") and not value:
            raise CommandError(f"{command}: {option} takes a value")
        if kind != "text":  # text after the option's own word belongs to the front: `break --first train.py:3`
            word, _, rest = ("", "", value) if kind == "" else value.partition(" ")
            value, before = word, f"{before} {rest.strip()}".strip()
        found[option] = unquoted(value)
    return before, found


def _word_starts(line: str) -> list[int]:
    """Return the positions at which words begin, outside quotes and brackets."""
    starts: list[int] = []
    quote, depth = "", 0
    for at, char in enumerate(line):
        if quote:
            if char == quote and line[at - 1] != "\\":
                quote = ""
            continue
        if (at == 0 or line[at - 1].isspace()) and not char.isspace() and depth == 0:
            starts.append(at)
        if char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth = max(0, depth - 1)
    return starts


def unquoted(text: str) -> str:
    """Remove the quotes around `text` if it is one string literal."""
    if text[:1] in ("'", '"'):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
        if isinstance(value, str):
            return value
    return text


# -- places ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spot:
    """A source location as the user writes it.

    Attributes:
        file: a path; "" for a cell or for the file that is shown.
        cell: the execution number of a cell; 0 for the last `%%mesh` cell; None for a file.
        line: 1-based.
    """

    file: str
    cell: int | None
    line: int


def read_spot(text: str, command: str = "break") -> Spot:
    """Read `FILE:LINE`, `5:LINE`, `In[5]:LINE`, `:LINE` or `LINE`.

    Raises:
        CommandError: it is none of these.
    """
    text = unquoted(text.strip())
    what, colon, number = text.rpartition(":")
    if not number.strip().isdigit() or int(number) < 1:
        raise CommandError(
            f"{command}: {text!r} names no line; write FILE:LINE, 5:LINE or In[5]:LINE for a cell, :LINE for the last "
            "%%mesh cell"
        )
    line = int(number)
    what = what.strip()
    if not colon:
        return Spot("", None, line)
    if not what:
        return Spot("", 0, line)
    match = re.fullmatch(r"(?:Cell\s+)?In\s*\[\s*(\d+)\s*\]|(\d+)", what)
    if match:
        return Spot("", int(match[1] or match[2]), line)
    return Spot(what, None, line)


@dataclass(frozen=True, slots=True)
class BreakLine:
    """A breakpoint as the user writes it.

    Attributes:
        spot: the location; None for an error.
        error: the name of an exception, or "*" for any, if `spot` is None.
        mesh: the name of the only mesh that it applies to; None if it names none.
        ranks: the only ranks that it applies to, as text; "" if it names none.
        condition, hits, first, differs, log: as in `model.stops.Breakpoint`.
    """

    spot: Spot | None
    error: str
    mesh: str | None
    ranks: str
    condition: str
    hits: int
    first: bool
    differs: str
    log: str


def read_break(line: str, command: str = "break") -> BreakLine:
    """Read `FILE_OR_CELL:LINE` or `--on-error [TYPE]`, and options.

    Raises:
        CommandError: it does not have this form.
    """
    where, options = split_options(line, BREAK_OPTIONS, command)
    hits = options.get("--hits", "0")
    if not hits.isdigit():
        raise CommandError(f"{command}: --hits takes a whole number, not {hits!r}")
    spot = None
    if "--on-error" in options:
        extra = [option for option in options if option not in ("--on-error", "--on", "-r", "--ranks")]
        if where or extra:
            what = extra[0] if extra else where
            raise CommandError(f"{command}: --on-error goes with -r and --on only, not with {what}")
    elif not where:
        raise CommandError(f"{command}: say where: FILE:LINE, 5:LINE for a cell, :LINE for the last %%mesh cell")
    elif " " in where and not where.startswith(("'", '"', "In", "Cell")):
        raise CommandError(f"{command}: {where!r} is more than one place; a condition follows --if")
    else:
        spot = read_spot(where, command)
    return BreakLine(
        spot,
        error=options.get("--on-error") or "*",
        mesh=options.get("--on"),
        ranks=options.get("-r") or options.get("--ranks", ""),
        condition=options.get("--if", ""),
        hits=int(hits),
        first="--first" in options,
        differs=options.get("--when-differs", ""),
        log=options.get("--log", ""),
    )


_CAST = re.compile(r"(?P<name>\S+)\s+ranks\s*\((?P<ranks>[^()]*)\)\s*(?P<command>.*)", re.DOTALL)


def read_cast(rest: str) -> tuple[str, str, str]:
    """Read the three parts of `NAME ranks(RANKS) COMMAND`.

    Raises:
        CommandError: it does not have this form.
    """
    match = _CAST.fullmatch(rest.strip())
    if not match or not match["command"].strip():
        raise CommandError(
            "cast: write cast NAME ranks(RANKS) COMMAND, with RANKS such as 1 or 1,4 or 0:8:2 or dim=0:4"
        )
    return match["name"], match["ranks"].strip(), match["command"].strip()


def read_count(rest: str, command: str, default: int = 1) -> int:
    """Parse a whole number of at least 1; return the default if there is no text.

    Raises:
        CommandError: it is not such a number.
    """
    if not rest:
        return default
    if not rest.isdigit() or int(rest) < 1:
        raise CommandError(f"{command}: {rest!r} is no whole number of at least 1")
    return int(rest)
