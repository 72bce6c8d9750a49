"""Parse the arguments of `%mesh` and `%%mesh`. Every mistake is a one-sentence `UsageError` that names the fix.

`parse` is the only parser of these lines. Most lines contain words and options in any order, split like in a shell. An
argument that is an expression or a command is taken verbatim, including its quotes: `text_argument` declares such an
argument and the position of its options. `Subcommands` is the base class of all groups of subcommands.
"""

from __future__ import annotations

import argparse
import difflib
import keyword
import re
import shlex
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, TypeVar, cast

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser, argument

from monarch_kernel.actor import Extent, ProcMesh
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.meshes import format_ranks, parse_ranks

_RANKS = "ranks, such as 0-3,7 or 0:8:2, or dimensions, such as hosts=1,gpus=0-3 (default: all)"
_MESH = "the mesh (default: the one in use)"
_HELP = ("-h", "--help")

Magic = TypeVar("Magic", bound=Callable[..., object])


class Arguments(argparse.Namespace):
    """The arguments of a line, as attributes.

    Attributes:
        magic: the magic as the user writes it: `%mesh up`.
        line: the rest of the line, as typed.
    """

    magic: str
    line: str


class OptionsAt(Enum):
    """The position of options in a line with verbatim text."""

    BEGINNING = auto()
    BOTH_ENDS = auto()
    #: The parser of the text itself finds them.
    WITHIN = auto()


# -- declaring arguments: decorators below `magic_arguments` ------------------------------------------


def ranks_option(text: str = _RANKS) -> Callable[[Magic], Magic]:
    """Declare `-r`, the ranks that a magic acts on; see `Subcommands.addressed`."""
    return argument("-r", "--ranks", metavar="RANKS", help=text)


def mesh_option(text: str = _MESH) -> Callable[[Magic], Magic]:
    """Declare `--on`, the mesh of a magic whose positional arguments are something else."""
    return argument("--on", metavar="NAME", help=text)


def mesh_argument() -> Callable[[Magic], Magic]:
    """Declare the mesh as the only positional argument."""
    return argument("name", nargs="?", metavar="NAME", help=_MESH)


def text_argument(name: str, options: OptionsAt, **how: object) -> Callable[[Magic], Magic]:
    """Declare an argument that is the verbatim line, except for its options."""

    def declare(function: Magic) -> Magic:
        cast("Any", function).text_argument = (name, options)
        return argument(name, **how)(function)

    return declare


def extended_by(extend: Callable[[argparse.ArgumentParser, Sequence[str]], None]) -> Callable[[Magic], Magic]:
    """Declare that further arguments depend on the words of the line; ``extend`` adds them to a parser."""

    def declare(function: Magic) -> Magic:
        cast("Any", function).extend = extend
        return function

    return declare


# -- reading --------------------------------------------------------------------------------------------


def parse(function: Callable[..., object], line: str) -> Arguments | None:
    """Parse `line` with the `magic_arguments` of `function`.

    Returns:
        The arguments, or None if the line asked for help, which has then been printed.
    """
    found = _read(function, line)
    if found is None:
        print(help_text(function, without_comment(line).split()))
    return found


def peek(function: Callable[..., object], line: str) -> Arguments | None:
    """`parse` for an unfinished line: return None if it asks for help, or is not valid so far."""
    try:
        return _read(function, line)
    except UsageError:
        return None


def _read(function: Callable[..., object], line: str) -> Arguments | None:
    parser, command = parser_of(function), command_of(function)
    declared: tuple[str, OptionsAt] | None = getattr(function, "text_argument", None)
    text = ""
    if declared is None:
        try:
            words = shlex.split(without_comment(line))
        except ValueError:
            raise usage_error(command, f"a quote is opened and never closed in {line.strip()!r}") from None
    else:
        words, text = _split(parser, line, declared[1])
    if any(word in _HELP for word in words):
        return None
    parser = parser_for(function, words)
    found = Arguments(magic=command, line=line.strip())
    try:
        _, unknown = parser.parse_known_args(words, found)
    except UsageError as error:
        raise usage_error(command, f"{_plain(str(error))}; see {command} --help") from None
    if unknown:
        raise usage_error(command, f"{_unknown(parser, unknown)}; see {command} --help")
    if declared is not None:
        _check_text(parser, text, declared[1], command)
        setattr(found, declared[0], text)
    return found


def _split(parser: argparse.ArgumentParser, line: str, options: OptionsAt) -> tuple[list[str], str]:
    """Split a line into its options, as words, and its verbatim text."""
    text = line.strip()
    if options is OptionsAt.WITHIN:
        return (["--help"], "") if text.split(None, 1)[:1] in [[word] for word in _HELP] else ([], text)
    actions = [(option, action.nargs) for action in parser._actions for option in action.option_strings]
    with_value = "|".join(option for option, nargs in actions if nargs not in (0, "?"))
    flags = "|".join([*(option for option, nargs in actions if nargs in (0, "?")), *_HELP])
    may_have_value = "|".join(option for option, nargs in actions if nargs == "?") or "(?!)"
    option = rf"(?:({with_value}|{may_have_value}(?=(?:\s+|=)[^-\s]))(?:\s+|=)(\S+)|({flags}))"
    words: list[str] = []
    while match := re.match(rf"{option}(?:\s+|$)", text):
        words += _words(match)
        text = text[match.end() :]
    while options is OptionsAt.BOTH_ENDS and (match := re.search(rf"(?:^|\s){option}$", text)):
        words += _words(match)
        text = text[: match.start()].rstrip()
    return words, text


def _words(match: re.Match[str]) -> list[str]:
    return [match[3]] if match[3] else [match[1], match[2]]


def _check_text(parser: argparse.ArgumentParser, text: str, options: OptionsAt, command: str) -> None:
    """Raise UsageError if the text contains an option that is unknown, or lacks its value."""
    if options is OptionsAt.BEGINNING and text.startswith("-"):
        option = re.split(r"[\s=]", text, maxsplit=1)[0]
        if any(option in action.option_strings for action in parser._actions):
            raise usage_error(command, f"{option} takes a value; see {command} --help")
        raise usage_error(command, f"there is no option {option}; see {command} --help")
    unknown = re.search(r"(?:^|\s)(--[A-Za-z][\w-]*)", text) if options is OptionsAt.BOTH_ENDS else None
    if unknown is not None:
        raise usage_error(command, f"there is no option {unknown[1]}; see {command} --help")


def without_comment(line: str) -> str:
    """Return `line` up to the first `#` that begins a word outside quotes."""
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def _plain(message: str) -> str:
    match = re.fullmatch(r"argument ([^:]+): invalid (\w+) value: (.*)", message)
    if match:
        what = {"int": "a whole number", "float": "a number"}.get(match[2], f"a {match[2]}")
        return f"{match[1]} takes {what}, not {match[3]}"
    return re.sub(r"^argument ([^:]+): ", r"\1 ", message)


def _unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    word = words[0]
    if not word.startswith("-"):
        return f"there is one argument too many: {word!r}"
    known = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(word.split("=")[0], known, n=1)
    return f"there is no option {word}" + (f", did you mean {near[0]}?" if near else "")


# -- help -----------------------------------------------------------------------------------------------


def parser_of(function: Callable[..., object]) -> argparse.ArgumentParser:
    """Return the parser that `magic_arguments` builds from the declared arguments."""
    return cast("Any", function).parser


def parser_for(function: Callable[..., object], words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a line with these words, which may declare further arguments (``extended_by``)."""
    parser, extend = parser_of(function), getattr(function, "extend", None)
    if extend is None:
        return parser
    made = MagicArgumentParser(prog=parser.prog, description=parser.description, parents=[parser])
    made.formatter_class = parser.formatter_class
    extend(made, words)
    return made


def command_of(function: Callable[..., object]) -> str:
    """Return the command of a `magic_arguments` function, as the user writes it."""
    return f"%{parser_of(function).prog}"


def help_text(function: Callable[..., object], words: Sequence[str] = ()) -> str:
    """Return the help of one command, as `--help` prints it in a line with these words."""
    parser: Any = parser_for(function, words)
    parser.color = False  # Python 3.14 would use colours in a notebook
    return parser.format_help().replace("::\n\n  %", "usage: %", 1).rstrip()


def summary(function: Callable[..., object]) -> str:
    """Return the first line of a command's description."""
    return (parser_of(function).description or "").strip().split("\n", 1)[0].rstrip(".")


# -- values --------------------------------------------------------------------------------------------


def check_name(command: str, name: str, what: str = "mesh") -> str:
    """Return `name` if it is a valid name.

    Raises:
        UsageError: the name is invalid.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise usage_error(command, f"{name!r} cannot name a {what}; use letters, digits and _, such as 'trainers'")
    return name


def select(command: str, ranks: str | None, where: Sequence[str], extent: Extent, mesh: str) -> tuple[int, ...]:
    """Return the ranks that `-r` or `--where` selects; all ranks without either."""
    if ranks is not None and where:
        raise usage_error(command, "give either -r or --where, not both")
    text = ",".join(where) if where else ranks
    if where and any("=" not in part for part in where):
        wrong = next(part for part in where if "=" not in part)
        example = f"{extent.names[0] if extent.names else 'gpus'}=0:2"
        raise usage_error(command, f"--where takes dim=slice, such as {example}, not {wrong!r}")
    if text is None:
        return tuple(range(extent.nelements))
    try:
        return parse_ranks(text, extent)
    except (ValueError, TypeError, IndexError) as error:
        sizes = ", ".join(f"{label}={size}" for label, size in extent.items()) or "one rank"
        said = str(error.args[0] if error.args else error).rstrip(".")
        raise usage_error(command, f"{said} (mesh {mesh} has {sizes})") from None


_PREFIX = "mesh "


class Subcommands:
    """A group of subcommands. Each method with `magic_arguments("mesh NAME")` is one; it receives the parsed line.

    Args:
        notebook: the notebook of the subcommands.
        say: called with each text for the user; by default, the cell prints it.
        name: the name of the caller, shown to other viewers of the debugger.
    """

    def __init__(
        self, notebook: Notebook, say: Callable[[str], object] = print, name: str = "a cell of the notebook"
    ) -> None:
        self._notebook = notebook
        self._session = notebook.session
        self.say = say
        self.name = name

    @classmethod
    def functions(cls) -> dict[str, Callable[..., object]]:
        """Return the subcommands by name."""
        found = ((getattr(each, "parser", None), each) for each in vars(cls).values())
        return {parser.prog.removeprefix(_PREFIX): each for parser, each in found if parser is not None}

    def addressed(self, found: Arguments) -> tuple[ProcMesh, tuple[int, ...]]:
        """Return the mesh on the line, or the one in use, and its ranks that `-r` selects."""
        mesh = self._session.find(found.name, found.magic)
        return mesh, select(found.magic, found.ranks, [], mesh.extent, mesh.name)


def listed(ranks: Sequence[int]) -> str:
    """Format ranks as a short text."""
    return format_ranks(ranks, limit=6)
