"""The rules that hold within a folder, with those that it has itself and those that git takes from outside of it.

Source: gitignore(5), and gitrepository-layout(5), https://git-scm.com/docs/gitrepository-layout.
"""

from __future__ import annotations

import os
import re
import subprocess

from monarch_kernel import programs
from workspace_sync.scanning.rules import GITIGNORE, MESHIGNORE, RuleFile, Rules, read_rules


class Scope:
    """The rules within one folder; its files of rules are read only when an entry must be judged.

    Args:
        rules: those that hold around the folder.
        path: the folder (absolute); None: ``rules`` are those within.
        expected: the digest of the rules within, from an earlier scan that found the same files of rules.
    """

    def __init__(self, rules: Scope | Rules, path: bytes | None = None, expected: bytes | None = None) -> None:
        self._around = rules
        self._path = path
        self._rules = rules if isinstance(rules, Rules) and path is None else None
        self._expected = expected

    @property
    def digest(self) -> bytes:
        """Equal digests mean equal rules."""
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
    """The rules within a folder: those around it, and its own. A repository of its own begins anew, as in git."""
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
    """The rules that hold for a folder of the client, from outside of it.

    In a repository, these are the user's, the repository's and those of the folders above, unless they leave out the
    folder itself: it was named, so it is wanted.
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
    """The rules of the user and of ``info/exclude``, for the repository with this top folder."""
    exclude = _common_folder(top) + b"/info/exclude"
    found = (_of_user(top), read_rules(exclude, top, os.fsdecode(exclude)))
    return tuple(each for each in found if each)


def _common_folder(top: bytes) -> bytes:
    """The folder of a repository that all its work trees share."""
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
    """The file of ``core.excludesFile``, whose patterns are about the top folder."""
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
        # Only git reads its configuration right, and it takes some ms to start.
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
