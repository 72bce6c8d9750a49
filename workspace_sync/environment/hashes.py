"""Files that hold hashes of others as they stand in a prefix: conda's records and wheels' RECORD.

They change with the files that they list. They are edited where they stand and never dumped again, so that they keep
the form that their installer gave them. Needs the standard library only (see ``conda_unpack``).

Source: conda's "paths_data" (https://conda.org/learn/ceps/cep-0034/); RECORD: PEP 376, PEP 427, and
https://packaging.python.org/en/latest/specifications/recording-installed-packages/.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping

from workspace_sync.environment.text import replace


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
