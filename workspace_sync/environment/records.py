"""What conda's records say (``conda-meta/*.json``): which files a package has, and how they name the prefix.

Source: https://conda.org/learn/ceps/cep-0034/.
"""

from __future__ import annotations

import msgspec


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
