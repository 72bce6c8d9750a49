"""``bin/conda-unpack`` of a packed environment: write the environment's current prefix into its files.

It is packed as a zip that Python can run, together with the modules that it needs. A host therefore needs no package
to run it. Like conda-pack's script of this name, it runs once, after any tool has extracted the archive.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zipfile

from workspace_sync.environment.rewriting import rewritten

#: The member of the zip that lists the files: [path, kind, prefix, space, files, places], indexes last.
FILES = "files.json"


def unpack(script: str) -> int:
    """Rewrite the files of the environment that contains this script; return the number of files."""
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(script)))
    with zipfile.ZipFile(script) as archive:
        entries = json.loads(archive.read(FILES))

    def read(path: bytes) -> bytes:
        with open(os.path.join(os.fsencode(prefix), path), "rb") as file:
            return file.read()

    target = os.fsencode(prefix)
    for name, kind, old, space, files, places in entries:
        path = name.encode("utf-8", "surrogateescape")
        how = (
            kind,
            old.encode("utf-8", "surrogateescape"),
            space,
            [each.encode("utf-8", "surrogateescape") for each in files],
            [tuple(part.encode("utf-8", "surrogateescape") for part in pair) for pair in places],
        )
        before = read(path)
        after = rewritten(how, before, target, os.path.join(os.path.dirname(target), b"tree"), path, read)
        if after != before:
            _replace(os.path.join(target, path), after)
    return len(entries)


def _replace(path: bytes, data: bytes) -> None:
    about = os.stat(path, follow_symlinks=False)
    fd, new = tempfile.mkstemp(prefix=b".", dir=os.path.dirname(path))
    with open(fd, "wb") as file:
        file.write(data)
    os.chmod(new, about.st_mode & 0o777)
    os.utime(new, ns=(about.st_mtime_ns, about.st_mtime_ns))
    os.replace(new, path)


def main() -> None:
    """Run as ``bin/conda-unpack``."""
    script = sys.argv[0]
    count = unpack(script)
    print(f"conda-unpack: {count} files name {os.path.dirname(os.path.dirname(os.path.abspath(script)))} now")
    # Its list of prefixes is no longer valid.
    os.unlink(script)
