"""A prefix in text: scripts with their first lines, and whatever else names it.

Older Linux kernels read at most 127 bytes of a shebang (``#!``, interpreter and argument), and all split it at spaces,
so installers write scripts in two forms. This module reads both, and writes the form that the installer would choose
for another prefix:

* pip (distlib): ``#!/prefix/bin/python``, else two lines of ``/bin/sh`` that are a string to Python;
* uv: the same, with the interpreter always quoted in the second form;
* conda (rattler): ``#!/prefix/bin/python``, else one such line for Python, and ``/usr/bin/env`` for other interpreters.

Source: pip's vendored distlib/scripts.py (``_build_shebang``); uv's uv-install-wheel/src/wheel.rs (``format_shebang``);
rattler's install/link.rs and install/entry_point.rs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

#: The bytes of a shebang that every Linux kernel reads, with ``#!`` and without the end of the line.
LONGEST_SHEBANG = 127

# What does not follow a path that ends here.
_END = rb"(?!\.?[A-Za-z0-9_-])"
_PYTHON = re.compile(rb"python[0-9.]*w?\Z|pypy[0-9.]*\Z")
# distlib's long form, and rattler's; the interpreter may be quoted.
_PIP_LONG = re.compile(rb"""#!/bin/sh\n'''exec' ("?)(/[^"\n]*?)\1((?: -[^"\n]*)?) "\$0" "\$@"\n' '''\n""")
_UV_LONG = re.compile(rb"""#!/bin/sh\n'''exec' '(/[^'\n]*)'((?: -[^'\n]*)?) "\$0" "\$@"\n' '''\n""")
_CONDA_LONG = re.compile(rb"""#!/bin/sh\n'''exec' "(/[^"\n]*)"([^"\n]*) "\$0" "\$@" #'''(?=\n|\Z)""")
_ENV = re.compile(rb"#!/usr/bin/env ([^\s/]+)([^\n]*)")
_SHEBANG = re.compile(rb"#![ \t]*(/(?:\\ |[^ \t\r\n])*)([^\n]*)")


@lru_cache(maxsize=64)
def mentions(prefix: bytes) -> re.Pattern[bytes]:
    """What finds a prefix as a path or the start of one: ``/envs/a`` not in ``/envs/a2`` and ``/envs/a.bak``."""
    return re.compile(re.escape(prefix) + _END)


def replace(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """Put another prefix in the place of one, wherever text names it."""
    return mentions(prefix).sub(lambda _: target, data)


def replace_paths(data: bytes, moves: Mapping[bytes, bytes]) -> bytes:
    """Put other paths in the place of some, in one pass; the longest that fits counts."""
    either = b"|".join(re.escape(path) for path in sorted(moves, key=len, reverse=True))
    return re.sub(b"(?:" + either + b")" + _END, lambda found: moves[found[0]], data)


def replace_pip(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """A script that pip has made, as it would be at another prefix."""
    return _script(data, prefix, target, _pip_head)


def replace_uv(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """A script that uv has made, as it would be at another prefix."""
    return _script(data, prefix, target, _uv_head)


def replace_conda(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """Text that conda or rattler has installed, as it would be at another prefix."""
    return _script(data, prefix, target, _conda_head)


def replace_conda_env(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """The same, of a script for which ``prefix`` was too long, so that ``/usr/bin/env`` finds its interpreter."""
    found = _ENV.match(data)
    if found is None:
        return replace_conda(data, prefix, target)
    head = _conda_head(target + b"/bin/" + found[1], found[2])
    return head + replace(data[found.end() :], prefix, target)


def restored(data: bytes, prefix: bytes, placeholder: bytes) -> list[tuple[str, bytes]]:
    """The (kind of rewriting, content) that a file may have had in its conda package, where shebangs have no limit."""
    found = interpreter(data)
    if found is None:
        return [("text", replace(data, prefix, placeholder))]
    executable, argument, end = found
    rest = replace(data[end:], prefix, placeholder)
    simple = b"#!" + replace(executable, prefix, placeholder) + argument + rest
    if env := _ENV.match(data):
        rest = replace(data[env.end() :], prefix, placeholder)
        return [("text", simple), ("env", b"#!" + placeholder + b"/bin/" + env[1] + env[2] + rest)]
    return [("text", simple)]


def interpreter(data: bytes) -> tuple[bytes, bytes, int] | None:
    """The (interpreter, argument with its blank, length of the head) of a script in any of the forms."""
    if not data.startswith(b"#!"):
        return None
    if found := _PIP_LONG.match(data):
        return found[2], found[3], found.end() - 1  # without the end of its last line
    if found := _UV_LONG.match(data):
        return found[1], found[2], found.end() - 1
    if found := _CONDA_LONG.match(data):
        return found[1], found[2], found.end()
    if found := _SHEBANG.match(data):
        return found[1], found[2], found.end()
    return None


def _script(data: bytes, prefix: bytes, target: bytes, head: Callable[[bytes, bytes], bytes]) -> bytes:
    found = interpreter(data)
    if found is None:
        return replace(data, prefix, target)
    executable, argument, end = found
    moved = replace(executable, prefix, target)
    if moved == executable:
        return replace(data, prefix, target)
    return head(moved, argument) + replace(data[end:], prefix, target)


def _pip_head(executable: bytes, argument: bytes) -> bytes:
    # distlib counts the end of the line, too.
    if b" " not in executable and len(executable) + len(argument) + 3 <= LONGEST_SHEBANG:
        return b"#!" + executable + argument
    quoted = b'"' + executable + b'"' if b" " in executable else executable
    return b"#!/bin/sh\n'''exec' " + quoted + argument + b" \"$0\" \"$@\"\n' '''"


def _uv_head(executable: bytes, argument: bytes) -> bytes:
    if b" " not in executable and len(executable) + len(argument) + 3 <= LONGEST_SHEBANG:
        return b"#!" + executable + argument
    quoted = b"'" + executable.replace(b"'", b"""'"'"'""") + b"'"
    return b"#!/bin/sh\n'''exec' " + quoted + argument + b" \"$0\" \"$@\"\n' '''"


def _conda_head(executable: bytes, argument: bytes) -> bytes:
    if b" " not in executable and len(executable) + len(argument) + 2 <= LONGEST_SHEBANG:
        return b"#!" + executable + argument
    name = executable.rpartition(b"/")[2]
    if _PYTHON.match(name):
        return b"#!/bin/sh\n'''exec' \"" + executable + b'"' + argument + b' "$0" "$@" #\'\'\''
    return b"#!/usr/bin/env " + name + argument
