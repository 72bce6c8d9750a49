"""Decide which entries of a workspace are ignored, and by which line of which file.

The rules, weakest first: the defaults (``DEFAULTS``); git's global excludes; ``.git/info/exclude``; the ``.gitignore``
of each folder from the top of the repository down; the ``.meshignore`` of each folder from the root of the workspace
down. The strongest file with a matching line decides, and in it the last such line; a line with ``!`` includes an entry
again. All files have the syntax of ``.gitignore``. An ignored folder is not entered, so no single entry of it can be
included again. Unlike in git, a line also ignores tracked files: include these in ``.meshignore``.

Source: gitignore(5), https://git-scm.com/docs/gitignore; gitrepository-layout(5),
https://git-scm.com/docs/gitrepository-layout.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

from monarch_kernel import programs
from workspace_sync.model.manifest import digest_of, printable

# Translate the patterns of ``.gitignore`` to regular expressions over bytes that match exactly as git does.
#
# Existing libraries differ from git if a pattern has character classes (``[[:digit:]]``) or ends in ``/**``, or if a
# name contains a line break. Also, the matching time of their expressions, such as those of pathspec, grows
# polynomially with the length of the name, and the pattern determines the exponent.
#
# These expressions do not backtrack. The piece of a pattern between one ``*`` and the next takes its first match: if
# the rest matches after a later match of the piece, it also matches after the first, because the next ``*`` covers the
# text between. If a ``/`` comes before the next ``*``, only one match is possible. The same holds for whole parts
# between two ``**``. Each such piece is therefore an atomic group.
#
# Source: gitignore(5), https://git-scm.com/docs/gitignore; POSIX.1-2017, section 2.13 (patterns).

_SPECIAL = b"*?[\\"
_CLASSES: dict[bytes, frozenset[int]] = {
    name: frozenset(byte for byte in range(128) if re.fullmatch(members, bytes([byte]), re.DOTALL))
    for name, members in {
        b"alnum": rb"[0-9A-Za-z]",
        b"alpha": rb"[A-Za-z]",
        b"blank": rb"[ \t]",
        b"cntrl": rb"[\x00-\x1f\x7f]",
        b"digit": rb"[0-9]",
        b"graph": rb"[!-~]",
        b"lower": rb"[a-z]",
        b"print": rb"[ -~]",
        b"punct": rb"[!-/:-@\[-`{-~]",
        b"space": rb"[ \t-\r]",
        b"upper": rb"[A-Z]",
        b"xdigit": rb"[0-9A-Fa-f]",
    }.items()
}


def literal_length(pattern: bytes) -> int:
    """Count the literal bytes at the start of a pattern."""
    for i, byte in enumerate(pattern):
        if byte in _SPECIAL:
            return i
    return len(pattern)


def translate(pattern: bytes, *, path: bool) -> bytes | None:
    """Translate a pattern to a regular expression (for ``re.DOTALL`` and a full match); None: it matches nothing.

    Args:
        path: whether it is matched against a path, where only ``**`` also matches ``/``.
    """
    one, many = (b"[^/]", b"[^/]*") if path else (b".", b".*")
    found = _Pieces(many)
    start = literal_length(pattern)
    found.one(re.escape(pattern[:start]))
    i = start
    while i < len(pattern):
        byte = pattern[i : i + 1]
        if byte == b"*":
            end = i
            while pattern[end : end + 1] == b"*":
                end += 1
            follows = pattern[end : end + 1]
            # The part before the first wildcard is compared separately, so ``**`` right after it starts a part.
            starts_part = i == start or pattern[i - 1 : i] == b"/"
            if path and end - i > 1 and starts_part and follows in (b"", b"/"):
                if follows:
                    found.parts()
                    end += 1
                else:
                    return found.regex(b".*")
            else:
                found.star()
            i = end
        elif byte == b"?":
            found.one(one)
            i += 1
        elif byte == b"[":
            bracket = _bracket(pattern, i)
            if bracket is None:
                return None
            members, i = bracket
            if path:
                members -= {ord("/")}
            if not members:
                return None
            found.one(b"[" + b"".join(b"\\x%02x" % member for member in sorted(members)) + b"]")
        elif byte == b"\\":
            if i + 1 == len(pattern):
                return None
            found.one(re.escape(pattern[i + 1 : i + 2]))
            i += 2
        else:
            found.one(re.escape(byte))
            i += 1
    return found.regex()


class _Pieces:
    """Pieces of a pattern between its wildcards, collected from left to right.

    Args:
        many: the expression for ``*``.
    """

    def __init__(self, many: bytes) -> None:
        self._many = many
        self._blocks: list[bytes] = []  # between ``**/``
        self._block: list[bytes] = []  # of the current one, between ``*``
        self._piece: list[bytes] = []

    def one(self, piece: bytes) -> None:
        """Add a piece that matches single bytes."""
        self._piece.append(piece)

    def star(self) -> None:
        """Add ``*``."""
        self._block.append(b"".join(self._piece))
        self._piece = []

    def parts(self) -> None:
        """Add ``**/``."""
        self.star()
        self._blocks.append(self._joined(whole=True))
        self._block = []

    def regex(self, rest: bytes = b"") -> bytes:
        """Return the whole expression; ``rest`` is the part that follows."""
        self.star()
        last = self._joined(whole=bool(rest)) + rest
        if not self._blocks:
            return last
        first, *between = self._blocks
        return first + b"".join(b"(?>(?:.*?/)??%s)" % block for block in between) + b"(?:.*/)?" + last

    def _joined(self, whole: bool) -> bytes:
        """Return the current block; ``whole``: it ends in ``/``, or the pattern allows any end."""
        first, *more = self._block
        if not more:
            return first
        if whole:
            return first + b"".join(b"(?>%s?%s)" % (self._many, piece) for piece in more)
        *between, last = more
        return first + b"".join(b"(?>%s?%s)" % (self._many, piece) for piece in between) + self._many + last


def _bracket(pattern: bytes, i: int) -> tuple[set[int], int] | None:
    """Parse a bracket expression: the set of its bytes, and its end; None if it has no end."""
    i += 1
    negated = pattern[i : i + 1] in (b"!", b"^") and pattern[i : i + 1] != b""
    if negated:
        i += 1
    members: set[int] = set()
    before = -1  # the byte that a range may start from
    first = True
    while True:
        if i >= len(pattern):
            return None
        byte = pattern[i]
        if byte == ord("]") and not first:
            break
        first = False
        after = pattern[i + 1 : i + 2]
        if byte == ord("\\"):
            i += 1
            if i >= len(pattern):
                return None
            before = pattern[i]
            members.add(before)
        elif byte == ord("-") and before >= 0 and after and after != b"]":
            i += 1
            if pattern[i] == ord("\\"):
                i += 1
                if i >= len(pattern):
                    return None
            members.update(range(before, pattern[i] + 1))
            before = -1
        elif byte == ord("[") and after == b":":
            end = pattern.find(b"]", i + 2)
            if end < 0:
                return None
            if end - i - 3 < 0 or pattern[end - 1 : end] != b":":
                members.add(byte)  # no ``:]``: an ordinary member
                before = byte
            else:
                named = _CLASSES.get(pattern[i + 2 : end - 1])
                if named is None:
                    return None
                members |= named
                before = -1
                i = end
        else:
            members.add(byte)
            before = byte
        i += 1
    if negated:
        members = set(range(256)) - members
    return members, i + 1


GITIGNORE = b".gitignore"
MESHIGNORE = b".meshignore"
#: Longer ignore files are truncated (bytes); git's limit is 100 MB.
_LARGEST = 1 << 20

#: Entries that are always ignored, unless a ``.meshignore`` includes them.
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
    """One line of an ignore file.

    Attributes:
        source: ``file:line: text``, for messages.
        brings_back: whether it starts with ``!``.
        folders_only: whether it ends in ``/``.
    """

    source: str
    brings_back: bool
    folders_only: bool


class RuleFile:
    """The lines of one ignore file, sorted by how they are matched.

    Args:
        text: its content.
        base: the path of the folder that it applies to (absolute).
        name: its name in messages; empty: the defaults.
    """

    def __init__(self, text: bytes, base: bytes, name: str) -> None:
        self.digest = digest_of(base + b"\0" + text)
        self._lines: list[Line] = []
        self._skip = len(base.rstrip(b"/")) + 1
        # By line number: names and paths without wildcards, ``*suffix``, and all others.
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
        """Return the last matching line.

        Args:
            name: of the entry.
            path: of the entry (absolute), below the folder that the file applies to.
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
        # After an odd number of backslashes, the space is part of the pattern.
        before = line[: end - 1]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:
            break
        end -= 1
    return line[:end]


class Rules:
    """The rules that apply within a folder. Folders without ignore files share those of their parent.

    Args:
        git: git's rules: global excludes, ``info/exclude``, ``.gitignore`` files; the strongest last.
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
        """Return the line that decides about an entry; None if there is none."""
        for each in self._strongest_first:
            if (line := each.match(name, path, is_folder)) is not None:
                return line
        return None


_DEFAULTS = RuleFile(DEFAULTS, b"/", "")


def read_rules(path: bytes, base: bytes, shown: str) -> RuleFile | None:
    """Read the rules of a file; return None if there is none. As in git, links are only followed outside a tree."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        try:
            return RuleFile(file.read(_LARGEST), base, shown)
        except OSError:
            return None


# -- rules within a folder ------------------------------------------------------------------------


class Scope:
    """The rules within one folder. Its ignore files are read only when an entry must be judged.

    Args:
        rules: the rules that apply around the folder.
        path: the folder (absolute); None: ``rules`` already apply within it.
        expected: the digest of the rules within it, from an earlier scan that found the same ignore files.
    """

    def __init__(self, rules: Scope | Rules, path: bytes | None = None, expected: bytes | None = None) -> None:
        self._around = rules
        self._path = path
        self._rules = rules if isinstance(rules, Rules) and path is None else None
        self._expected = expected

    @property
    def digest(self) -> bytes:
        """The digest of the rules. Equal digests mean equal rules."""
        if self._rules is None and self._expected is not None:
            return self._expected
        return self.rules.digest

    @property
    def rules(self) -> Rules:
        """The rules themselves."""
        if self._rules is None:
            around = self._around if isinstance(self._around, Rules) else self._around.rules
            self._rules = around if self._path is None else rules_within(self._path, around)
        return self._rules


def rules_within(folder: bytes, around: Rules) -> Rules:
    """Return the rules within a folder: those around it, and its own. As in git, a nested repository starts anew."""
    git, mesh = around.git, around.mesh
    if os.path.lexists(folder + b"/.git"):
        git = of_repository(folder)
    for name in (GITIGNORE, MESHIGNORE):
        path = folder + b"/" + name
        found = read_rules(path, folder, os.fsdecode(path))
        if found is not None and name == GITIGNORE:
            git = (*git, found)
        elif found is not None:
            mesh = (*mesh, found)
    return around if (git, mesh) == (around.git, around.mesh) else Rules(git, mesh)


def rules_around(root: bytes) -> Rules:
    """Return the rules that apply to a folder of the client from outside it.

    In a repository, these are the rules of the user, the repository and the folders above. They are dropped if they
    ignore the folder itself, because it was named explicitly.
    """
    top = root
    while not os.path.lexists(top + b"/.git"):
        parent = os.path.dirname(top)
        if parent == top:
            return Rules(tuple(each for each in (_of_user(root),) if each), ())
        top = parent
    files = list(of_repository(top))
    above = [top]
    for part in root[len(top) :].split(b"/"):
        if part:
            above.append(above[-1].rstrip(b"/") + b"/" + part)
    for i, folder in enumerate(above[:-1]):
        found = read_rules(folder + b"/" + GITIGNORE, folder, os.fsdecode(folder + b"/" + GITIGNORE))
        if found is not None:
            files.append(found)
        line = Rules(tuple(files), ()).verdict(os.path.basename(above[i + 1]), above[i + 1], True)
        if line is not None and not line.brings_back:
            return Rules(of_repository(top), ())
    return Rules(tuple(files), ())


def of_repository(top: bytes) -> tuple[RuleFile, ...]:
    """Return the rules of the user and of ``info/exclude`` for the repository with this top folder."""
    exclude = _common_folder(top) + b"/info/exclude"
    found = (_of_user(top), read_rules(exclude, top, os.fsdecode(exclude)))
    return tuple(each for each in found if each)


def _common_folder(top: bytes) -> bytes:
    """Return the folder of a repository that all its work trees share."""
    git = top + b"/.git"
    for name in (git, b"commondir"):
        path = git if name == git else git + b"/" + name
        try:
            with open(path, "rb") as file:
                text = file.read(4096).removeprefix(b"gitdir:").strip()
        except OSError:
            continue
        if text:
            git = os.path.normpath(os.path.join(top if name == git else git, text))
    return git


def _of_user(top: bytes) -> RuleFile | None:
    """Return the file of ``core.excludesFile``, whose patterns apply to the top folder."""
    path = _excludes_file(top)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return RuleFile(file.read(1 << 20), top, os.fsdecode(path))
    except OSError:
        return None


def _excludes_file(top: bytes) -> bytes | None:
    home = os.fsencode(os.path.expanduser("~"))
    own = os.environb.get(b"XDG_CONFIG_HOME") or home + b"/.config"
    for config in (home + b"/.gitconfig", own + b"/git/config", _common_folder(top) + b"/config", b"/etc/gitconfig"):
        try:
            with open(config, "rb") as file:
                text = file.read(1 << 20)
        except OSError:
            continue
        # Only git parses its configuration correctly; it takes some ms to start.
        if re.search(rb"excludesfile|\[include", text, re.IGNORECASE) and (named := _ask_git(top)):
            return named
    return own + b"/git/ignore"


def _ask_git(top: bytes) -> bytes | None:
    try:
        done = programs.run(
            ["git", "-C", top, "config", "--get", "--path", "core.excludesFile"], capture_output=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.removesuffix(b"\n") or None
