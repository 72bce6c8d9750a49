"""A local conda channel, with packages that are built here, and environments that py-rattler installs from it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rattler
from rattler import index

#: What packages are built at: 255 bytes, as with conda-build.
PLACEHOLDER = ("/opt/" + "placehold_" * 30)[:255]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
# What a Python needs to start, run scripts and read its configuration; the rest would only cost time.
_LEFT_OUT = {
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
    "site-packages",
    "__pycache__",
    "distutils",
    "pydoc_data",
    "unittest",
    "asyncio",
    "multiprocessing",
    "concurrent",
    "sqlite3",
    "xml",
    "wsgiref",
    "dbm",
    "curses",
}
_MODULES_LEFT_OUT = ("_test", "_codecs_", "_xx", "xx", "_tkinter", "_ctypes", "_decimal", "_sqlite3")


@dataclass
class Channel:
    """A folder of packages.

    Attributes:
        folder: with ``noarch`` and the platform's folder.
        cache: where packages are unpacked, shared by all environments.
    """

    folder: Path
    cache: Path

    def package(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        links: Mapping[str, str] | None = None,
        noarch: str | None = None,
        depends: Sequence[str] = (),
        entry_points: Sequence[str] = (),
        placeholder: str = PLACEHOLDER,
        version: str = "1.0",
    ) -> Path:
        """Build a package; files in ``bin`` and shared libraries can be executed."""
        subdir = "noarch" if noarch else str(rattler.Subdir.current())
        about = {
            "name": name,
            "version": version,
            "build": "0",
            "build_number": 0,
            "depends": list(depends),
            "subdir": subdir,
            "timestamp": 1700000000000,
        }
        if noarch:
            about["noarch"] = noarch
        info = {
            "info/index.json": json.dumps(about).encode(),
            "info/paths.json": json.dumps(
                {"paths_version": 1, "paths": [*_paths(files, links or {}, placeholder)]}
            ).encode(),
            "info/files": "\n".join([*files, *(links or {})]).encode(),
        }
        if noarch == "python":
            link = {"noarch": {"type": "python", "entry_points": [*entry_points]}, "package_metadata_version": 1}
            info["info/link.json"] = json.dumps(link).encode()
        path = self.folder / subdir / f"{name}-{version}-0.tar.bz2"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:bz2", compresslevel=1) as archive:
            for file, data in {**info, **files}.items():
                member = tarfile.TarInfo(file)
                member.size, member.mtime = len(data), 1700000000
                member.mode = 0o755 if file.startswith("bin/") or file.endswith(".so") else 0o644
                archive.addfile(member, io.BytesIO(data))
            for file, target in (links or {}).items():
                member = tarfile.TarInfo(file)
                member.type, member.linkname = tarfile.SYMTYPE, target
                archive.addfile(member)
        return path

    def index(self) -> None:
        """Bring the channel's list of packages up to date."""
        asyncio.run(index.index_fs(self.folder))

    def install(self, prefix: str | os.PathLike[str], *specs: str) -> Path:
        """Install packages as conda would."""

        async def install() -> None:
            records = await rattler.solve([rattler.Channel(self.folder.as_uri())], [*specs], virtual_packages=[])
            await rattler.install(records, prefix, cache_dir=self.cache, show_progress=False)

        asyncio.run(install())
        return Path(prefix)


def _paths(files: Mapping[str, bytes], links: Mapping[str, str], placeholder: str) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for path, data in files.items():
        entry: dict[str, object] = {
            "_path": path,
            "path_type": "hardlink",
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_in_bytes": len(data),
        }
        if placeholder.encode() in data:
            entry |= {"prefix_placeholder": placeholder, "file_mode": "binary" if b"\0" in data else "text"}
        entries.append(entry)
    empty = hashlib.sha256(b"").hexdigest()
    entries += ({"_path": path, "path_type": "softlink", "sha256": empty, "size_in_bytes": 0} for path in links)
    return entries


def build(folder: Path) -> Channel:
    """A channel with one package of each kind."""
    channel = Channel(folder / "channel", folder / "cache")
    at = PLACEHOLDER.encode()
    channel.package(
        "texts",
        {
            "bin/of-perl": b"#!" + at + b"/bin/perl -w\nprint '" + at + b"/lib';\n",
            "bin/of-python": b"#!" + at + b"/bin/python\nprint('" + at + b"/lib')\n",
            "bin/of-shell": b"#!/bin/sh\nexec " + at + b"/bin/x\n",
            "bin/quiet": b"#!" + at + b"/bin/perl\nprint 1;\n",
            "lib/pkgconfig/texts.pc": b"prefix=" + at + b"\nlibdir=${prefix}/lib\ncflags=-I" + at + b"/include\n",
            "etc/plain.conf": b"nothing of the kind\n",
            "share/odd \xc3\xa9.txt".encode("latin-1").decode("latin-1"): b"at " + at,
        },
        links={"lib/texts.pc": "pkgconfig/texts.pc"},
    )
    source = folder / "where.c"
    source.write_text(
        f'#include <stdio.h>\nint main(void) {{ puts("{PLACEHOLDER}/share:{PLACEHOLDER}/lib"); return 0; }}\n'
    )
    subprocess.run(["cc", "-O1", "-s", "-o", folder / "where", source], check=True)
    channel.package(
        "codes", {"bin/where": (folder / "where").read_bytes(), "share/plain.dat": b"\0\1data"}, depends=["texts"]
    )
    channel.package(
        "pure",
        {
            "site-packages/pure/__init__.py": b"def main():\n    print('pure')\n",
            "site-packages/pure-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: pure\nVersion: 1.0\n",
            "site-packages/pure-1.0.dist-info/RECORD": b"pure/__init__.py,,\n",
        },
        noarch="python",
        depends=["python"],
        entry_points=["pure = pure:main"],
    )
    channel.package("python", *_python(folder), placeholder=sys.base_prefix, version=VERSION + ".0")
    channel.index()
    return channel


def _python(folder: Path) -> tuple[dict[str, bytes]]:
    """The Python of this machine, trimmed."""
    base = Path(sys.base_prefix)
    files: dict[str, bytes] = {}
    for root, folders, names in os.walk(base / "lib" / f"python{VERSION}"):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith("config-")]
        for name in names:
            if root.endswith("lib-dynload") and name.startswith(_MODULES_LEFT_OUT):
                continue
            path = Path(root) / name
            files[str(path.relative_to(base))] = path.read_bytes()
    executable = _stripped(Path(os.path.realpath(sys.executable)), folder)
    for name in ("python", f"python{VERSION}"):
        files[f"bin/{name}"] = executable
    for library in base.glob("lib/libpython3*.so*"):
        files[str(library.relative_to(base))] = _stripped(library, folder)
    files[f"lib/python{VERSION}/site-packages/README.txt"] = b"for modules\n"
    return (files,)


def _stripped(code: Path, folder: Path) -> bytes:
    copy = folder / "stripped"
    shutil.copyfile(code, copy)
    subprocess.run(["strip", copy], check=True)
    return copy.read_bytes()
