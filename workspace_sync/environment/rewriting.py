"""Rewrite one file for another prefix. Needs the standard library and ``elf`` only (see ``conda_unpack``).

**Scripts.** Older Linux kernels read at most 127 bytes of a shebang (``#!``, interpreter and argument), and all split
it at spaces, so installers write scripts in two forms. This module reads both, and writes the form that the installer
would choose for another prefix:

* pip (distlib): ``#!/prefix/bin/python``, else two lines of ``/bin/sh`` that are a string to Python;
* uv: the same, with the interpreter always quoted in the second form;
* conda (rattler): ``#!/prefix/bin/python``, else one such line for Python, and ``/usr/bin/env`` for other interpreters.

**Compiled code.** conda packages are built at a prefix of 255 bytes. An installer replaces it in each C string and pads
the string with NULs, so that nothing moves. The padding is still there at the prefix of the client, and a longer prefix
fits into it.

**Compiled modules (.pyc).** Each code object contains the path of its source. A string in a .pyc is preceded by its
type and length (the marshal format), so a prefix of another length changes both. The file is patched in place: loading
and dumping the code would produce other bytes, because marshal marks an object for references by its reference count.
If a source names the prefix, its module also has the prefix in constants, whose lengths are in the tables of columns.
Such a module is left out, and the host compiles it.

**Indexes of hashes** (conda's records and wheels' RECORD) change with the files that they list. They are edited in
place, and keep the format of their installer.

Source: pip's vendored distlib/scripts.py (``_build_shebang``); uv's uv-install-wheel/src/wheel.rs (``format_shebang``);
rattler's install/link.rs and install/entry_point.rs; CPython's Python/marshal.c (versions 2 to 4); PEP 552 (the header
of a .pyc); conda's "paths_data" (https://conda.org/learn/ceps/cep-0034/); RECORD: PEP 376, PEP 427, and
https://packaging.python.org/en/latest/specifications/recording-installed-packages/.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

from workspace_sync.environment.elf import read_elf


def rewritten(
    how: tuple[str, bytes, int, Sequence[bytes], Sequence[tuple[bytes, bytes]]],
    data: bytes,
    target: bytes,
    tree: bytes,
    path: bytes,
    read: Callable[[bytes], bytes] | None,
) -> bytes:
    """Return the content of a file at another prefix.

    Args:
        how: kind, prefix, space, files and places, as in ``Rewrite``.
        data: its content at the prefix of ``how``.
        target: the new prefix.
        tree: the folder that contains the places.
        path: of the file in the environment.
        read: returns the new content of other files by their paths. Without it, an index keeps its hashes.

    Raises:
        PrefixTooLongError: a binary has no space for the prefix.
        CompiledError: a compiled module cannot be changed.
        ValueError: the kind is unknown.
    """
    kind, prefix, space, files, places = how
    if kind == "binary":
        return replace_padded(data, prefix, target, space)
    if kind == "runpath":
        return replace_runpaths(data, prefix, path, places[0][1] if places else b"")
    if kind == "pyc":
        return replace_compiled(data, prefix, target)
    if kind == "script":
        return replace_pip(data, prefix, target)
    if kind == "uv":
        return replace_uv(data, prefix, target)
    if kind == "env":
        return replace_conda_env(data, prefix, target)
    if kind == "home" or (kind == "text" and places):
        root = target if kind == "home" else tree
        return replace_paths(data, {**{p: (root + b"/" + to).rstrip(b"/") for p, to in places}, prefix: target})
    if kind == "text":
        return replace_conda(data, prefix, target)
    if kind in ("record", "conda", "rattler"):
        made = {} if read is None else {each: read(each) for each in files}
        if kind == "record":
            return replace_record(data, path, prefix, target, made)
        return replace_conda_record(data, prefix, target, made, sizes=kind == "rattler")
    raise ValueError(f"{path.decode(errors='backslashreplace')} is to be rewritten as {kind!r}, which is unknown here")


# -- text -----------------------------------------------------------------------------------------

#: The bytes of a shebang that every Linux kernel reads, including ``#!``, without the end of the line.
LONGEST_SHEBANG = 127

# Bytes that cannot follow the end of this path.
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
    """Return a pattern for a path or the start of one: ``/envs/a``, but not ``/envs/a2`` or ``/envs/a.bak``."""
    return re.compile(re.escape(prefix) + _END)


def replace(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """Replace one prefix by another wherever text names it."""
    return mentions(prefix).sub(lambda _: target, data)


def replace_paths(data: bytes, moves: Mapping[bytes, bytes]) -> bytes:
    """Replace several paths by others, in one pass; the longest match counts."""
    either = b"|".join(re.escape(path) for path in sorted(moves, key=len, reverse=True))
    return re.sub(b"(?:" + either + b")" + _END, lambda found: moves[found[0]], data)


def replace_pip(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """Rewrite a script created by pip for another prefix."""
    return _script(data, prefix, target, _pip_head)


def replace_uv(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """Rewrite a script created by uv for another prefix."""
    return _script(data, prefix, target, _uv_head)


def replace_conda(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """Rewrite text installed by conda or rattler for another prefix."""
    return _script(data, prefix, target, _conda_head)


def replace_conda_env(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """Rewrite such a script whose interpreter is found by ``/usr/bin/env``, because ``prefix`` was too long."""
    found = _ENV.match(data)
    if found is None:
        return replace_conda(data, prefix, target)
    head = _conda_head(target + b"/bin/" + found[1], found[2])
    return head + replace(data[found.end() :], prefix, target)


def restored_text(data: bytes, prefix: bytes, placeholder: bytes) -> list[tuple[str, bytes]]:
    """Return the possible (kind of rewriting, content) of a file in its conda package, where shebangs have no limit."""
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
    """Parse the head of a script in any of the forms: (interpreter, argument with its blank, length of the head)."""
    if not data.startswith(b"#!"):
        return None
    if found := _PIP_LONG.match(data):
        return found[2], found[3], found.end() - 1  # without the end of the last line
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
    # distlib includes the end of the line in the length.
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


# -- compiled code --------------------------------------------------------------------------------


class PrefixTooLongError(ValueError):
    """A string of a binary has no space for a prefix.

    Attributes:
        space: the bytes that it has.
    """

    def __init__(self, space: int) -> None:
        super().__init__(f"there is space for a prefix of {space} bytes")
        self.space = space


def replace_padded(data: bytes, prefix: bytes, target: bytes, space: int) -> bytes:
    """Replace one prefix by another in C strings without changing the length of the data.

    Args:
        space: the bytes that each mention had for the prefix when the file was built. In addition to its own
            terminator, the string is followed by ``space - len(prefix)`` NULs for each mention in it.

    Raises:
        PrefixTooLongError: a string has no space for ``target``.
    """
    pattern = mentions(prefix)
    parts: list[bytes] = []
    at = 0
    while found := pattern.search(data, at):
        start = found.start()
        end = data.find(b"\0", start)
        if end < 0:
            end = len(data)
        string = data[start:end]
        moved, count = pattern.subn(lambda _: target, string)
        room = len(string)
        if space > len(prefix):
            padding = count * (space - len(prefix))
            if data[end : end + padding] == bytes(padding):
                room += padding
        if len(moved) > room:
            raise PrefixTooLongError(len(prefix) + (room - len(string)) // count)
        parts += (data[at:start], moved, bytes(room - len(moved)))
        at = start + room
    parts.append(data[at:])
    return b"".join(parts)


def restored_binary(data: bytes, prefix: bytes, placeholder: bytes) -> bytes | None:
    """Return the file as it was in its package; None if the prefix cannot have replaced the placeholder everywhere."""
    try:
        return replace_padded(data, prefix, placeholder, len(placeholder))
    except PrefixTooLongError:
        return None


def replace_runpaths(data: bytes, prefix: bytes, path: bytes, place: bytes = b"") -> bytes:
    """Make an ELF file search for libraries relative to itself instead of below a prefix.

    Code compiled at the client has no padding, but ``$ORIGIN`` is usually shorter than the prefix.

    Args:
        path: of the file in the environment.
        place: the folder in the environment for the content of the prefix; empty: the prefix is the environment's own.

    Raises:
        PrefixTooLongError: the relative path is longer, or the string is part of another one.
    """
    elf = read_elf(lambda size, at: data[at : at + size])
    folder = posixpath.dirname(path)
    for listed in () if elf is None else elf.runpaths:
        moved = b":".join(_relative(part, prefix, folder, place) for part in listed.split(b":"))
        if len(moved) > len(listed) or (moved != listed and b"\0" + listed + b"\0" not in data):
            raise PrefixTooLongError(len(prefix))
        data = data.replace(b"\0" + listed + b"\0", b"\0" + moved.ljust(len(listed), b"\0") + b"\0")
    return data


def _relative(part: bytes, prefix: bytes, folder: bytes, place: bytes) -> bytes:
    if not mentions(prefix).match(part):
        return part
    inner = posixpath.relpath(posixpath.join(place, part[len(prefix) :].strip(b"/")) or b".", folder or b".")
    return b"$ORIGIN" if inner == b"." else b"$ORIGIN/" + inner


# -- compiled modules (.pyc) ----------------------------------------------------------------------

#: The bytes before the code: magic number, flags, and either time and size of the source, or its hash.
HEADER = 16
_REF = 0x80
_SHORT = b"zZ"
_LONG = b"aAut"


class CompiledError(ValueError):
    """A compiled module has an unknown form."""


def source_stamp(data: bytes) -> tuple[int, int] | None:
    """Return the (mtime in s, size) of the source that a .pyc was compiled from; None if it has a hash instead."""
    if len(data) < HEADER or int.from_bytes(data[4:8], "little"):
        return None
    return int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")


def replace_compiled(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """Rewrite a .pyc as the compiler would write it at another prefix, if its source does not name the prefix.

    Raises:
        CompiledError: the prefix is in a place that cannot be changed.
    """
    pattern = mentions(prefix)
    parts: list[bytes] = []
    done = HEADER
    while found := pattern.search(data, done):
        start = found.start()
        if start - 2 >= done and data[start - 2] & ~_REF in _SHORT:
            kind, begin, size = data[start - 2], start - 2, data[start - 1]
        elif start - 5 >= done and data[start - 5] & ~_REF in _LONG:
            kind, begin, size = data[start - 5], start - 5, int.from_bytes(data[start - 4 : start], "little")
        else:
            raise CompiledError(f"it has the prefix within a constant, at byte {start}")
        end = start + size
        if size < len(prefix) or end > len(data):
            raise CompiledError(f"it has the prefix in something else than a string, at byte {start}")
        parts += (data[done:begin], _string(kind, pattern.sub(lambda _: target, data[start:end])))
        done = end
    return data[:HEADER] + b"".join(parts) + data[done:]


def _string(kind: int, text: bytes) -> bytes:
    """Encode a string for marshal. ASCII of less than 256 bytes has a separate form."""
    ref, code = kind & _REF, chr(kind & ~_REF)
    if code in "zZaA":
        if not text.isascii():
            code = "t" if code in "ZA" else "u"
        elif len(text) < 256:
            return bytes((ord("Z" if code in "ZA" else "z") | ref, len(text))) + text
        else:
            code = "A" if code in "ZA" else "a"
    elif code in "ut" and text.isascii():
        return _string(ref | ord("Z" if code == "t" else "z"), text)
    return bytes((ord(code) | ref,)) + len(text).to_bytes(4, "little") + text


# -- indexes of hashes ----------------------------------------------------------------------------


def replace_conda_record(
    data: bytes, prefix: bytes, target: bytes, made: Mapping[bytes, bytes], *, sizes: bool
) -> bytes:
    """Rewrite a conda record for another prefix.

    Args:
        made: the rewritten content of the files that name the prefix, by their paths in the prefix.
        sizes: whether the record contains the sizes of the installed files.
    """
    data = replace(data, prefix, target)
    objects: dict[bytes, tuple[int, int]] = {}
    for found in re.finditer(rb'\{[^{}]*?"_path":\s*("(?:[^"\\]|\\.)*")[^{}]*\}', data):
        objects[str(json.loads(found[1])).encode()] = found.span()
    edits: list[tuple[int, int, bytes]] = []
    for path, content in made.items():
        if path not in objects:
            continue
        start, end = objects[path]
        entry = data[start:end]
        key = rb"sha256_in_prefix" if b'"sha256_in_prefix"' in entry else rb"sha256"
        sha256 = hashlib.sha256(content).hexdigest().encode()
        entry = re.sub(rb'("%s":\s*")[0-9a-f]*"' % key, rb'\g<1>%s"' % sha256, entry)
        if sizes:
            entry = re.sub(rb'("size_in_bytes":\s*)\d+', rb"\g<1>%d" % len(content), entry)
        edits.append((start, end, entry))
    for start, end, entry in sorted(edits, reverse=True):
        data = data[:start] + entry + data[end:]
    return data


def record_rows(record: bytes, path: bytes) -> Iterator[tuple[bytes, str, str]]:
    """Iterate over the (path in the tree, hash, size) of each file that a RECORD lists.

    Args:
        path: of the RECORD in the tree.
    """
    site = posixpath.dirname(posixpath.dirname(path))
    for line in record.splitlines():
        row = _row(line)
        if row is not None:
            yield posixpath.normpath(posixpath.join(site, row[0].encode())), row[1], row[2]


def _row(line: bytes) -> list[str] | None:
    try:
        found = next(csv.reader([line.decode()]), [])
    except (UnicodeDecodeError, csv.Error):
        return None
    return found if len(found) == 3 else None


def record_hash(data: bytes) -> str:
    """Compute a hash in the form of RECORD."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def replace_record(data: bytes, path: bytes, prefix: bytes, target: bytes, made: Mapping[bytes, bytes]) -> bytes:
    """Rewrite a RECORD for another prefix.

    Args:
        path: of the RECORD in the tree.
        made: the rewritten content of the files that name the prefix, by their paths in the tree.
    """
    site = posixpath.dirname(posixpath.dirname(path))
    lines: list[bytes] = []
    for line in replace(data, prefix, target).splitlines(keepends=True):
        row = _row(line)
        content = None
        if row is not None and row[1]:
            content = made.get(posixpath.normpath(posixpath.join(site, row[0].encode())))
        if row is None or content is None:
            lines.append(line)
            continue
        bare = line.rstrip(b"\r\n")
        head = bare[: -len(f"{row[1]},{row[2]}")]
        lines.append(head + f"{record_hash(content)},{len(content)}".encode() + line[len(bare) :])
    return b"".join(lines)
