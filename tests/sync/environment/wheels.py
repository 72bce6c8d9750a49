"""Wheels that are built here, and venvs that they are installed into."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path


def wheel(
    folder: Path,
    name: str,
    files: Mapping[str, str | bytes],
    *,
    version: str = "1.0",
    scripts: Mapping[str, str] | None = None,
    direct: Mapping[str, str] | None = None,
) -> Path:
    """Build a wheel.

    Args:
        files: by path in ``site-packages``.
        scripts: entry points by the name of the script.
        direct: more files of its ``.dist-info``.
    """
    info = f"{name}-{version}.dist-info"
    points = "".join(f"{script} = {to}\n" for script, to in (scripts or {}).items())
    content: dict[str, bytes] = {
        path: data if isinstance(data, bytes) else data.encode() for path, data in files.items()
    }
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if points:
        content[f"{info}/entry_points.txt"] = f"[console_scripts]\n{points}".encode()
    for extra, text in (direct or {}).items():
        content[f"{info}/{extra}"] = text.encode()
    rows = [f"{path},{_hash(data)},{len(data)}\n" for path, data in content.items()]
    content[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in content.items():
            member = zipfile.ZipInfo(file)
            member.external_attr = (0o100755 if ".data/scripts/" in file else 0o100644) << 16
            archive.writestr(member, data)
    return path


def _hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def venv(prefix: Path, *wheels: Path) -> Path:
    """Make a venv, and install wheels into it with this environment's pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    if wheels:
        pip(prefix, *map(str, wheels))
    return prefix


def pip(prefix: Path, *what: str) -> None:
    """Install into a venv, from local files only."""
    command = [sys.executable, "-m", "pip", "--python", prefix / "bin" / "python", "--disable-pip-version-check"]
    subprocess.run(
        [*command, "install", "--quiet", "--no-index", "--no-deps", *what], check=True, stdin=subprocess.DEVNULL
    )
