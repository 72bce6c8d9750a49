"""Generate reference pages from the code: the magics and commands from their parsers, the API from its façades.

The parsers are the ones that parse a user's line, so a page cannot name an option that does not exist. The API pages
name what each façade exports; mkdocstrings reads signatures and docstrings from the sources without importing them.
"""

from __future__ import annotations

import argparse
import html
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from monarch_kernel import __main__ as command_line
from monarch_kernel.aliases import origins_of
from monarch_kernel.kernel.magics import arguments
from monarch_kernel.kernel.magics.dispatch import FUNCTIONS, TOPICS
from monarch_kernel.kernel.magics.mesh_magics import MeshMagics
from monarch_kernel.watch.metrics import Counters, families
from monarch_kernel.watch.model import Snapshot

ROOT = Path(__file__).resolve().parent.parent
#: Page of each façade that has one, and the subject of the page.
FACADES = {
    "monarch_kernel.actor": "hosts, procs and actors as meshes; endpoints, ports, futures and values",
    "monarch_kernel.meshes": "the meshes of a notebook or script by name; kept meshes; selections of ranks",
    "monarch_kernel.tensor": "torch operations on the ranks of a mesh",
    "monarch_kernel.spmd": "process groups and programs over a mesh",
    "monarch_kernel.rdma": "memory of other processes, read and written directly",
    "monarch_kernel.debug": "stacks, differences, hangs, stragglers, breakpoints and stopped ranks",
    "monarch_kernel.job": "hosts from providers",
    "monarch_kernel.launchers.base": "the interface between jobs and providers of hosts",
    "monarch_kernel.workers": "worker processes: their life cycle",
    "monarch_kernel.config": "settings of a process",
    "monarch_kernel.errors": "all exceptions",
    "monarch_kernel.fetch": "values of ranks",
    "monarch_kernel.numerics": "recordings of training steps, comparisons, rules, captures and replays",
    "monarch_kernel.memory": "memory of tensors on ranks",
    "monarch_kernel.profiler": "profiles of tensor programs",
    "monarch_kernel.random": "random number generators of ranks",
    "monarch_kernel.remotemount": "folders of this machine on hosts",
    "monarch_kernel.gather_mount": "folders of hosts on this machine",
}


@dataclass(frozen=True)
class GeneratedPage:
    """A page that stands in no file.

    Attributes:
        path: its path below ``docs/``.
        title: its title in the navigation.
        subject: one line on its content, for the list of pages.
        text: its Markdown.
    """

    path: str
    title: str
    subject: str
    text: str


def reference_pages() -> list[GeneratedPage]:
    """Return all generated reference pages."""
    return [magics_page(), commands_page(), metrics_page(), *api_pages()]


# -- magics and commands ----------------------------------------------------------------------------------------


def magics_page() -> GeneratedPage:
    """Return the page of all magics and their options."""
    run_cell = cast("Callable[..., object]", MeshMagics.mesh_cell)
    parts = [
        "# Options of all magics",
        "Each magic with its options, from the parser of the magic itself. [magics.md](magics.md) shows how they are "
        "used. `%mesh NAME --help` prints the same in a notebook.",
        "## %%mesh",
        _explained(arguments.parser_of(run_cell), "%%mesh [OPTIONS] [NAME]"),
    ]
    for topic, words in TOPICS.items():
        for word in words:
            parser = arguments.parser_of(FUNCTIONS[word])
            parts += [f"## %mesh {word}", f"*Topic: {topic}.*", _explained(parser, _usage_of_magic(word))]
    text = "\n\n".join(parts) + "\n"
    return GeneratedPage("magic_options.md", "Options of all magics", "every `%mesh` command and its options", text)


def commands_page() -> GeneratedPage:
    """Return the page of all commands of ``monarch-kernel``."""
    parts = [
        "# Commands of monarch-kernel",
        "Each command with its options, from the parser of the command itself. "
        "`monarch-kernel NAME --help` prints the same.",
    ]
    for name, command in command_line._COMMANDS.items():
        parser = command_line.command_parser(name)
        assert parser is not None
        parser.description = parser.description or _sentence(command.help.replace("%%", "%"))
        parts += [f"## monarch-kernel {name}", _explained(parser, _usage(parser))]
        for sub, action in _subcommands(parser):
            parts += [f"### monarch-kernel {name} {sub}", _explained(action, _usage(action))]
    text = "\n\n".join(parts) + "\n"
    return GeneratedPage("commands.md", "Commands", "every command of `monarch-kernel` and its options", text)


def _subcommands(parser: argparse.ArgumentParser) -> Iterable[tuple[str, argparse.ArgumentParser]]:
    """Yield the subcommands of a command, each once."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            known: dict[str, argparse.ArgumentParser] = action.choices
            yield from {id(each): (name, each) for name, each in reversed(known.items())}.values()


def _usage(parser: argparse.ArgumentParser) -> str:
    usage = parser.format_usage().removeprefix("usage: ")
    return re.sub(r"\n {2,}(?!monarch-kernel)", " ", usage).strip()


def _usage_of_magic(word: str) -> str:
    text = arguments.help_text(FUNCTIONS[word]).removeprefix("usage: ").partition("\n\n")[0]
    return " ".join(text.split())


def _explained(parser: argparse.ArgumentParser, usage: str) -> str:
    """Return a parser's usage, description and table of arguments as Markdown."""
    parts = [f"```text\n{_wrapped(usage)}\n```"]
    if parser.description:
        parts.append(_prose(inspect.cleandoc(parser.description)))
    rows = [
        f"| {_names(action)} | {_cell(_help(action, parser.prog))} |"
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]
    if rows:
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    if parser.epilog:
        parts.append(f"```text\n{parser.epilog.strip()}\n```")
    return "\n\n".join(parts)


def _wrapped(usage: str, width: int = 76) -> str:
    """Break a usage line between its options."""
    lines: list[str] = []
    for line in usage.splitlines():
        pieces = re.findall(r"\[[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*\]|\S+", line)
        current = ""
        for piece in pieces:
            if current and len(current) + len(piece) >= width:
                lines.append(current)
                current = "        "
            current += ("" if not current.strip() else " ") + piece
        lines.append(current)
    return "\n".join(lines)


def _names(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else None
    if value is None and action.choices is not None:
        value = "{" + ",".join(str(each) for each in action.choices) + "}"
    if value is None and action.nargs != 0:
        value = action.dest.upper()
    value = (value or "").strip("<>")
    if not action.option_strings:
        return _code(value)
    return ", ".join(_code(f"{name} {value}".strip()) for name in action.option_strings)


def _help(action: argparse.Action, program: str) -> str:
    if not action.help:
        return ""
    known = {**vars(action), "prog": program}
    return action.help % known


def _code(text: str) -> str:
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _cell(text: str) -> str:
    return _prose(text).replace("|", "&#124;").replace("\n", " ")


def _prose(text: str) -> str:
    """Escape plain text of a terminal for Markdown, with its options as code."""
    escaped = html.escape(text.strip(), quote=False).replace("*", r"\*").replace("_", r"\_").replace("[", r"\[")
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", escaped)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


# -- metrics ----------------------------------------------------------------------------------------------------


def metrics_page() -> GeneratedPage:
    """Return the page of all metrics."""
    parts = [
        "# Metrics",
        "All metrics of `%mesh metrics` and of its Prometheus endpoint, from the code that computes them. Counters "
        "have the suffix `_total` in Prometheus' text. [telemetry.md](telemetry.md#metrics) shows how to serve them.",
        "\n".join(
            [
                "| metric | kind | labels | meaning |",
                "|---|---|---|---|",
                *(
                    f"| `{each.name}{'_total' if each.kind == 'counter' else ''}` | {each.kind} "
                    f"| {', '.join(each.labels)} | {_cell(each.help)} |"
                    for each in families(Snapshot(0, 0.0, {}, {}, {}, ()), Counters())
                ),
            ]
        ),
    ]
    return GeneratedPage("metrics.md", "Metrics", "every metric, its labels and its kind", "\n\n".join(parts) + "\n")


# -- API --------------------------------------------------------------------------------------------------------


def api_pages() -> list[GeneratedPage]:
    """Return a page for each façade in ``FACADES``."""
    listed = (ROOT / "tests" / "public_names.txt").read_text().split()
    pages: list[GeneratedPage] = []
    for facade, subject in FACADES.items():
        names = [name for line in listed for owner, _, name in [line.partition(":")] if owner == facade]
        text = f"# {facade}\n\n{_sentence(subject)}\n\n"
        origins = origins_of(facade)  # of a module without a file
        for name in names:
            owner, there = origins.get(name, (facade, name))
            text += f"::: {owner}.{there}\n\n"
        pages.append(GeneratedPage(f"api/{facade.partition('.')[2]}.md", facade, subject, text))
    return pages
