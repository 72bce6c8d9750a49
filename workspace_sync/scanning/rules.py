"""What is left out of a workspace, by which line of which file.

The rules, weakest first: those that always hold (``DEFAULTS``); git's global excludes; ``.git/info/exclude``; the
``.gitignore`` of each folder from the top of the repository down; the ``.meshignore`` of each folder from the root of
the workspace down. The strongest file with a line that matches decides, and in it the last such line; a line with ``!``
brings an entry back. All have the language of ``.gitignore``. A folder that is left out is not entered, so nothing in
it can be brought back alone. Other than in git, a file that is tracked although a line ignores it is left out: bring
it back in ``.meshignore``.

Source: gitignore(5), https://git-scm.com/docs/gitignore.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from workspace_sync.model.manifest import digest_of, printable
from workspace_sync.scanning.wildmatch import literal_length, translate

GITIGNORE = b".gitignore"
MESHIGNORE = b".meshignore"
#: Of larger files of rules, the rest is not read (bytes); git's limit is 100 MB.
_LARGEST = 1 << 20

#: What is always left out, unless a ``.meshignore`` brings it back.
DEFAULTS = b"""\
.git
.hg/
.svn/
.jj/
__pycache__/
*.py[cod]
.ipynb_checkpoints/
node_modules/
.mypy_cache/
.pytest_cache/
.ruff_cache/
.hypothesis/
.tox/
.nox/
.eggs/
.venv/
.pixi/
.direnv/
.cache/
.DS_Store
.Trash-*/
.nfs*
.fuse_hidden*
.*.sw[op]
.#*
*~
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file of rules.

    Attributes:
        source: ``file:line: text``, for people.
        brings_back: whether it starts with ``!``.
        folders_only: whether it ends in ``/``.
    """

    source: str
    brings_back: bool
    folders_only: bool


class RuleFile:
    """The lines of one file of rules, sorted by how they are matched.

    Args:
        text: its content.
        base: the path of the folder that it is about (absolute).
        name: its name in messages; empty: the defaults.
    """

    def __init__(self, text: bytes, base: bytes, name: str) -> None:
        self.digest = digest_of(base + b"\0" + text)
        self._lines: list[Line] = []
        self._skip = len(base.rstrip(b"/")) + 1
        # By the number of the line: names and paths without wildcards, ``*suffix``, and all others.
        self._names: dict[bytes, list[int]] = {}
        self._paths: dict[bytes, list[int]] = {}
        self._suffixes: list[tuple[bytes, int]] = []
        self._name_patterns: list[tuple[re.Pattern[bytes], int]] = []
        self._path_patterns: list[tuple[bytes, re.Pattern[bytes], int]] = []
        for number, line in enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
            self._add(line.removesuffix(b"\r"), name, number)
        self._all_suffixes = tuple(suffix for suffix, _ in self._suffixes)
        self._all_starts = tuple(start for start, _, _ in self._path_patterns)
        self._any_name = re.compile(b"|".join(b"(?:" + p.pattern + b")" for p, _ in self._name_patterns), re.DOTALL)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def _add(self, text: bytes, name: str, number: int) -> None:
        if text.startswith(b"#"):
            return
        text = _without_trailing_spaces(text)
        pattern = text
        if brings_back := pattern.startswith(b"!"):
            pattern = pattern[1:]
        if folders_only := pattern.endswith(b"/"):
            pattern = pattern[:-1]
        if not pattern:
            return
        index = len(self._lines)
        where = f"{name}:{number}" if name else "default"
        self._lines.append(Line(f"{where}: {printable(text)}", brings_back, folders_only))
        if b"/" not in pattern:
            if literal_length(pattern) == len(pattern):
                self._names.setdefault(pattern, []).append(index)
            elif pattern[:1] == b"*" and literal_length(pattern[1:]) == len(pattern) - 1:
                self._suffixes.append((pattern[1:], index))
            elif (regex := translate(pattern, path=False)) is not None:
                self._name_patterns.append((re.compile(regex, re.DOTALL), index))
            return
        pattern = pattern.removeprefix(b"/")
        fixed = literal_length(pattern)
        if fixed == len(pattern):
            self._paths.setdefault(pattern, []).append(index)
        elif (regex := translate(pattern, path=True)) is not None:
            self._path_patterns.append((pattern[:fixed], re.compile(regex, re.DOTALL), index))

    def match(self, name: bytes, path: bytes, is_folder: bool) -> Line | None:
        """The last line that matches.

        Args:
            name: of the entry.
            path: of the entry (absolute); it is below the folder that the file is about.
        """
        found = -1
        if self._names and (indexes := self._names.get(name)) is not None:
            found = self._last(indexes, is_folder, found)
        if self._all_suffixes and name.endswith(self._all_suffixes):
            found = self._last([i for suffix, i in self._suffixes if name.endswith(suffix)], is_folder, found)
        if self._name_patterns and self._any_name.fullmatch(name):
            found = self._last([i for regex, i in self._name_patterns if regex.fullmatch(name)], is_folder, found)
        if self._paths or self._path_patterns:
            path = path[self._skip :]
            if (indexes := self._paths.get(path)) is not None:
                found = self._last(indexes, is_folder, found)
            if self._path_patterns and path.startswith(self._all_starts):
                matching = [
                    i for start, regex, i in self._path_patterns if path.startswith(start) and regex.fullmatch(path)
                ]
                found = self._last(matching, is_folder, found)
        return self._lines[found] if found >= 0 else None

    def _last(self, indexes: list[int], is_folder: bool, found: int) -> int:
        for index in reversed(indexes):
            if index <= found:
                break
            if is_folder or not self._lines[index].folders_only:
                return index
        return found


def _without_trailing_spaces(line: bytes) -> bytes:
    end = len(line)
    while end and line[end - 1 : end] == b" ":
        # An odd number of backslashes before it makes the space a part of the pattern.
        before = line[: end - 1]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:
            break
        end -= 1
    return line[:end]


class Rules:
    """The rules that hold within a folder. Folders without files of rules share those of their parent.

    Args:
        git: what git has: global excludes, ``info/exclude``, ``.gitignore`` files; the strongest last.
        mesh: ``.meshignore`` files; the strongest last.
    """

    def __init__(self, git: tuple[RuleFile, ...], mesh: tuple[RuleFile, ...]) -> None:
        self.git = git
        self.mesh = mesh
        self.digest = digest_of(
            b"".join(each.digest for each in git) + b"|" + b"".join(each.digest for each in mesh) + _DEFAULTS.digest
        )
        self._strongest_first = tuple(each for each in (*mesh[::-1], *git[::-1], _DEFAULTS) if each)

    def verdict(self, name: bytes, path: bytes, is_folder: bool) -> Line | None:
        """The line that decides about an entry, if there is one."""
        for each in self._strongest_first:
            if (line := each.match(name, path, is_folder)) is not None:
                return line
        return None


_DEFAULTS = RuleFile(DEFAULTS, b"/", "")


def read_rules(path: bytes, base: bytes, shown: str) -> RuleFile | None:
    """The rules of a file; None if there is none. As in git, links are not followed, except outside of a tree."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        try:
            return RuleFile(file.read(_LARGEST), base, shown)
        except OSError:
            return None
