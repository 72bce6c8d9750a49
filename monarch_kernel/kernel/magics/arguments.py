"""Reading what stands after `%mesh` and `%%mesh`; every mistake is one `UsageError` that says what would be right."""

from __future__ import annotations

import argparse
import difflib
import keyword
import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from IPython.core.error import UsageError

from monarch_kernel.actor import Extent
from monarch_kernel.meshes import parse_ranks

#: More processes than this on one host are taken for a mistake.
MOST_PROCS = 1024
#: What `--procs N` calls its one dimension.
DEFAULT_DIM = "gpus"
DEFAULT_NAME = "m"
#: How long a kept mesh stays without a kernel (hours).
DEFAULT_IDLE = 12


def usage_error(command: str, message: str) -> UsageError:
    """The error of one command, as one sentence with where to read on."""
    return UsageError(f"{command}: {message}")


def parse(function: Any, line: str) -> argparse.Namespace | None:
    """Parse `line` with the `magic_arguments` of `function`.

    Returns:
        The arguments, or None if the line asked for help, which has then been printed.
    """
    parser: argparse.ArgumentParser = function.parser
    command = command_of(function)
    try:
        words = shlex.split(without_comment(line))
    except ValueError:
        raise usage_error(command, f"a quote is opened and never closed in {line.strip()!r}") from None
    if "--help" in words or "-h" in words:
        print(help_text(function))
        return None
    try:
        arguments, unknown = parser.parse_known_args(words)
    except UsageError as error:
        raise usage_error(command, f"{_plain(str(error))}; see {command} --help") from None
    if unknown:
        raise usage_error(command, f"{_unknown(parser, unknown)}; see {command} --help")
    return arguments


def without_comment(line: str) -> str:
    """`line` up to a `#` that begins a word outside of quotes."""
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def command_of(function: Any) -> str:
    """How the user writes the command of a `magic_arguments` function."""
    return f"%{function.parser.prog}"


def help_text(function: Any) -> str:
    """The help of one command, as `--help` prints it."""
    text: str = function.parser.format_help()
    return text.replace("::\n\n  %", "usage: %", 1).rstrip()


def summary(function: Any) -> str:
    """The first line of a command's description."""
    return (function.parser.description or "").strip().split("\n", 1)[0].rstrip(".")


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


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing where nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def check_name(command: str, name: str, what: str = "mesh") -> str:
    """`name`, if it can be a name."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise usage_error(command, f"{name!r} cannot name a {what}; use letters, digits and _, such as 'trainers'")
    return name


def up_arguments(command: str, words: Sequence[str], procs: int | None) -> tuple[str, dict[str, int]]:
    """The name and the dimensions of `up [NAME] --procs N | dim=size ...`."""
    names = [word for word in words if "=" not in word]
    dims = dict(_dimension(command, word) for word in words if "=" in word)
    if len(names) > 1:
        hint = f"; did you mean --procs {names[-1]}?" if names[-1].isdigit() else ""
        raise usage_error(command, f"give one name, not {' and '.join(map(repr, names))}{hint}")
    if names and names[0].isdigit():
        raise usage_error(command, f"{names[0]!r} is no name; for that many processes write --procs {names[0]}")
    name = check_name(command, names[0]) if names else DEFAULT_NAME
    if len(dims) != sum("=" in word for word in words):
        raise usage_error(command, f"a dimension is given twice in {' '.join(words)!r}")
    if procs is not None and dims:
        raise usage_error(command, "give either --procs or dimensions, not both")
    if procs is not None:
        dims = {DEFAULT_DIM: _size(command, "--procs", procs)}
    if not dims:
        raise usage_error(command, f"say how many processes: --procs 4, or dimensions such as {DEFAULT_DIM}=4")
    total = 1
    for size in dims.values():
        total *= size
    if total > MOST_PROCS:
        raise usage_error(command, f"{total} processes are too many for one host; at most {MOST_PROCS} are started")
    return name, dims


def _dimension(command: str, word: str) -> tuple[str, int]:
    label, _, size = word.partition("=")
    if not label.isidentifier():
        raise usage_error(command, f"{label!r} cannot name a dimension; write for example {DEFAULT_DIM}=4")
    try:
        return label, _size(command, label, int(size))
    except ValueError:
        raise usage_error(command, f"{label} must be a whole number of at least 1, not {size!r}") from None


def _size(command: str, what: str, size: int) -> int:
    if size < 1:
        raise usage_error(command, f"{what} must be at least 1, not {size}")
    return size


def idle_argument(command: str, hours: float | None, keep: bool) -> float:
    """The seconds of `--idle HOURS`."""
    if hours is not None and not keep:
        raise usage_error(command, "--idle is for a mesh that is kept: give --keep, too")
    if hours is None:
        return DEFAULT_IDLE * 3600
    if not hours > 0:
        raise usage_error(command, f"--idle takes a number of hours above 0, not {hours:g}")
    return hours * 3600


def env_arguments(command: str, items: Sequence[str]) -> dict[str, str]:
    """The variables of repeated `--env K=V`."""
    env: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise usage_error(command, f"--env takes NAME=VALUE, not {item!r}")
        env[key] = value
    return env


def select(command: str, ranks: str | None, where: Sequence[str], extent: Extent, mesh: str) -> tuple[int, ...]:
    """The ranks that `-r` or `--where` name; all of them without either."""
    if ranks is not None and where:
        raise usage_error(command, "give either -r or --where, not both")
    text = ",".join(where) if where else ranks
    if where and any("=" not in part for part in where):
        wrong = next(part for part in where if "=" not in part)
        raise usage_error(command, f"--where takes dim=slice, such as {_example(extent)}, not {wrong!r}")
    if text is None:
        return tuple(range(extent.nelements))
    try:
        return parse_ranks(text, extent)
    except (ValueError, TypeError, IndexError) as error:
        sizes = ", ".join(f"{label}={size}" for label, size in extent.items()) or "one rank"
        raise usage_error(command, f"{_sentence(error)} (mesh {mesh} has {sizes})") from None


def _example(extent: Extent) -> str:
    return f"{extent.names[0] if extent.names else DEFAULT_DIM}=0:2"


def _sentence(error: BaseException) -> str:
    return str(error.args[0] if error.args else error).rstrip(".")


def boxed(ranks: Sequence[int], extent: Extent) -> dict[str, slice] | None:
    """`ranks` (sorted) as slices of every dimension; None if they do not form such a box."""
    slices: dict[str, slice] = {}
    count = 1
    for label, size, stride in zip(extent.names, extent.shape, extent.strides, strict=True):
        coords = sorted({rank // stride % size for rank in ranks})
        steps = {later - earlier for earlier, later in pairwise(coords)}
        if len(steps) > 1:
            return None
        slices[label] = slice(coords[0], coords[-1] + 1, steps.pop() if steps else 1)
        count *= len(coords)
    return slices if count == len(ranks) else None


def runs(ranks: Sequence[int]) -> list[slice]:
    """`ranks` (sorted) as slices of a flat mesh, few of them."""
    found: list[slice] = []
    at = 0
    while at < len(ranks):
        end = at + 1
        step = ranks[end] - ranks[at] if end < len(ranks) else 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at == 2 and step > 1:  # two ranks far apart are the end of one run, and the beginning of another
            end, step = at + 1, 1
        found.append(slice(ranks[at], ranks[end - 1] + 1, step))
        at = end
    return found
