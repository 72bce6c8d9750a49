"""What installers write down about files: conda's records (``conda-meta/*.json``) and wheels' RECORD.

Both hold hashes of files as they stand in the prefix, so a record changes with the files that it lists. Records are
edited where they stand and never dumped again, so that they keep the form that their installer gave them.

Source: conda's "paths_data" (https://conda.org/learn/ceps/cep-0034/); RECORD: PEP 376, PEP 427, and
https://packaging.python.org/en/latest/specifications/recording-installed-packages/.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping

import msgspec

from workspace_sync.environment.text import replace


class CondaPath(msgspec.Struct, rename={"path": "_path"}):
    """A file that a conda package has installed.

    Attributes:
        path: in the prefix.
        path_type: "hardlink", "softlink", "directory", "unix_python_entry_point", "pyc_file" …
        sha256: of the file in the package (hex).
        sha256_in_prefix: of the file as it was installed, if the record has it.
        size_in_bytes: in the package (conda) or in the prefix (rattler).
        file_mode: "text" or "binary", for a file that names the prefix.
        prefix_placeholder: the prefix at which it was built, for such a file.
    """

    path: str
    path_type: str = "hardlink"
    sha256: str | None = None
    sha256_in_prefix: str | None = None
    size_in_bytes: int | None = None
    file_mode: str | None = None
    prefix_placeholder: str | None = None


class _Paths(msgspec.Struct):
    paths: list[CondaPath] = []


class CondaRecord(msgspec.Struct):
    """What conda or rattler has written down about one package.

    Attributes:
        name: of the package.
        version: of the package.
        build: tells apart builds of one version.
        url: where it came from.
        subdir: the platform that it is for, or "noarch".
        noarch: "python", "generic", or None.
        files: its paths in the prefix.
        paths_data: the same with hashes.
    """

    name: str
    version: str = ""
    build: str = ""
    url: str = ""
    subdir: str = ""
    noarch: str | bool | None = None
    files: list[str] = []
    paths_data: _Paths = msgspec.field(default_factory=_Paths)


def conda_record(data: bytes) -> CondaRecord | None:
    """A record of ``conda-meta``, or None if the file is none."""
    try:
        return msgspec.json.decode(data, type=CondaRecord)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def replace_conda_record(
    data: bytes, prefix: bytes, target: bytes, made: Mapping[bytes, bytes], *, sizes: bool
) -> bytes:
    """A record as it would be at another prefix.

    Args:
        made: the content there of the files that name the prefix, by their paths in it.
        sizes: whether the record has the sizes of files as they were installed.
    """
    data = replace(data, prefix, target)
    objects: dict[bytes, tuple[int, int]] = {}
    for found in re.finditer(rb'\{[^{}]*?"_path":\s*("(?:[^"\\]|\\.)*")[^{}]*\}', data):
        objects[msgspec.json.decode(found[1], type=str).encode()] = found.span()
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


def rows(record: bytes, path: bytes) -> Iterator[tuple[bytes, str, str]]:
    """The (path in the tree, hash, size) of each file that a RECORD lists.

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
    """A hash as RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def replace_record(data: bytes, path: bytes, prefix: bytes, target: bytes, made: Mapping[bytes, bytes]) -> bytes:
    """A RECORD as it would be at another prefix.

    Args:
        path: of the RECORD in the tree.
        made: the content there of the files that name the prefix, by their paths in the tree.
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
