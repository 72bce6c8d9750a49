"""Complete `%mesh` and `%%mesh` lines: subcommands, options, mesh names, dimensions, variables. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.debugger.commands.grammar import COMMANDS


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

    def _positional(self, command: str, known: Known, words: list[str], options: Mapping[str, Any]) -> list[str]:
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
